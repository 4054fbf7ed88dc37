# SPDX-License-Identifier: Apache-2.0
"""How imports of others' names get a face's modules in this process."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

__all__ = ["Make", "lacking", "made", "put_in_place"]

logger = logging.getLogger(__name__)

Make = Callable[[], Mapping[str, ModuleType]]
"""Makes a face's modules, by their names."""


class _Finder(MetaPathFinder, Loader):
    """Knows modules by name. Has them made when the first is asked for, and gives out the same ones
    ever after: a process that imports none does not pay for them."""

    def __init__(self, face: str, origin: str, names: Collection[str], make: Make) -> None:
        self.face: Final = face
        self._origin, self._names, self._make = origin, names, make
        self._lock = threading.Lock()
        self._made: Mapping[str, ModuleType] | None = None

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib gives it
        target: ModuleType | None = None,  # noqa: ARG002 - and this
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        is_package = "." not in fullname
        spec = ModuleSpec(fullname, self, origin=self._origin, is_package=is_package)
        spec.has_location = True  # An ImportError names this file, and so whose module it is.
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It was filled when it was made."""


def put_in_place(
    face: str,
    origin: str,
    names: Collection[str],
    make: Make,
    packages: Mapping[str, ModuleType] | None = None,
) -> None:
    """From now on, imports of these names get the modules that ``make`` makes. Of several calls for
    a face the last one counts, for what is imported after it.

    Args:
        origin: the file that an ImportError names.
        packages: modules that are found only if nobody else has any of that name.

    Raises:
        RuntimeError: the process has imported one of ``names`` already, and not from here.
    """
    for name in names:
        loaded = sys.modules.get(name)
        if loaded is not None and not isinstance(loaded.__loader__, _Finder):
            raise RuntimeError(
                f"this process has imported {name} already, and not te's: install te's before"
            )
    for name in names:
        sys.modules.pop(name, None)
    others = [one for one in sys.meta_path if not (isinstance(one, _Finder) and one.face == face)]
    last = [_Finder(face, origin, packages, lambda: packages)] if packages else []
    sys.meta_path[:] = [_Finder(face, origin, names, make), *others, *last]


def made(name: str, contents: Mapping[str, Any], says: str) -> ModuleType:
    """A module with these names."""
    module = ModuleType(name, says)
    vars(module).update(contents)
    return module


def lacking(module: str, package: str, known: Mapping[str, str]) -> Callable[[str], object]:
    """A module's ``__getattr__``. Always raises ``AttributeError``, which ``from … import`` turns
    into an ``ImportError`` without its text: for names that ``package`` has the log has that, too.

    Args:
        module: as messages call it.
        known: names that ``package`` has, and why ``module`` does not.
    """

    def missing(name: str) -> object:
        said = f"{module} has no {name}"
        if name in known:
            said += f": {known[name]}; it is in the {package} package"
            logger.warning("%s", said)
        raise AttributeError(said)

    return missing
