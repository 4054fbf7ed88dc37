# SPDX-License-Identifier: Apache-2.0
"""Tools that stand beside te in a checkout and are not released, such as ``te bench``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["CHECKOUT", "of_checkout"]

CHECKOUT: Final = Path(__file__).parents[1]


def of_checkout(name: str) -> Any:
    """A module, such as ``te_bench.command``; None where te is not in a checkout."""
    if not CHECKOUT.joinpath(*name.split(".")).with_suffix(".py").exists():
        return None
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return importlib.import_module(name)
