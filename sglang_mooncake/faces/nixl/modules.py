# SPDX-License-Identifier: Apache-2.0
"""What the modules of the package ``nixl`` hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from sglang_mooncake.faces.finder import made
from sglang_mooncake.faces.nixl import api, utils
from sglang_mooncake.faces.nixl.descriptors import RegDList, RemoteDList, XferDList
from sglang_mooncake.faces.nixl.low import INIT_AGENT
from sglang_mooncake.faces.nixl.names import (
    ERRORS,
    AgentConfig,
    NixlError,
    Operation,
    Segment,
    Status,
    ThreadSync,
)
from sglang_mooncake.faces.nixl.options import Options
from sglang_mooncake.faces.nixl.requests import Telemetry
from sglang_mooncake.faces.nixl.storage import StoringAgent

__all__ = ["modules"]


def modules(options: Options, packages: Sequence[str]) -> dict[str, ModuleType]:
    """Of each package itself and its parts, by their names. Packages share their parts, so that
    there is one class of each name. Agents have these options."""
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
    found = {package: _module(package, public | parts) for package in packages}
    for package in packages:
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
    return made(name, contents, "NIXL's names over te, of the package sglang-mooncake.")
