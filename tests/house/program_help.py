# SPDX-License-Identifier: Apache-2.0
"""What programs print for ``--help``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence

import pytest

__all__ = ["help_of"]


def help_of(main: Callable[[Sequence[str]], object], *words: str) -> str:
    """Of the program, or of the command that the words begin."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    return printed.getvalue()
