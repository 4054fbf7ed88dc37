# SPDX-License-Identifier: Apache-2.0
"""``nixl_agent`` and what else ``nixl._api`` has. Method names, arguments and results are NIXL's
(1.5.1), as its users call them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, Final

import numpy as np

from sglang_mooncake.faces.nixl.descriptors import RegDList, RemoteDList, XferDList
from sglang_mooncake.faces.nixl.given import SEGMENTS, list_of
from sglang_mooncake.faces.nixl.handles import (
    DEFAULT_COMM_PORT,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)
from sglang_mooncake.faces.nixl.low import INIT_AGENT, Agent
from sglang_mooncake.faces.nixl.names import Operation, Segment, Status, ThreadSync
from sglang_mooncake.faces.nixl.requests import Telemetry

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

logger = logging.getLogger(__name__)

_OPERATIONS: Final = {"WRITE": Operation.NIXL_WRITE, "READ": Operation.NIXL_READ}
_STATES: Final = {Status.NIXL_SUCCESS: "DONE", Status.NIXL_IN_PROG: "PROC"}


class nixl_agent:  # noqa: N801 - NIXL's name
    """``nixl_agent``. Any thread may call anything.

    Where a list of backends can be given, there is one: te, which answers to the name ``UCX``.
    """

    #: The module ``nixl._bindings``: what its users replace in it counts here.
    bindings: ClassVar[ModuleType]

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ) -> None:
        """``ValueError`` for a name that cannot be; see `low.Agent.createBackend`."""
        conf = nixl_conf or nixl_agent_config()
        config = self.bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = conf.enable_pthread, conf.enable_listen
        config.listenPort, config.captureTelemetry = conf.port, conf.capture_telemetry
        strict, none = ThreadSync.NIXL_THREAD_SYNC_STRICT, ThreadSync.NIXL_THREAD_SYNC_NONE
        default = strict if conf.enable_listen else none
        config.syncMode = default if conf.sync_mode is None else conf.sync_mode.value
        self.agent: Agent = self.bindings.nixlAgent(agent_name, config)
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, int] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list: list[str] = self.agent.getAvailPlugins()
        self.nixl_mems, self.nixl_ops = dict(SEGMENTS), dict(_OPERATIONS)
        for one in self.plugin_list if instantiate_all and nixl_conf is None else conf.backends:
            if one not in self.plugin_list:
                logger.warning("nixl over te: there is no backend %s; agent goes without", one)
                continue
            self.create_backend(one, {"num_threads": str(max(conf.num_threads, 0))})

    # -- backends

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Empty for a backend that there is not."""
        return self.agent.getPluginParams(backend)[1] if backend in self.plugin_list else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Empty for a backend that there is not."""
        return self.agent.getPluginParams(backend)[0] if backend in self.plugin_list else {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Empty for a backend that was not created."""
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """Empty for a backend that was not created."""
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:  # noqa: N803
        """See `low.Agent.createBackend`."""
        handle = self.agent.createBackend(backend, initParams or {})
        self.backends[backend] = handle
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(
            handle
        )

    # -- memory

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> RegDList | None:
        """The list, for `deregister_memory`. See `low.Agent.registerMem`."""
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise TypeError("that is no list of memory to register; the log says why")
        self.agent.registerMem(descs, self._handles(backends))
        return descs

    def deregister_memory(self, dereg_list: RegDList, backends: Sequence[str] = ()) -> None:
        """See `low.Agent.deregisterMem`."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """For storage. ``ValueError`` for a backend that was not created."""
        descs = self.get_reg_descs(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(
                f"Backend {backend!r} not found. Available backends: {list(self.backends)}"
            )
        if descs is None:
            raise TypeError("that is no list of memory; the log says why")
        return self.agent.queryMem(descs, self.backends[backend])

    # -- transfers

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """See `low.Agent.prepXferDlist`. ``xfer_list`` may be an array of runs, shape (n, 5):
        address, bytes of a block, device, bytes from one block to the next, number of blocks."""
        handles = self._handles(backends)
        name = INIT_AGENT if agent_name in ("NIXL_INIT_AGENT", b"NIXL_INIT_AGENT") else agent_name
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("Please specify a mem type for strided descriptors")
            segment = self.nixl_mems[mem_type]
            handle = self.agent.prepXferDlist(name, segment, xfer_list, handles)
        else:
            descs = self.get_xfer_descs(xfer_list, mem_type)
            if descs is None:
                raise TypeError("that is no list of descriptors; the log says why")
            handle = self.agent.prepXferDlist(name, descs, handles)
        return nixl_prepped_dlist_handle(self.agent, handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: str | bytes = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """See `low.Agent.makeXferReq`. ``KeyError`` for another operation than READ and WRITE."""
        handle = self.agent.makeXferReq(
            self.nixl_ops[operation],
            local_xfer_side.number,
            local_indices,
            remote_xfer_side.number,
            remote_indices,
            notif_msg,
            self._handles(backends),
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: XferDList,
        remote_descs: XferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """See `low.Agent.createXferReq`. ``KeyError`` for another operation than READ and WRITE."""
        handle = self.agent.createXferReq(
            self.nixl_ops[operation],
            local_descs,
            remote_descs,
            remote_agent,
            notif_msg,
            self._handles(backends),
        )
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: str | bytes = b"") -> str:
        """Posts it: "DONE", "PROC", or "ERR" for one that failed and of which nothing moves any
        more. See `requests.Request.post`."""
        return _STATES.get(self.agent.postXferReq(handle.number, notif_msg), "ERR")

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """The same words. See `requests.Request.status`."""
        return _STATES.get(self.agent.getXferStatus(handle.number), "ERR")

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> Telemetry:
        """``nixlNoTelemetryError`` if it was not asked for."""
        return self.agent.getXferTelemetry(handle.number)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        number = self.agent.queryXferBackend(handle.number)
        return next(name for name, one in self.backends.items() if one == number)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """te does not estimate."""
        duration, margin, _ = self.agent.estimateXferCost(req_handle.number)
        return duration, margin, "UNKNOWN"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """See `requests.Request.release`."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    def prep_mem_view(self, dlist: Any, backends: Sequence[str] = ()) -> int:
        """``nixlNotSupportedError``."""
        return self.agent.prepMemView(dlist, self._handles(backends))

    def release_mem_view(self, mvh: int) -> None:
        """``nixlNotSupportedError``."""
        self.agent.releaseMemView(mvh)

    # -- notifications

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """By sender, those that came since the last call of this or `update_notifs`."""
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """All that nobody has taken out of ``notifs``."""
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Takes one notification that begins with the tag, or has it in it, out of ``notifs``."""
        name = remote_agent_name
        messages = self.update_notifs(backends).get(
            name.decode() if isinstance(name, bytes) else name, []
        )
        for i, one in enumerate(messages):
            if one.startswith(lookup_tag) if tag_is_prefix else lookup_tag in one:
                del messages[i]
                return True
        return False

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: str | bytes, backend: str | None = None
    ) -> None:
        """See `low.Agent.genNotif`."""
        handles = self._handles(() if backend is None else (backend,))
        self.agent.genNotif(remote_agent_name, notif_msg, handles)

    # -- other agents

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        """See `low.Agent.makeConnection`."""
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def get_agent_metadata(self) -> bytes:
        """What others need to reach this agent and its memory of now."""
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: RegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """See `low.Agent.getLocalPartialMD`."""
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Its name, as bytes. See `remotes.Remotes.add`."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Never raises."""
        self.agent.invalidateRemoteMD(agent)

    def check_remote_metadata(self, agent: str | bytes, descs: XferDList | None = None) -> bool:
        """See `low.Agent.checkRemoteMD`."""
        wanted = XferDList(Segment.DRAM_SEG) if descs is None else descs
        return self.agent.checkRemoteMD(agent, wanted) == Status.NIXL_SUCCESS

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """``nixlNotSupportedError``."""
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(self, *args: Any, **more: Any) -> None:  # noqa: ARG002
        """``nixlNotSupportedError``."""
        self.agent.sendLocalPartialMD(*args)

    def fetch_remote_metadata(self, *args: Any, **more: Any) -> None:  # noqa: ARG002
        """``nixlNotSupportedError``."""
        self.agent.fetchRemoteMD(*args)

    def invalidate_local_metadata(self, *args: Any, **more: Any) -> None:  # noqa: ARG002
        """``nixlNotSupportedError``."""
        self.agent.invalidateLocalMD(*args)

    # -- lists of descriptors

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> XferDList | None:
        """Of a list of tuples (address, bytes, device), an array of shape (n, 3), a tensor or a
        list of tensors, or the list itself. None for anything else, with the reason in the log;
        ``KeyError`` for another kind of memory than NIXL's."""
        return list_of(XferDList, RegDList, 3, descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> RegDList | None:
        """The same for registering; tuples have a text behind the device."""
        return list_of(RegDList, XferDList, 4, descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> RemoteDList | None:
        """The same; tuples have the name of an agent behind the device."""
        if isinstance(descs, RemoteDList):
            return descs
        return list_of(RemoteDList, XferDList, 4, descs, mem_type)

    def get_serialized_descs(self, descs: Any) -> bytes:
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """As pickle does: what other programs send is theirs to run."""
        return pickle.loads(serialized_descs)

    # -- ours

    def _handles(self, backends: Sequence[str]) -> list[int]:
        """``KeyError`` for a backend that was not created."""
        return [self.backends[one] for one in backends]
