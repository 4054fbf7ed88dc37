# SPDX-License-Identifier: Apache-2.0
"""What the operator says of ``mooncake.store`` over kvstore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_mooncake.faces.mooncake_store.settings import Setup

if TYPE_CHECKING:  # A process that sets up no store does without.
    from kvstore.store import Store

__all__ = ["OpenStore", "Options"]

OpenStore = Callable[[Setup], "Store"]
"""Makes the store that the arguments of ``setup`` ask for."""


@dataclass(frozen=True)
class Options:
    """What the operator says, and Mooncake's arguments do not."""

    open_store: OpenStore
