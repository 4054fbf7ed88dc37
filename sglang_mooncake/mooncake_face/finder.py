# SPDX-License-Identifier: Apache-2.0
"""Makes ``from mooncake.engine import TransferEngine`` in this process mean te."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from sglang_mooncake.mooncake_face.engine import TransferEngine
from sglang_mooncake.mooncake_face.names import CONTENTS, lacking
from sglang_mooncake.mooncake_face.opened import Options

__all__ = ["install"]

PACKAGE: Final = "mooncake"
ENGINE: Final = f"{PACKAGE}.engine"


class _Finder(MetaPathFinder, Loader):
    """Knows one module."""

    def __init__(self, name: str, contents: dict[str, object]) -> None:
        self.name: Final = name
        self._contents = contents

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib gives it
        target: ModuleType | None = None,  # noqa: ARG002 - and this
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = ModuleSpec(fullname, self, origin=__file__, is_package=fullname == PACKAGE)
        spec.has_location = True  # An ImportError names this file, and so whose module it is.
        return spec

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._contents)


def install(options: Options) -> None:
    """From now on, imports of ``mooncake.engine`` get te's ``TransferEngine`` with these options,
    and the names of `names.CONTENTS`.

    Nothing else changes: where the mooncake package is installed, its other modules
    (``mooncake.store``) are still its own, and where it is not, they are still missing. Of several
    calls the last one counts, for what is imported after it.

    Raises:
        RuntimeError: the process has imported Mooncake's own ``mooncake.engine`` already.
    """
    loaded = sys.modules.get(ENGINE)
    if loaded is not None:
        if not isinstance(loaded.__loader__, _Finder):
            raise RuntimeError(
                f"this process has imported {ENGINE} already, and not te's: install te's before"
            )
        del sys.modules[ENGINE]
    others = [one for one in sys.meta_path if not isinstance(one, _Finder)]
    face = type(TransferEngine.__name__, (TransferEngine,), {"options": options})
    contents = {"TransferEngine": face, "__getattr__": lacking, **CONTENTS}
    engine, package = _Finder(ENGINE, contents), _Finder(PACKAGE, {})
    # The package itself only where nobody else has one.
    sys.meta_path[:] = [engine, *others, package]
