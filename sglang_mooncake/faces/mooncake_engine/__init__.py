# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine`` over te, for code that was written for Mooncake's engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from sglang_mooncake.faces.finder import made, put_in_place
from sglang_mooncake.faces.mooncake_engine.options import OpenEngine, Options

__all__ = ["PACKAGES", "OpenEngine", "Options", "install"]

PACKAGES: Final = ("mooncake",)
MODULE: Final = "mooncake.engine"
_SAYS: Final = "Mooncake's names over te, of the package sglang-mooncake."


def install(options: Options) -> None:
    """From now on, imports of ``mooncake.engine`` get te's ``TransferEngine`` with these options,
    and the names of `names.CONTENTS`. Other modules of the mooncake package, where it is installed,
    stay its own. Of several calls the last one counts, for what is imported after it.

    Raises:
        RuntimeError: the process has imported Mooncake's own ``mooncake.engine`` already.
    """

    def make() -> Mapping[str, ModuleType]:
        from sglang_mooncake.faces.mooncake_engine.engine import TransferEngine
        from sglang_mooncake.faces.mooncake_engine.names import CONTENTS

        name = TransferEngine.__name__
        engine = type(name, (TransferEngine,), {"options": options})
        return {MODULE: made(MODULE, {name: engine, **CONTENTS}, _SAYS)}

    put_in_place(
        MODULE, __file__, (MODULE,), make, {name: made(name, {}, _SAYS) for name in PACKAGES}
    )
