# SPDX-License-Identifier: Apache-2.0
"""Makes ``import nixl`` in this process mean te, under all the names by which NIXL's packages are
imported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from sglang_mooncake.nixl_face import api, utils
from sglang_mooncake.nixl_face.descriptors import RegDList, RemoteDList, XferDList
from sglang_mooncake.nixl_face.low import INIT_AGENT
from sglang_mooncake.nixl_face.names import (
    ERRORS,
    AgentConfig,
    NixlError,
    Operation,
    Segment,
    Status,
    ThreadSync,
)
from sglang_mooncake.nixl_face.opened import Options
from sglang_mooncake.nixl_face.requests import Telemetry
from sglang_mooncake.nixl_face.storage import StoringAgent

__all__ = ["PACKAGES", "install", "modules"]

PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm")
"""NIXL's own, and those for each kind of GPU, which some users try first."""

_PARTS: Final = ("_api", "_bindings", "_utils", "logging")


class _Finder(MetaPathFinder, Loader):
    """Has modules by name, and gives out the same ones whenever they are asked for."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib gives it
        target: ModuleType | None = None,  # noqa: ARG002 - and this
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = ModuleSpec(fullname, self, origin=__file__, is_package=fullname in PACKAGES)
        spec.has_location = True  # An ImportError names this file, and so whose module it is.
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It was filled when it was made."""


def install(options: Options) -> None:
    """From now on, imports of ``nixl`` and of the packages in `PACKAGES` get agents over te with
    these options. Of several calls the last one counts, for what is imported after it.

    Raises:
        RuntimeError: the process has imported NVIDIA's package already.
    """
    names = [*PACKAGES, *(f"{package}.{part}" for package in PACKAGES for part in _PARTS)]
    for name in names:
        loaded = sys.modules.get(name)
        if loaded is not None and not isinstance(loaded.__loader__, _Finder):
            raise RuntimeError(
                f"this process has imported {name} already, and not te's: install te's before"
            )
    for name in names:
        sys.modules.pop(name, None)
    others = [one for one in sys.meta_path if not isinstance(one, _Finder)]
    sys.meta_path[:] = [_Finder(modules(options)), *others]


def modules(options: Options) -> dict[str, ModuleType]:
    """By all their names. Modules of one call share their classes, and agents their options."""
    bindings = _module("nixl._bindings", _bindings(options))
    agent = type("nixl_agent", (api.nixl_agent,), {"bindings": bindings})
    of_api = {name: getattr(api, name) for name in api.__all__} | {
        "nixl_agent": agent,
        "nixlBind": bindings,
    }
    parts = {
        "_api": _module("nixl._api", of_api),
        "_bindings": bindings,
        "_utils": _module("nixl._utils", {name: getattr(utils, name) for name in utils.__all__}),
        "logging": _module("nixl.logging", {"get_logger": logging.getLogger}),
    }
    public = {name: of_api[name] for name in api.__all__}
    found = {package: _module(package, public | parts) for package in PACKAGES}
    for package in PACKAGES:
        found |= {f"{package}.{part}": module for part, module in parts.items()}
    return found


def _bindings(options: Options) -> dict[str, Any]:
    """What ``nixl._bindings`` holds."""
    members = {one.name: one for kind in (Segment, Operation, Status) for one in kind}
    return {
        **members,
        # One of them is another name of the same value, and so no member.
        **ThreadSync.__members__,
        **ERRORS,
        "Error": NixlError,
        "nixl_mem_t": Segment,
        "nixl_xfer_op_t": Operation,
        "nixl_status_t": Status,
        "nixl_thread_sync_t": ThreadSync,
        "NIXL_COST_ANALYTICAL_BACKEND": 0,
        "NIXL_INIT_AGENT": INIT_AGENT,
        "DEFAULT_COMM_PORT": api.DEFAULT_COMM_PORT,
        "HAVE_UCX_GPU_DEVICE_API": False,
        "nixlXferDList": XferDList,
        "nixlRegDList": RegDList,
        "nixlRemoteDList": RemoteDList,
        "nixlXferTelemetry": Telemetry,
        "nixlAgentConfig": AgentConfig,
        "nixlAgent": type("nixlAgent", (StoringAgent,), {"options": options}),
    }


def _module(name: str, contents: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name, "NIXL's names over te, of the package sglang-mooncake.")
    vars(module).update(contents)
    return module
