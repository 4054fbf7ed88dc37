# SPDX-License-Identifier: Apache-2.0
"""Python imports a module of this name when it starts. This one waits until a program imports a
package that is to be replaced; a program that imports none pays nothing. Another `sitecustomize`,
further back on the path, is imported as it would have been."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_NAMES = ("mooncake", "nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm")


class _Waiting(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib gives it
        target: ModuleType | None = None,  # noqa: ARG002 - and this
    ) -> ModuleSpec | None:
        if fullname not in _NAMES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        from sglang_mooncake.sglang.drop_in import register

        register()
        return importlib.util.find_spec(fullname)


def _run_the_next() -> None:
    here = Path(__file__).parent.resolve()
    others = [one for one in sys.path if Path(one).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Waiting())
_run_the_next()
