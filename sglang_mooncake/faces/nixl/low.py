# SPDX-License-Identifier: Apache-2.0
"""``nixlAgent`` and ``nixlAgentConfig`` of ``nixl._bindings``, over te. Methods have NIXL's names
and arguments; handles are numbers, as NIXL's are."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import te
from sglang_mooncake.faces.nixl.descriptors import RegDList, XferDList
from sglang_mooncake.faces.nixl.impl import AgentImpl
from sglang_mooncake.faces.nixl.inbox import bytes_of, merge
from sglang_mooncake.faces.nixl.metadata import check_name, text_of
from sglang_mooncake.faces.nixl.names import (
    AgentConfig,
    InvalidParam,
    NoTelemetry,
    NotFound,
    NotSupported,
    Operation,
    RemoteDisconnect,
    Segment,
    Status,
)
from sglang_mooncake.faces.nixl.options import Options
from sglang_mooncake.faces.nixl.prepared import (
    Columns,
    Cover,
    Indices,
    blocks_of,
    columns_of_runs,
)
from sglang_mooncake.faces.nixl.registrations import ranges_of
from sglang_mooncake.faces.nixl.remotes import Remote
from sglang_mooncake.faces.nixl.requests import Request, Telemetry
from te.config import LIMITS

__all__ = ["INIT_AGENT", "UCX", "Agent"]

logger = logging.getLogger(__name__)

UCX: Final = "UCX"
"""The name of NIXL's backend for memory, which callers ask for; te answers to it."""
INIT_AGENT: Final = ""
THREADS_MAX: Final = LIMITS["workers"][1]
"""te's workers; callers ask for as many threads as NIXL's backend can use."""

_PARAMETERS: Final = {"num_threads": "0", "device_list": ""}
_MEMORY: Final = [Segment.DRAM_SEG.name, Segment.VRAM_SEG.name]
_FIRST_HANDLE: Final = 4096  # A handle is no small number, and never 0.

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class _Prepared:
    columns: Columns
    #: None: this side of a transfer.
    remote: Remote | None


class Agent:
    """``nixlAgent``. Any thread may call anything, and no call waits for another agent."""

    options: ClassVar[Options]

    def __init__(self, name: str, config: AgentConfig) -> None:
        """``ValueError`` for a name that cannot be."""
        self._name = check_name(name)
        wanted = self.options.telemetry()
        self._has_telemetry = config.captureTelemetry if wanted is None else wanted
        self._lock = threading.Lock()
        self._numbers = itertools.count(_FIRST_HANDLE)
        self._impl: AgentImpl | None = None
        self._backend = 0
        self._lists: Final[dict[int, _Prepared]] = {}
        self._requests: Final[dict[int, Request]] = {}
        if config.useListenThread:
            logger.warning(
                "nixl over te: agent %r wants a thread that listens for metadata; there is none:"
                " applications bring metadata themselves",
                name,
            )

    # -- backends

    def getAvailPlugins(self) -> list[str]:  # noqa: N802
        return [UCX]

    def getPluginParams(self, plugin: str) -> tuple[dict[str, str], list[str]]:  # noqa: N802
        """``nixlNotFoundError`` for another than `UCX`."""
        if plugin != UCX:
            raise NotFound(_no_backend(plugin))
        return dict(_PARAMETERS), list(_MEMORY)

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:  # noqa: N802
        self._check_backends([backend])
        return dict(_PARAMETERS), list(_MEMORY)

    def createBackend(self, plugin: str, params: dict[str, str]) -> int:  # noqa: N802
        """Starts te's engine; its handle.

        Raises:
            nixlNotFoundError: another backend than `UCX`.
            nixlInvalidParamError: it was made before, or a parameter is no number.
            nixlBackendError: te cannot start, or may not.
        """
        if plugin != UCX:
            raise NotFound(_no_backend(plugin))
        devices = tuple(
            one.strip() for one in params.get("device_list", "").split(",") if one.strip()
        )
        threads = params.get("num_threads", "0")
        if not threads.isdecimal():
            raise InvalidParam(f"num_threads={threads!r} is no number")
        with self._lock:
            if self._impl is not None:
                raise InvalidParam(f"agent {self._name!r} has its backend {UCX} already")
            impl = AgentImpl.open(self._name, self.options, devices, min(int(threads), THREADS_MAX))
            self._impl, self._backend = impl, next(self._numbers)
            weakref.finalize(self, impl.close)
        logger.info("nixl is te: agent %s at engine %s", self._name, impl.engine.id)
        return self._backend

    # -- memory

    def registerMem(self, descs: RegDList, backends: Sequence[int] = ()) -> Status:  # noqa: N802
        """Peers may read and write all of it. See `memory.Memory.register`."""
        self._ready(backends).memory.register(ranges_of(descs))
        return Status.NIXL_SUCCESS

    def deregisterMem(self, descs: RegDList, backends: Sequence[int] = ()) -> Status:  # noqa: N802
        """See `memory.Memory.deregister`."""
        self._ready(backends).memory.deregister(ranges_of(descs))
        return Status.NIXL_SUCCESS

    def queryMem(  # noqa: N802
        self, descs: RegDList, backend: int
    ) -> list[dict[str, str] | None]:
        """``nixlNotSupportedError``: it is for storage."""
        self._check_backends([backend])
        raise NotSupported(f"{descs!r} is memory, of which there is nothing to ask")

    # -- other agents

    def getLocalMD(self) -> bytes:  # noqa: N802
        return self._ready().metadata()

    def getLocalPartialMD(  # noqa: N802
        self, descs: RegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        """Of these registrations; without any, only how to reach this agent.
        ``nixlNotFoundError``."""
        impl, ranges = self._ready(backends), ranges_of(descs)
        missing = impl.memory.missing(ranges)
        if missing is not None:
            raise NotFound(f"{missing.nbytes} bytes at {missing.address:#x} are not registered")
        return impl.part(ranges, inc_conn_info or not ranges)

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes:  # noqa: N802
        """The other agent's name. See `remotes.Remotes.add`."""
        return self._ready().remotes.add(bytes(remote_metadata)).encode()

    def invalidateRemoteMD(self, remote_agent: str | bytes) -> Status:  # noqa: N802
        """A status alone, as NIXL's."""
        try:
            self._ready().remotes.remove(text_of(remote_agent))
        except NotFound as exc:
            return exc.status
        return Status.NIXL_SUCCESS

    def checkRemoteMD(self, remote_agent: str | bytes, descs: XferDList) -> Status:  # noqa: N802
        """Whether the agent is known and has registered all of these, by what this side was told;
        not so once a connection to it has failed. Then it is known again when it is added again, or
        answers."""
        try:
            remote = self._ready().remotes.get(text_of(remote_agent))
        except NotFound as exc:
            return exc.status
        columns = Columns.of_rows(descs.rows)
        if remote.link.problem is not None or remote.cover.first_outside(columns) is not None:
            return Status.NIXL_ERR_NOT_FOUND
        return Status.NIXL_SUCCESS

    def makeConnection(  # noqa: N802
        self, remote_agent: str | bytes, backends: Sequence[int] = ()
    ) -> Status:
        """Begins to connect; adding an agent has done so already."""
        self._ready(backends).remotes.get(text_of(remote_agent)).link.connect()
        return Status.NIXL_SUCCESS

    def sendLocalMD(self, *args: Any) -> Status:  # noqa: ARG002, N802
        raise NotSupported("metadata is not sent by te; give others what get_agent_metadata gives")

    sendLocalPartialMD = fetchRemoteMD = invalidateLocalMD = sendLocalMD  # noqa: N815

    # -- transfers

    def prepXferDlist(  # noqa: N802
        self, agent_name: str | bytes, descs: Any, *rest: Any
    ) -> int:
        """A handle for descriptors: ``(name, list, backends)``, or ``(name, segment, array of runs,
        backends)``.

        Args:
            agent_name: `INIT_AGENT` for this side; this agent's own name for a copy within it.

        Raises:
            nixlNotFoundError: the agent is not known, or one of them is not registered there.
        """
        if isinstance(descs, XferDList):
            backends = rest[0] if rest else ()
            columns = Columns.of_rows(descs.rows)
        else:
            columns, backends = columns_of_runs(rest[0]), rest[1] if len(rest) > 1 else ()
        impl = self._ready(backends)
        name = text_of(agent_name)
        remote = None if name == INIT_AGENT else self._remote(impl, name)
        self._cover(impl, remote).check(columns, name)
        return self._keep(self._lists, _Prepared(columns, remote))

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
        """A handle for the transfer of descriptors that indices select, pair by pair.

        Raises:
            nixlInvalidParamError: a handle is none of a prepared list of that side, an index is out
                of range, or the two sides differ.
            nixlNotFoundError: the agent was removed.
        """
        impl = self._ready(backend)
        local, remote = self._of(self._lists, local_side), self._of(self._lists, remote_side)
        if local.remote is not None or remote.remote is None:
            raise InvalidParam("a transfer goes from a list of this side to one of an agent")
        if remote.remote.is_removed:
            raise NotFound(f"the agent {remote.remote.name!r} was removed")
        blocks = blocks_of(
            operation == Operation.NIXL_READ,
            local.columns.selected(local_indices),
            remote.columns.selected(remote_indices),
            not skip_desc_merge,
        )
        return self._request(impl, operation, blocks, len(blocks), remote.remote, notif_msg)

    def createXferReq(  # noqa: N802
        self,
        operation: Operation,
        local_descs: XferDList,
        remote_descs: XferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
    ) -> int:
        """The same without prepared lists. ``nixlInvalidParamError``, ``nixlNotFoundError``."""
        impl, name = self._ready(backend), text_of(remote_agent)
        remote = self._remote(impl, name)
        here, there = Columns.of_rows(local_descs.rows), Columns.of_rows(remote_descs.rows)
        impl.memory.cover.check(here, INIT_AGENT)
        self._cover(impl, remote).check(there, name)
        blocks = blocks_of(operation == Operation.NIXL_READ, here, there)
        return self._request(impl, operation, blocks, len(here), remote, notif_msg)

    def postXferReq(self, reqh: int, notif_msg: str | bytes = b"") -> Status:  # noqa: N802
        """See `requests.Request.post`."""
        return self._of(self._requests, reqh).post(bytes_of(notif_msg))

    def getXferStatus(self, reqh: int) -> Status:  # noqa: N802
        """See `requests.Request.status`."""
        return self._of(self._requests, reqh).status()

    def getXferTelemetry(self, reqh: int) -> Telemetry:  # noqa: N802
        """``nixlNoTelemetryError`` if it was not asked for."""
        request = self._of(self._requests, reqh)
        if not self._has_telemetry:
            raise NoTelemetry(f"agent {self._name!r} was made without telemetry")
        return request.telemetry()

    def estimateXferCost(self, reqh: int) -> tuple[int, int, int]:  # noqa: N802
        self._of(self._requests, reqh)
        return 0, 0, -1

    def queryXferBackend(self, reqh: int) -> int:  # noqa: N802
        self._of(self._requests, reqh)
        return self._backend

    def releaseXferReq(self, reqh: int) -> Status:  # noqa: N802
        """See `requests.Request.release`. A handle that is not known was released before."""
        request = self._requests.get(reqh)
        if request is not None:
            request.release()
            self._requests.pop(reqh, None)
        return Status.NIXL_SUCCESS

    def abandon(self, reqh: int) -> None:
        """For handles that go without having been released: it is, as soon as te has done with the
        memory. Takes no lock; see `impl.Abandoned`."""
        request, impl = self._requests.pop(reqh, None), self._impl
        if request is not None and impl is not None:
            impl.abandoned.put(request.abandon)

    def releasedDlistH(self, handle: int) -> Status:  # noqa: N802
        self._lists.pop(handle, None)
        return Status.NIXL_SUCCESS

    # -- notifications

    def genNotif(  # noqa: N802
        self,
        remote_agent: str | bytes,
        msg: str | bytes,
        backends: Any = (),  # noqa: ARG002
    ) -> Status:
        """Sent without waiting; it may be lost with the connection. ``nixlNotFoundError`` if the
        agent is not known, ``nixlRemoteDisconnectError`` if the last attempt to connect to it
        failed: that one begins another attempt."""
        impl, name = self._ready(), text_of(remote_agent)
        remote = self._remote(impl, name)
        problem = remote.link.problem
        if problem is not None:
            remote.link.connect()
            raise RemoteDisconnect(str(problem))
        remote.link.send(impl.notification(remote, bytes_of(msg)))
        return Status.NIXL_SUCCESS

    def getNotifs(  # noqa: N802
        self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()
    ) -> dict[str, list[bytes]]:
        """Those of ``notif_map`` and, behind them, those that came since the last call."""
        known = {name: list(messages) for name, messages in notif_map.items()}
        return merge(known, self._ready(backends).arrived())

    # -- what NIXL has and te has not

    def prepMemView(self, *args: Any) -> int:  # noqa: ARG002, N802
        raise NotSupported("te gives no views of memory to kernels on a GPU")

    releaseMemView = prepMemView  # noqa: N815

    # -- ours

    def _ready(self, backends: Sequence[int] = ()) -> AgentImpl:
        """``nixlInvalidParamError`` without a backend."""
        self._check_backends(backends)
        if self._impl is None:
            raise InvalidParam(f"agent {self._name!r} has no backend: create {UCX} first")
        return self._impl

    def _check_backends(self, backends: Sequence[int]) -> None:
        for one in backends:
            if not one or one != self._backend:
                raise InvalidParam(f"{one} is no backend of agent {self._name!r}")

    def _remote(self, impl: AgentImpl, name: str) -> Remote:
        return impl.itself() if name == self._name else impl.remotes.get(name)

    def _cover(self, impl: AgentImpl, remote: Remote | None) -> Cover:
        is_own = remote is None or remote.name == self._name
        return impl.memory.cover if is_own or remote is None else remote.cover

    def _request(
        self,
        impl: AgentImpl,
        operation: Operation,
        blocks: te.Blocks,
        count: int,
        remote: Remote,
        message: str | bytes,
    ) -> int:
        """``count``: of descriptors, for telemetry. NIXL counts neighbours as one only where they
        were prepared."""
        request = Request(
            remote,
            impl.ending,
            lambda data, then: impl.notification(remote, data, then),
            operation == Operation.NIXL_READ,
            blocks,
            count,
            bytes_of(message),
        )
        return self._keep(self._requests, request)

    def _keep(self, table: dict[int, Found], one: Found) -> int:
        number = next(self._numbers)
        table[number] = one
        return number

    def _of(self, table: dict[int, Found], handle: int) -> Found:
        found = table.get(int(handle))
        if found is None:
            raise InvalidParam(f"{handle} is no handle of agent {self._name!r}, or was released")
        return found


def _no_backend(plugin: str) -> str:
    return f"there is no backend {plugin!r:.80}: te has one, which answers to the name {UCX}"
