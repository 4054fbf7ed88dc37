# SPDX-License-Identifier: Apache-2.0
"""The class that code written for Mooncake makes. Its methods, their arguments and what they return
are those of ``mooncake.engine.TransferEngine`` (mooncake-transfer-engine 0.3.13): 0 for success,
a negative number for failure. Mooncake's log says why one failed; here Python's does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import te
from bootstrap_server.exposure import exposure
from sglang_mooncake.mooncake_face.answering import Answerer
from sglang_mooncake.mooncake_face.exchange import NoCard, Told
from sglang_mooncake.mooncake_face.sessions import Sessions

__all__ = ["OpenEngine", "Options", "TransferEngine", "settle"]

logger = logging.getLogger(__name__)

P2P: Final = "P2PHANDSHAKE"
PROTOCOLS: Final[dict[str, tuple[str, ...]]] = {"": (), "rdma": (), "tcp": ("tcp",)}
"""Mooncake's protocols, and the transports that each leaves; none: all that there are."""
CANCEL_TIMEOUT_S: Final = 5.0
SLOWEST_BYTES_PER_S: Final = 100e6

OpenEngine = Callable[[str, tuple[str, ...], tuple[str, ...]], te.Engine]
"""Makes te's engine from the host to listen on, the RDMA devices and the transports that the caller
of ``initialize`` names (none: the operator's, or all)."""


@dataclass(frozen=True)
class Options:
    """What the operator says, and Mooncake's arguments do not."""

    open_engine: OpenEngine
    #: Of the deployment's secrets; without, everybody may read and write registered memory.
    keys: tuple[bytes, ...] = ()
    #: The first and the last port that may be listened on.
    ports: tuple[int, int] | None = None
    #: Goes on without a secret on a public address; and how an operator says so.
    insecure: bool = False
    how_to_insist: str = ""
    #: Of one call, beside the time that its bytes take at 100 MB/s.
    transfer_timeout_s: float = 30.0


class _Opened:
    """What stands behind an engine that was initialized. Does not know it, so that it can go."""

    def __init__(self, options: Options, engine: te.Engine, host: str) -> None:
        self.engine: Final = engine
        self.sessions: Final = Sessions(engine, options.keys)
        self.lock: Final = threading.Lock()
        self.regions: Final[dict[int, te.Region]] = {}
        self.answerer: Final = Answerer(host, options.ports, options.keys, self._tell)

    def _tell(self) -> Told:
        return Told(self.engine.card(), next(iter(self.regions), 0))

    def close(self) -> None:
        self.answerer.close()
        self.engine.close()


class TransferEngine:
    """``mooncake.engine.TransferEngine``. All methods are thread-safe; transfers block, and release
    the interpreter meanwhile.

    Peers may read and write all registered memory, as Mooncake's may: with the deployment's secret
    only processes that have it, without one everybody who reaches the ports.
    """

    options: ClassVar[Options]

    def __init__(self) -> None:
        self._opened: _Opened | None = None

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"sglang-mooncake's {type(self).__name__} has no {name}: it has what SGLang's encoders,"
            " SGLang's remote weights and vLLM's MooncakeConnector call; Mooncake's store and"
            " Mooncake's EP need the engine of the mooncake package"
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
            if self._opened is not None:
                raise ValueError("the engine was initialized before")
            if metadata_server != P2P:
                raise ValueError(f"metadata_server={metadata_server!r} must be {P2P!r}")
            if protocol not in PROTOCOLS:
                known = ", ".join(repr(one) for one in PROTOCOLS if one)
                raise ValueError(f"protocol={protocol!r} must be one of {known}")
            host = _host(local_hostname)
            self._check_exposure(host)
            devices = tuple(one.strip() for one in device_name.split(",") if one.strip())
            engine = self.options.open_engine(host, devices, PROTOCOLS[protocol])
            try:
                self._opened = _Opened(self.options, engine, host)
            except BaseException:
                engine.close()
                raise
            weakref.finalize(self, self._opened.close)
            logger.info("mooncake.engine is te: session %s port %d", host, self.get_rpc_port())

        return _outcome(f"initialize({local_hostname!r}, …, {protocol!r}, {device_name!r})", work)

    def get_rpc_port(self) -> int:
        """The port of this engine's session. ``RuntimeError`` before ``initialize``."""
        return self._ready().answerer.port

    # -- memory

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """``capacity`` bytes from ``buffer_addr`` on, for transfers in both directions."""
        return self.batch_register_memory([buffer_addr], [capacity])

    def batch_register_memory(self, buffer_addrs: Sequence[int], capacities: Sequence[int]) -> int:
        """All of them, or none."""

        def work() -> None:
            opened = self._ready()
            if len(buffer_addrs) != len(capacities):
                raise ValueError(f"{len(buffer_addrs)} addresses and {len(capacities)} sizes")
            made: list[te.Region] = []
            try:
                for address, nbytes in zip(buffer_addrs, capacities, strict=True):
                    made.append(opened.engine.register(address, nbytes, remote="read-write"))
            except te.Error:
                while made:
                    opened.engine.deregister(made.pop())
                raise
            with opened.lock:
                opened.regions.update({one.address: one for one in made})

        return _outcome(f"register_memory of {len(buffer_addrs)} ranges", work)

    def unregister_memory(self, buffer_addr: int) -> int:
        """The range that begins there. After 0 no peer reads or writes it."""
        return self.batch_unregister_memory([buffer_addr])

    def batch_unregister_memory(self, buffer_addrs: Sequence[int]) -> int:
        """As many of them as can be."""
        results = [
            _outcome(f"unregister_memory({address:#x})", partial(self._unregister, address))
            for address in buffer_addrs
        ]
        return min(results, default=0)

    def _unregister(self, address: int) -> None:
        opened = self._ready()
        with opened.lock:
            region = opened.regions.get(address)
        if region is None:
            raise ValueError(f"no registered memory begins at {address:#x}")
        opened.engine.deregister(region)
        with opened.lock:
            opened.regions.pop(address, None)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Where the memory begins that the engine of a session registered first; 0 if it has none
        or cannot be asked."""
        found: list[int] = []

        def work() -> None:
            found.append(self._ready().sessions.ask(segment_name).first_address)

        _outcome(f"get_first_buffer_address({segment_name!r})", work)
        return found[0] if found else 0

    # -- peers

    def send_probe(self, target: str) -> int:
        """0 if the engine of a session answers now."""

        def work() -> None:
            self._ready().sessions.ask(target)

        return _outcome(f"send_probe({target!r})", work)

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Copies ``length`` bytes from this process's ``buffer`` to an address of the peer's."""
        return self.batch_transfer_sync_write(
            target_hostname, [buffer], [peer_buffer_address], [length]
        )

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Copies ``length`` bytes from an address of the peer's to this process's ``buffer``."""
        return self.batch_transfer_sync_read(
            target_hostname, [buffer], [peer_buffer_address], [length]
        )

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Many of them, with one outcome."""

        def work() -> None:
            blocks = _blocks(buffers, peer_buffer_addresses, lengths)
            self._transfer(target_hostname, blocks, is_read=False)

        return _outcome(f"a write of {len(lengths)} blocks to {target_hostname}", work)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Many of them, with one outcome."""

        def work() -> None:
            blocks = _blocks(peer_buffer_addresses, buffers, lengths)
            self._transfer(target_hostname, blocks, is_read=True)

        return _outcome(f"a read of {len(lengths)} blocks from {target_hostname}", work)

    def _transfer(self, session: str, blocks: te.Blocks, is_read: bool) -> None:
        peer = self._ready().sessions.peer(session)
        if not len(blocks):
            return
        transfer = peer.read(blocks) if is_read else peer.write(blocks)
        limit_s = self.options.transfer_timeout_s + blocks.total_nbytes / SLOWEST_BYTES_PER_S
        settle(transfer, limit_s, is_read)

    def _ready(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError("the engine was not initialized, or initialize failed")
        return self._opened

    def _check_exposure(self, host: str) -> None:
        options = self.options
        said = exposure(host, bool(options.keys), options.insecure, options.how_to_insist)
        if said is not None and said.refused:
            raise ValueError(said.sentence)
        if said is not None:
            logger.warning("%s", said.sentence)


def settle(transfer: te.Transfer, limit_s: float, is_read: bool) -> None:
    """Returns when the bytes are there; when it raises ``te.TransferFailed`` or ``te.WaitTimeout``,
    te has done with the caller's memory."""
    try:
        transfer.wait(limit_s)
    except te.WaitTimeout:
        transfer.cancel()
        if transfer.wait(CANCEL_TIMEOUT_S) is te.Status.CANCELLED:
            raise
    except te.TransferFailed:
        if is_read:
            transfer.cancel()  # Pieces may still have been landing.
        raise


def _outcome(what: str, work: Callable[[], None]) -> int:
    """As Mooncake has it: a number, and the reason in the log."""
    try:
        work()
    except (te.Error, NoCard, ValueError, RuntimeError, OSError) as exc:
        # As text: a log that keeps exceptions would keep the engine.
        logger.error("mooncake.engine over te: %s failed: %s", what, str(exc))
        return -1
    return 0


def _blocks(src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]) -> te.Blocks:
    """Without those of no bytes, which Mooncake takes. ``ValueError``."""
    if not len(src) == len(dst) == len(lengths):
        raise ValueError(f"{len(src)} sources, {len(dst)} destinations and {len(lengths)} lengths")
    some = [row for row in zip(src, dst, lengths, strict=True) if row[2]]
    columns = zip(*some, strict=True) if some else ([], [], [])
    return te.Blocks.of(*map(list, columns))


def _host(given: str) -> str:
    """Without a port."""
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given if given.count(":") > 1 else given.partition(":")[0]
