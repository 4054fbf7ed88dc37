# SPDX-License-Identifier: Apache-2.0
"""The near side of a check: writes over each way to the far side, and takes the time."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

import numpy as np
from msgspec.structs import replace

from te.blocks import Blocks
from te.doctor.channel import REPLY_BYTES_MAX, Channel, ChannelError, call
from te.doctor.facts import Port
from te.doctor.messages import (
    BUFFER_NBYTES,
    REPLIES,
    Digest,
    Digested,
    EngineOpened,
    Host,
    Look,
    OpenEngine,
    Refused,
    Request,
)
from te.doctor.outcome import Cell, End, Stage, matching_pairs
from te.doctor.rules import usable_ports
from te.doctor.service import LOOPBACK, engine_config
from te.engine import Engine
from te.errors import Error
from te.peers import Peer
from te.proof import NO_KEY, Key
from te.topology.gids import GidKind
from te.transfers import Transfer
from te.transports.rdma.striping import pairs

__all__ = ["Near", "Progress", "child", "dial", "loop_back", "matrix"]

#: Small writes whose median counts, after as many that do not.
SMALL_WRITES: Final = 20
SMALL_NBYTES: Final = 8
#: For so long large writes are made, but no more than so many (4 GiB), so many at once.
RATE_S: Final = 0.3
LARGE_WRITES_MAX: Final = 1024
WRITES_IN_FLIGHT: Final = 4
#: Of one write: above what the plane's own deadlines allow it.
WRITE_TIMEOUT_S: Final = 10.0
#: The far side opens an engine, or looks at its machine.
REPLY_TIMEOUT_S: Final = 30.0
CHILD_TIMEOUT_S: Final = 60.0

Progress = Callable[[str], None]
"""Called with what is being done."""

T = TypeVar("T")


@dataclass
class Near:
    """One side's engines and memory, and the channel to the other. Use it as a context manager."""

    channel: Channel
    gid_index: int | None
    #: Random bytes, so that memory that was not written is seen.
    memory: np.ndarray[Any, Any] = field(
        default_factory=lambda: np.random.default_rng().integers(0, 256, BUFFER_NBYTES, np.uint8)
    )
    _engines: dict[tuple[str, str], Engine] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.channel.close)
            for engine in self._engines.values():
                stack.callback(engine.close)

    def look(self) -> Host:
        """The far side; ``ChannelError``."""
        return self._ask(Look(), Host)

    def open_engine(self, transport: str, nic: str, address: str) -> EngineOpened | str:
        """An engine of the far side in place of the one before, or why there is none."""
        found = self.ask(OpenEngine(transport=transport, nic=nic, address=address))
        if isinstance(found, Refused):
            return found.reason
        return _must_be(found, EngineOpened)

    def cell(
        self, transport: str, here: End, there: End, nic: str, far: EngineOpened | str
    ) -> Cell:
        """Tries the way from this side's device ``nic`` (``""`` for none) to that engine."""
        cell = Cell(transport=transport, here=here, there=there, stage=Stage.CONNECT)
        if isinstance(far, str):
            return replace(cell, problem=f"{there}: {far}")
        try:
            peer = self._engine(transport, nic).connect(far.card)
        except (Error, OSError) as exc:
            return replace(cell, problem=str(exc))
        try:
            return self._measure(cell, peer, far)
        finally:
            peer.close()

    def ask(self, request: Request) -> Any:
        """The reply; ``ChannelError``."""
        self.channel.send(request, REPLY_TIMEOUT_S)
        return self.channel.receive(REPLIES, REPLY_BYTES_MAX, REPLY_TIMEOUT_S)

    def _ask(self, request: Request, kind: type[T]) -> T:
        return _must_be(self.ask(request), kind)

    def _engine(self, transport: str, nic: str) -> Engine:
        engine = self._engines.get((transport, nic))
        if engine is None:
            key = self.channel.engine_key
            engine = Engine(engine_config(transport, nic, LOOPBACK, self.gid_index, key))
            self._engines[transport, nic] = engine
            engine.register(self.memory, remote="none")
        return engine

    def _measure(self, cell: Cell, peer: Peer, far: EngineOpened) -> Cell:
        small, large = (
            Blocks.of(self.memory.ctypes.data, far.memory, nbytes)
            for nbytes in (SMALL_NBYTES, BUFFER_NBYTES)
        )
        try:
            cell = replace(cell, stage=Stage.SMALL)
            latency_s = _latency_s(lambda: peer.write(small))
            cell = replace(cell, stage=Stage.LARGE, latency_s=latency_s)
            cell = replace(cell, bytes_per_s=_bytes_per_s(lambda: peer.write(large)))
        except Error as exc:
            return replace(cell, problem=str(exc))
        came = self._ask(Digest(), Digested).digest
        is_right = came == hashlib.sha256(self.memory.data).digest()
        return replace(cell, stage=Stage.DONE if is_right else Stage.BYTES)


def _must_be(found: Any, kind: type[T]) -> T:
    if isinstance(found, Refused):
        raise ChannelError(f"the other doctor refuses: {found.reason}")
    if not isinstance(found, kind):
        raise ChannelError(f"the other doctor answered with {type(found).__name__}")
    return found


def _latency_s(write: Callable[[], Transfer]) -> float:
    """``te.TransferFailed``, ``te.WaitTimeout``."""
    took = []
    for _ in range(2 * SMALL_WRITES):
        begun_s = time.monotonic()
        write().wait(WRITE_TIMEOUT_S)
        took.append(time.monotonic() - begun_s)
    return statistics.median(took[SMALL_WRITES:])


def _bytes_per_s(write: Callable[[], Transfer]) -> float:
    """The rate of writes of the whole memory; ``te.TransferFailed``, ``te.WaitTimeout``."""
    write().wait(WRITE_TIMEOUT_S)  # The first one learns pages, and rates of rails.
    begun_s, done = time.monotonic(), 0
    waiting = deque(write() for _ in range(WRITES_IN_FLIGHT))
    while waiting:
        waiting.popleft().wait(WRITE_TIMEOUT_S)
        done += 1
        if time.monotonic() - begun_s < RATE_S and done < LARGE_WRITES_MAX:
            waiting.append(write())
    return done * BUFFER_NBYTES / (time.monotonic() - begun_s)


# -- on one host


@contextlib.contextmanager
def child(gid_index: int | None) -> Iterator[Near]:
    """A far side in a process of its own, on this host; ``ChannelError``."""
    near, far = socket.socketpair()
    command = [sys.executable, "-m", "te.doctor.service", str(far.fileno())]
    command += [] if gid_index is None else [str(gid_index)]
    with far:
        process = subprocess.Popen(command, pass_fds=[far.fileno()], start_new_session=True)
    try:
        with Near(call(near, (NO_KEY,), CHILD_TIMEOUT_S), gid_index) as side:
            yield side
        process.wait(CHILD_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def loop_back(
    side: Near, transports: Sequence[str], ports: Sequence[Port], progress: Progress
) -> Iterator[Cell]:
    """Writes to the child over each of the transports, and over each port for RDMA."""
    for transport in transports:
        if transport == "rdma":
            ways = [(End(name=port.nic.name), port.nic.name) for port in ports]
        else:
            ways = [(End(name=transport), "")]
        for end, nic in ways:
            progress(f"writing over {end}")
            far = side.open_engine(transport, nic, LOOPBACK)
            yield side.cell(transport, end, end, nic, far)


# -- between two


def dial(
    where: tuple[str, int], keys: tuple[Key, ...], gid_index: int | None, timeout_s: float
) -> Near:
    """The far side that listens there; ``ChannelError``."""
    host, port = where
    try:
        sock = socket.create_connection((host, port), timeout_s)
    except OSError as exc:
        raise ChannelError(
            f"cannot connect to {host} port {port}: {exc.strerror or exc}; start te doctor"
            f" --listen {host}:{port} there"
        ) from exc
    return Near(call(sock, keys, timeout_s), gid_index)


def matrix(
    side: Near,
    here: Host,
    there: Host,
    names: tuple[str, str],
    transports: Sequence[str],
    progress: Progress,
) -> Iterator[Cell]:
    """Each pair of RDMA devices of one kind, and each address of the far side by the way that this
    host's routes choose."""
    if "rdma" in transports:
        yield from _devices(side, here, there, names, progress)
    if "tcp" in transports:
        for i, address in enumerate(there.addresses):
            yield _address(side, names, address, i > 0, progress)


def _devices(
    side: Near, here: Host, there: Host, names: tuple[str, str], progress: Progress
) -> Iterator[Cell]:
    near = usable_ports(here.facts, here.gid_index)
    far_ports = usable_ports(there.facts, there.gid_index)
    preferred = _preferred(near, far_ports)
    for far_port in far_ports:
        matching = matching_pairs(near, [far_port])
        if not matching:
            continue
        far = side.open_engine("rdma", far_port.nic.name, there.addresses[0])
        for port, _ in matching:
            ends = _end(port, names[0]), _end(far_port, names[1])
            progress(f"writing from {ends[0]} to {ends[1]}")
            cell = side.cell("rdma", *ends, port.nic.name, far)
            is_spare = (port.nic.name, far_port.nic.name) not in preferred
            yield replace(cell, is_spare=is_spare)


def _preferred(near: Sequence[Port], far: Sequence[Port]) -> set[tuple[str, str]]:
    """Pairs of devices over which te makes its rails, as long as they connect."""
    return {(near[i].nic.name, far[j].nic.name) for i, j in pairs(len(near), len(far))}


def _end(port: Port, host: str) -> End:
    addresses = [gid.text for gid in port.gids if gid.kind in (GidKind.IPV4, GidKind.IPV6)]
    return End(
        name=port.nic.name,
        host=host,
        address=addresses[0].removeprefix("::ffff:") if addresses else "",
        netdev=port.nic.netdev,
    )


def _address(
    side: Near, names: tuple[str, str], address: str, is_spare: bool, progress: Progress
) -> Cell:
    there = End(name=address, host=names[1], address=address)
    source = _source_of(address)
    here = End(name=source or "no route", host=names[0], address=source)
    progress(f"writing from {here} to {there}")
    if not source:
        problem = f"this host has no route to {address}"
        cell = Cell(transport="tcp", here=here, there=there, stage=Stage.CONNECT, problem=problem)
    else:
        cell = side.cell("tcp", here, there, "", side.open_engine("tcp", "", address))
    return replace(cell, is_spare=is_spare)


def _source_of(address: str) -> str:
    """The address that the kernel's routes choose to reach it from; ``""`` without a route. Sends
    nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 9))
        except OSError:
            return ""
        return str(sock.getsockname()[0])
