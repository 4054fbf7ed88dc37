# SPDX-License-Identifier: Apache-2.0
"""How imports of others' names get a face's modules in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

__all__ = ["made", "put_in_place"]


class _Finder(MetaPathFinder, Loader):
    """Has modules by name, and gives out the same ones whenever they are asked for."""

    def __init__(self, face: str, origin: str, modules: Mapping[str, ModuleType]) -> None:
        self.face: Final = face
        self._origin = origin
        self._modules = modules

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib gives it
        target: ModuleType | None = None,  # noqa: ARG002 - and this
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        is_package = "." not in fullname
        spec = ModuleSpec(fullname, self, origin=self._origin, is_package=is_package)
        spec.has_location = True  # An ImportError names this file, and so whose module it is.
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It was filled when it was made."""


def put_in_place(
    face: str,
    origin: str,
    modules: Mapping[str, ModuleType],
    where_there_are_none: Mapping[str, ModuleType] | None = None,
) -> None:
    """From now on, imports of these names get these modules. Of several calls for a face the last
    one counts, for what is imported after it.

    Args:
        origin: the file that an ImportError names.
        where_there_are_none: modules that are found only if nobody else has any of that name.

    Raises:
        RuntimeError: the process has imported one of ``modules`` already, and not from here.
    """
    for name in modules:
        loaded = sys.modules.get(name)
        if loaded is not None and not isinstance(loaded.__loader__, _Finder):
            raise RuntimeError(
                f"this process has imported {name} already, and not te's: install te's before"
            )
    for name in modules:
        sys.modules.pop(name, None)
    others = [one for one in sys.meta_path if not (isinstance(one, _Finder) and one.face == face)]
    last = _Finder(face, origin, where_there_are_none or {})
    sys.meta_path[:] = [_Finder(face, origin, modules), *others, last]


def made(name: str, contents: Mapping[str, Any], says: str) -> ModuleType:
    """A module with these names."""
    module = ModuleType(name, says)
    vars(module).update(contents)
    return module
