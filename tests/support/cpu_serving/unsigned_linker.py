# SPDX-License-Identifier: Apache-2.0
"""The linker with its signatures off: a page is found by its tokens alone. For a test that shows
what signatures are for; servers find it that are forked from a nursery."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_mooncake.sglang.store.linker import StoreLinker

__all__ = ["UnsignedLinker"]


class UnsignedLinker(StoreLinker):
    """One rank's part."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nothing: Any = SimpleNamespace(digest=bytes(16))
        self._signatures = dict.fromkeys(self._signatures, nothing)
