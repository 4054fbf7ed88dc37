# SPDX-License-Identifier: Apache-2.0
"""``mooncake.store`` over kvstore, for code that was written for Mooncake's store."""

from __future__ import annotations

from typing import Final

from sglang_mooncake.faces.finder import made, put_in_place
from sglang_mooncake.faces.mooncake_store.buffers import BufferHandle, MooncakeHostMemAllocator
from sglang_mooncake.faces.mooncake_store.names import CONTENTS, lacking
from sglang_mooncake.faces.mooncake_store.opened import Options
from sglang_mooncake.faces.mooncake_store.settings import Setup
from sglang_mooncake.faces.mooncake_store.store import MooncakeDistributedStore

__all__ = ["MooncakeDistributedStore", "Options", "Setup", "install"]

PACKAGE: Final = "mooncake"
MODULE: Final = f"{PACKAGE}.store"
_SAYS: Final = "Mooncake's names over kvstore, of the package sglang-mooncake."


def install(options: Options) -> None:
    """From now on, imports of ``mooncake.store`` get the store with these options. Other modules of
    the mooncake package, where it is installed, stay its own. Of several calls the last one counts,
    for what is imported after it.

    Raises:
        RuntimeError: the process has imported Mooncake's own ``mooncake.store`` already.
    """
    name = MooncakeDistributedStore.__name__
    contents = {
        name: type(name, (MooncakeDistributedStore,), {"options": options}),
        "BufferHandle": BufferHandle,
        "MooncakeHostMemAllocator": MooncakeHostMemAllocator,
        "__getattr__": lacking,
        **CONTENTS,
    }
    put_in_place(
        MODULE,
        __file__,
        {MODULE: made(MODULE, contents, _SAYS)},
        {PACKAGE: made(PACKAGE, {}, _SAYS)},
    )
