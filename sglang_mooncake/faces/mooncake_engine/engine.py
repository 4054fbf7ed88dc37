# SPDX-License-Identifier: Apache-2.0
"""The class that code written for Mooncake makes. Its methods, their arguments and what they return
are those of ``mooncake.engine.TransferEngine`` (mooncake-transfer-engine 0.3.13): 0 for success,
a negative number for failure. Mooncake's log says why one failed; here Python's does.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final, Self

from sglang_mooncake.faces.exposed import check_exposure
from sglang_mooncake.faces.mooncake_engine.impl import EngineImpl, outcome
from sglang_mooncake.faces.mooncake_engine.names import TransferOpcode
from sglang_mooncake.faces.mooncake_engine.transferring import Transferring
from te.topology import choose_topology, read_machine

__all__ = ["TransferEngine"]

logger = logging.getLogger(__name__)

P2P: Final = "P2PHANDSHAKE"
PROTOCOLS: Final[dict[str, tuple[str, ...]]] = {"": (), "rdma": (), "tcp": ("tcp",)}
"""Mooncake's protocols, and the transports that each leaves; none: all that there are."""
ANYWHERE: Final = "*"


class TransferEngine(Transferring):
    """``mooncake.engine.TransferEngine``. All methods are thread-safe; transfers block, and release
    the interpreter meanwhile.

    Peers may read and write all registered memory, as Mooncake's may: with the deployment's secret
    only processes that have it, without one everybody who reaches the ports.
    """

    TransferOpcode: ClassVar = TransferOpcode

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"sglang-mooncake's {type(self).__name__} has no {name}: it has what copies memory, but"
            " no copies on CUDA's streams; Mooncake's EP needs the engine of the mooncake package"
        )

    # -- the engine

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        """Listens.

        Args:
            local_hostname: the address at which peers reach this process, with or without a port
                (which is not used, as Mooncake does not).
            metadata_server: ``P2PHANDSHAKE``; te has no other way to find peers.
            protocol: ``rdma`` (all transports, as the operator or te chooses) or ``tcp``.
            device_name: RDMA devices, separated by commas; empty: all.
        """

        def work() -> None:
            if self._impl is not None:
                raise ValueError("the engine was initialized before")
            if metadata_server != P2P:
                raise ValueError(f"metadata_server={metadata_server!r} must be {P2P!r}")
            if protocol not in PROTOCOLS:
                known = ", ".join(repr(one) for one in PROTOCOLS if one)
                raise ValueError(f"protocol={protocol!r} must be one of {known}")
            host = _host(local_hostname)
            options = self.options
            check_exposure(host, bool(options.keys), options.insecure, options.how_to_insist)
            devices = tuple(one.strip() for one in device_name.split(",") if one.strip())
            engine = options.open_engine(host, devices, PROTOCOLS[protocol])
            try:
                self._impl = EngineImpl(options, engine, host)
            except BaseException:
                engine.close()
                raise
            weakref.finalize(self, self._impl.close)
            logger.info("mooncake.engine is te: session %s port %d", host, self.get_rpc_port())

        return outcome(f"initialize({local_hostname!r}, …, {protocol!r}, {device_name!r})", work)

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,  # noqa: ARG002 - P2PHANDSHAKE has none, for Mooncake neither
    ) -> int:
        """The same."""
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_engine(self) -> Self:
        """What `setup` of ``mooncake.store`` is given, which has an engine of its own here."""
        return self

    def get_rpc_port(self) -> int:
        """The port of this engine's session. ``RuntimeError`` before ``initialize``."""
        return self._ready().answerer.port

    # -- memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = ANYWHERE) -> int:
        """``capacity`` bytes from ``buffer_addr`` on, for transfers in both directions.
        ``location`` is taken and not needed: te sees where memory is."""
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def batch_register_memory(
        self,
        buffer_addresses: Sequence[int],
        capacities: Sequence[int],
        location: str = ANYWHERE,  # noqa: ARG002 - te sees where memory is
    ) -> int:
        """All of them, or none."""
        return outcome(
            f"register_memory of {len(buffer_addresses)} ranges",
            lambda: self._ready().memory.register(buffer_addresses, capacities),
        )

    def unregister_memory(self, buffer_addr: int) -> int:
        """The range that begins there. After 0 no peer reads or writes it."""
        return self.batch_unregister_memory([buffer_addr])

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """As many of them as can be."""

        def work(address: int) -> None:
            self._ready().memory.unregister(address)

        results = [
            outcome(f"unregister_memory({address:#x})", partial(work, address))
            for address in buffer_addresses
        ]
        return min(results, default=0)

    def allocate_managed_buffer(self, length: int) -> int:
        """The address of ``length`` new bytes, registered; 0 if there are none."""
        return outcome(
            f"allocate_managed_buffer({length})",
            lambda: self._ready().memory.allocate(length),
            failed=0,
        )

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """What ``allocate_managed_buffer`` gave. After 0 no peer reads or writes it, and the
        address means nothing any more."""
        return outcome(
            f"free_managed_buffer({buffer_addr:#x}, {length})",
            lambda: self._ready().memory.free(buffer_addr, length),
        )

    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int:
        """The first ``length`` of these bytes to registered memory of the host."""
        return outcome(
            f"write_bytes_to_buffer({dest_address:#x}, …, {length})",
            lambda: self._ready().memory.write(dest_address, src_ptr, length),
        )

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """What is in registered memory of the host. ``ValueError`` if that is somewhere else: there
        are no bytes that would say so."""
        return self._ready().memory.read(source_address, length)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Where the memory begins that the engine of a session registered first; 0 if it has none
        or cannot be asked."""
        return outcome(
            f"get_first_buffer_address({segment_name!r})",
            lambda: self._ready().sessions.ask(segment_name).first_address,
            failed=0,
        )

    # -- peers

    def send_probe(self, peer_server_name: str) -> int:
        """0 if the engine of a session answers now."""

        def work() -> None:
            self._ready().sessions.ask(peer_server_name)

        return outcome(f"send_probe({peer_server_name!r})", work)

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: for each place of memory the RDMA devices that te prefers, and those that help out.

        Args:
            device_name: devices, separated by commas; without, all.

        Raises:
            te.TopologyError: there is no device of such a name.
        """
        names = [one.strip() for one in (device_name or "").split(",") if one.strip()]
        found = choose_topology(read_machine(), names, None)
        table = {place: (one.preferred, one.other) for place, one in found.localities.items()}
        return json.dumps(table)

    def warmup_efa_segment(self, segment_name: str) -> int:  # noqa: ARG002 - see below
        """0, as in a build of Mooncake's without EFA: there is nothing to warm up."""
        return 0


def _host(given: str) -> str:
    """Without a port."""
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given if given.count(":") > 1 else given.partition(":")[0]
