# SPDX-License-Identifier: Apache-2.0
"""``mooncake.store`` over kvstore, for code that was written for Mooncake's store."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from sglang_mooncake.faces.finder import made, put_in_place
from sglang_mooncake.faces.mooncake_store.options import OpenStore, Options

__all__ = ["PACKAGES", "OpenStore", "Options", "install"]

PACKAGES: Final = ("mooncake",)
MODULE: Final = "mooncake.store"
_SAYS: Final = "Mooncake's names over kvstore, of the package sglang-mooncake."


def install(options: Options) -> None:
    """From now on, imports of ``mooncake.store`` get the store with these options. Other modules of
    the mooncake package, where it is installed, stay its own. Of several calls the last one counts,
    for what is imported after it.

    Raises:
        RuntimeError: the process has imported Mooncake's own ``mooncake.store`` already.
    """

    def make() -> Mapping[str, ModuleType]:
        from sglang_mooncake.faces.mooncake_store.buffers import (
            BufferHandle,
            MooncakeHostMemAllocator,
        )
        from sglang_mooncake.faces.mooncake_store.names import CONTENTS
        from sglang_mooncake.faces.mooncake_store.store import MooncakeDistributedStore

        name = MooncakeDistributedStore.__name__
        contents = {
            name: type(name, (MooncakeDistributedStore,), {"options": options}),
            "BufferHandle": BufferHandle,
            "MooncakeHostMemAllocator": MooncakeHostMemAllocator,
            **CONTENTS,
        }
        return {MODULE: made(MODULE, contents, _SAYS)}

    put_in_place(
        MODULE, __file__, (MODULE,), make, {name: made(name, {}, _SAYS) for name in PACKAGES}
    )
