# SPDX-License-Identifier: Apache-2.0
"""Files and objects, which te does not move: NVIDIA's own package moves them, where it is installed
beside this one. An agent that creates a backend for storage has an agent of that package, and hands
it what names storage; memory is registered with both, so that either finds it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from sglang_mooncake.faces.nixl.descriptors import RegDList, XferDList
from sglang_mooncake.faces.nixl.low import Agent
from sglang_mooncake.faces.nixl.names import ERRORS, AgentConfig, Operation, Status
from sglang_mooncake.faces.nixl.prepared import Indices

__all__ = ["StoringAgent", "installed"]

PACKAGES: Final = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
OF_STORAGE: Final = (
    "3FS",
    "AZURE_BLOB",
    "GDS",
    "GDS_MT",
    "GUSLI",
    "HF3FS",
    "INFINIA",
    "OBJ",
    "POSIX",
)
"""NIXL's backends that move nothing from one agent to another."""


@functools.cache
def installed() -> tuple[Path, tuple[str, ...]] | None:
    """The compiled module of NVIDIA's package, and its backends for storage; None if it is not
    installed. Nothing is loaded."""
    for package in PACKAGES:
        spec = PathFinder.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            folder = Path(place)
            files = (folder / f"_bindings{suffix}" for suffix in EXTENSION_SUFFIXES)
            found = next((one for one in files if one.is_file()), None)
            if found is not None:
                plugins = folder.parent.glob(f".{package}.mesonpy.libs/plugins/libplugin_*.so")
                names = {one.stem.removeprefix("libplugin_") for one in plugins}
                return found, tuple(sorted(names & set(OF_STORAGE)))
    return None


@functools.cache
def _bindings(path: Path) -> ModuleType:
    """Under a name of its own: its own name means te here."""
    name = f"{__name__}._bindings"
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Theirs:
    """NVIDIA's agent. Each call raises our class for an error of theirs."""

    def __init__(self, path: Path, name: str) -> None:
        self._bindings = _bindings(path)
        self._agent = self._bindings.nixlAgent(name, self._bindings.nixlAgentConfig())

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._agent, method)

        def called(*arguments: Any) -> Any:
            try:
                return call(*arguments)
            except Exception as exc:
                ours = ERRORS.get(type(exc).__name__)
                if ours is None:
                    raise
                raise ours(f"NVIDIA's NIXL: {exc}") from exc

        return called

    def converted(self, descs: RegDList | XferDList) -> Any:
        """The same list as their class has it."""
        segment = getattr(self._bindings, descs.getType().name)
        if isinstance(descs, RegDList):
            rows = [(*row[:3], row[3].decode()) for row in descs]
            return self._bindings.nixlRegDList(segment, rows)
        return self._bindings.nixlXferDList(segment, list(descs))

    def operation(self, operation: Operation) -> Any:
        return getattr(self._bindings, Operation(operation).name)

    def status(self, status: Any) -> Status:
        return Status(int(status))


class StoringAgent(Agent):
    """``nixlAgent`` with storage."""

    def __init__(self, name: str, config: AgentConfig) -> None:
        super().__init__(name, config)
        self._theirs: _Theirs | None = None
        #: By our numbers, which both kinds of agents share: their handles.
        self._their_backends: dict[int, Any] = {}
        self._their_lists: dict[int, Any] = {}
        self._their_requests: dict[int, Any] = {}
        #: Lists of memory that were prepared for te, and what they are made of.
        self._memory_lists: dict[int, tuple[str | bytes, XferDList]] = {}

    def getAvailPlugins(self) -> list[str]:  # noqa: N802
        found = installed()
        return super().getAvailPlugins() + list(found[1] if found else ())

    def getPluginParams(self, plugin: str) -> tuple[dict[str, str], list[str]]:  # noqa: N802
        """``nixlNotFoundError`` for one that there is not."""
        if not self._is_storage(plugin):
            return super().getPluginParams(plugin)
        found: tuple[dict[str, str], list[str]] = self._their_agent().getPluginParams(plugin)
        return found

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:  # noqa: N802
        if backend not in self._their_backends:
            return super().getBackendParams(backend)
        found: tuple[dict[str, str], list[str]] = self._their_agent().getBackendParams(
            self._their_backends[backend]
        )
        return found

    def createBackend(self, plugin: str, params: dict[str, str]) -> int:  # noqa: N802
        """Starts te's engine, or their backend for storage."""
        if not self._is_storage(plugin):
            return super().createBackend(plugin, params)
        handle = self._their_agent().createBackend(plugin, params)
        return self._keep(self._their_backends, handle)

    def registerMem(self, descs: RegDList, backends: Sequence[int] = ()) -> Status:  # noqa: N802
        for_te, for_them = self._split(descs, backends)
        if for_te is not None:
            super().registerMem(descs, for_te)
        if for_them is not None:
            theirs = self._their_agent()
            try:
                theirs.registerMem(theirs.converted(descs), for_them)
            except BaseException:
                if for_te is not None:
                    super().deregisterMem(descs, for_te)
                raise
        return Status.NIXL_SUCCESS

    def deregisterMem(self, descs: RegDList, backends: Sequence[int] = ()) -> Status:  # noqa: N802
        for_te, for_them = self._split(descs, backends)
        if for_te is not None:  # First: it may be in use, and the call is made again then.
            super().deregisterMem(descs, for_te)
        if for_them is not None:
            theirs = self._their_agent()
            theirs.deregisterMem(theirs.converted(descs), for_them)
        return Status.NIXL_SUCCESS

    def queryMem(  # noqa: N802
        self, descs: RegDList, backend: int
    ) -> list[dict[str, str] | None]:
        """``nixlNotSupportedError`` for memory."""
        if backend not in self._their_backends:
            return super().queryMem(descs, backend)
        theirs = self._their_agent()
        found: list[dict[str, str] | None] = theirs.queryMem(
            theirs.converted(descs), self._their_backends[backend]
        )
        return found

    def prepXferDlist(  # noqa: N802
        self, agent_name: str | bytes, descs: Any, *rest: Any
    ) -> int:
        """Of memory it is for te, and for them once a transfer wants it there."""
        is_list = isinstance(descs, XferDList)
        if is_list and (descs.getType().is_storage or self._impl is None) and self._theirs:
            return self._keep(self._their_lists, self._their_list(agent_name, descs))
        number = super().prepXferDlist(agent_name, descs, *rest)
        if is_list and self._theirs:
            self._memory_lists[number] = (agent_name, descs)
        return number

    def makeXferReq(  # noqa: N802
        self,
        operation: Operation,
        local_side: int,
        local_indices: Indices,
        remote_side: int,
        remote_indices: Indices,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
        skip_desc_merge: bool = False,
    ) -> int:
        # Lists of memory may be prepared for both.
        if not {local_side, remote_side} & (self._their_lists.keys() - self._memory_lists.keys()):
            return super().makeXferReq(
                operation,
                local_side,
                local_indices,
                remote_side,
                remote_indices,
                notif_msg,
                backend,
                skip_desc_merge,
            )
        theirs = self._their_agent()
        handle = theirs.makeXferReq(
            theirs.operation(operation),
            self._their_list_of(local_side),
            [int(one) for one in local_indices],
            self._their_list_of(remote_side),
            [int(one) for one in remote_indices],
            notif_msg,
            [self._their_backends[one] for one in backend],
            skip_desc_merge,
        )
        return self._keep(self._their_requests, handle)

    def createXferReq(  # noqa: N802
        self,
        operation: Operation,
        local_descs: XferDList,
        remote_descs: XferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
    ) -> int:
        if not (local_descs.getType().is_storage or remote_descs.getType().is_storage):
            return super().createXferReq(
                operation, local_descs, remote_descs, remote_agent, notif_msg, backend
            )
        theirs = self._their_agent()
        handle = theirs.createXferReq(
            theirs.operation(operation),
            theirs.converted(local_descs),
            theirs.converted(remote_descs),
            remote_agent,
            notif_msg,
            [self._their_backends[one] for one in backend],
        )
        return self._keep(self._their_requests, handle)

    def postXferReq(self, reqh: int, notif_msg: str | bytes = b"") -> Status:  # noqa: N802
        if reqh not in self._their_requests:
            return super().postXferReq(reqh, notif_msg)
        theirs = self._their_agent()
        return theirs.status(theirs.postXferReq(self._their_requests[reqh], notif_msg))

    def getXferStatus(self, reqh: int) -> Status:  # noqa: N802
        if reqh not in self._their_requests:
            return super().getXferStatus(reqh)
        theirs = self._their_agent()
        return theirs.status(theirs.getXferStatus(self._their_requests[reqh]))

    def getXferTelemetry(self, reqh: int) -> Any:  # noqa: N802
        if reqh not in self._their_requests:
            return super().getXferTelemetry(reqh)
        return self._their_agent().getXferTelemetry(self._their_requests[reqh])

    def queryXferBackend(self, reqh: int) -> int:  # noqa: N802
        if reqh not in self._their_requests:
            return super().queryXferBackend(reqh)
        handle = self._their_agent().queryXferBackend(self._their_requests[reqh])
        return next(number for number, one in self._their_backends.items() if one == handle)

    def releaseXferReq(self, reqh: int) -> Status:  # noqa: N802
        if reqh not in self._their_requests:
            return super().releaseXferReq(reqh)
        self._their_agent().releaseXferReq(self._their_requests[reqh])
        del self._their_requests[reqh]
        return Status.NIXL_SUCCESS

    def abandon(self, reqh: int) -> None:
        if reqh in self._their_requests:
            self.releaseXferReq(reqh)
        super().abandon(reqh)

    def releasedDlistH(self, handle: int) -> Status:  # noqa: N802
        theirs = self._their_lists.pop(handle, None)
        if theirs is not None:
            self._their_agent().releasedDlistH(theirs)
        self._memory_lists.pop(handle, None)
        return super().releasedDlistH(handle)

    # -- ours

    def _is_storage(self, plugin: str) -> bool:
        found = installed()
        return found is not None and plugin in found[1]

    def _their_agent(self) -> _Theirs:
        if self._theirs is None:
            found = installed()
            assert found is not None  # Nobody has a handle of theirs otherwise.
            self._theirs = _Theirs(found[0], self._name)
        return self._theirs

    def _split(
        self, descs: RegDList, backends: Sequence[int]
    ) -> tuple[list[int] | None, list[Any] | None]:
        """The backends of te's and of theirs that these are for; None: not for it at all."""
        ours = [one for one in backends if one not in self._their_backends]
        theirs = [self._their_backends[one] for one in backends if one in self._their_backends]
        if descs.getType().is_storage and self._their_backends:
            return None, theirs
        if backends:
            return (ours or None), (theirs or None)
        is_for_te = self._impl is not None or not self._their_backends
        return ([] if is_for_te else None), ([] if self._their_backends else None)

    def _their_list(self, agent_name: str | bytes, descs: XferDList) -> Any:
        theirs = self._their_agent()
        return theirs.prepXferDlist(agent_name, theirs.converted(descs), [])

    def _their_list_of(self, number: int) -> Any:
        """``nixlInvalidParamError`` for what is no list."""
        known = self._memory_lists.get(number)
        if number not in self._their_lists and known is not None:
            self._their_lists[number] = self._their_list(*known)
        return self._of(self._their_lists, number)
