# SPDX-License-Identifier: Apache-2.0
"""``nixl`` over te, for code that was written for NVIDIA's NIXL."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from sglang_mooncake.faces.finder import put_in_place
from sglang_mooncake.faces.nixl.options import Notices, OpenEngine, Options

__all__ = ["PACKAGES", "Notices", "OpenEngine", "Options", "install"]

PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm")
"""NIXL's own, and those for each kind of GPU, which some users try first."""
_PARTS: Final = ("_api", "_bindings", "_utils", "logging")


def install(options: Options) -> None:
    """From now on, imports of ``nixl`` and of the packages in `PACKAGES` get agents over te with
    these options. Of several calls the last one counts, for what is imported after it.

    Raises:
        RuntimeError: the process has imported NVIDIA's package already.
    """

    def make() -> Mapping[str, ModuleType]:
        from sglang_mooncake.faces.nixl.modules import modules

        return modules(options, PACKAGES)

    names = [*PACKAGES, *(f"{package}.{part}" for package in PACKAGES for part in _PARTS)]
    put_in_place("nixl", __file__, names, make)
