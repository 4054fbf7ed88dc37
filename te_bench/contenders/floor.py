# SPDX-License-Identifier: Apache-2.0
"""The floors: bare C loops (``te_bench._floors``) on a block list that both sides know."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from te_bench.contenders.base import Absent, Contender
from te_bench.memory import HostMemory, Memory
from te_bench.protocol import Info, Setup, Timing
from te_bench.shapes import Plan

__all__ = ["Floor", "FloorSpec", "Kind", "all_floors", "fitting", "parse"]

# A larger block is cut, so that several threads can share one, and no call meets MAX_RW_COUNT.
PIECE_BYTES: Final = 16 << 20
PIPE_BYTES: Final = 1 << 20
PR_SET_PTRACER: Final = 0x59616D61
PR_SET_PTRACER_ANY: Final = -1


class Kind(enum.IntEnum):
    """What a part does; the numbers of ``_floors.c``."""

    SEND = 0
    RECEIVE = 1
    SPLICE = 2
    READ = 3
    VM_WRITE = 4
    VM_READ = 5
    ASK = 6
    COPY = 7


@dataclass(frozen=True)
class FloorSpec:
    """How a floor moves bytes; its parts (threads, connections) come with its name."""

    #: The source's part.
    source: Kind
    #: The destination's; None where the source alone moves the bytes.
    destination: Kind | None
    #: Between the sides: the bytes of the streams, and who is ready and what has landed.
    channel: Literal["tcp", "unix", "none"]
    transport: Literal["tcp", "samehost"]
    #: ``"engine"`` when it needs memory that both sides have mapped.
    memory: Literal["any", "engine"]


FLOORS: Final = {
    "tcp": FloorSpec(Kind.SEND, Kind.RECEIVE, "tcp", "tcp", "any"),
    "unix": FloorSpec(Kind.SEND, Kind.RECEIVE, "unix", "samehost", "any"),
    "vmsplice": FloorSpec(Kind.SPLICE, Kind.READ, "unix", "samehost", "any"),
    "vm_writev": FloorSpec(Kind.VM_WRITE, None, "none", "samehost", "any"),
    "vm_readv": FloorSpec(Kind.ASK, Kind.VM_READ, "unix", "samehost", "any"),
    "mapped": FloorSpec(Kind.COPY, None, "none", "samehost", "engine"),
}


def parse(name: str) -> tuple[FloorSpec, int]:
    """``"vm_writev-2"`` is process_vm_writev with two threads; ``ValueError`` for other names."""
    family, _, parts = name.rpartition("-")
    if family not in FLOORS or not parts.isdecimal() or not 1 <= int(parts) <= 64:
        raise ValueError(f"no floor {name!r}; there are {', '.join(FLOORS)}, each with -1 to -64")
    return FLOORS[family], int(parts)


def fitting(transport: str, memory: str, *, rails: int, sync: bool) -> list[str]:
    """Floors that do the same work as te does with these settings; the best of them counts."""
    if transport == "tcp":
        return [f"tcp-{1 if sync else rails}"]
    families = [
        name
        for name, spec in FLOORS.items()
        if spec.transport == "samehost" and spec.memory == memory
    ]
    # Without several blocks under way a second thread has nothing to do.
    return [f"{family}-{parts}" for family in families for parts in ((1,) if sync else (1, 2))]


def all_floors(*, rails: int, sync: bool) -> list[str]:
    """Every floor, for whatever transport and memory."""
    if sync:
        return [f"{family}-1" for family in FLOORS]
    parts = sorted({1, 2, rails})
    return [f"{family}-{count}" for family in FLOORS for count in parts]


class Floor(Contender):
    """One floor, named by ``setup.contender`` as in ``floor:tcp-2``."""

    def __init__(self, setup: Setup, plan: Plan) -> None:
        super().__init__(setup, plan)
        self._spec, self._count = parse(setup.contender.removeprefix("floor:"))
        self._pid = 0
        self._far: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._controls: list[int] = []
        self._fds: list[int] = []
        self._kept: list[object] = []

    def version(self) -> str:
        return "C"

    def allocate(self, nbytes: int) -> Memory:
        if self._spec.memory != "engine" or self.setup.role == "source":
            return super().allocate(nbytes)
        self._memory_fd = os.memfd_create("te-bench")
        os.ftruncate(self._memory_fd, nbytes)
        return HostMemory(np.frombuffer(mmap.mmap(self._memory_fd, nbytes), np.uint8))

    def open(self, memory: Memory) -> Info:
        try:
            from te_bench import _floors
        except ImportError as error:
            raise Absent(f"te_bench._floors is not built: {error}") from error
        self._run = _floors.run
        self._memory = memory
        # Where Yama limits ptrace, siblings may copy only with consent; elsewhere an error.
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
        if self.setup.role == "source":
            return {}
        if self._spec.memory == "engine":
            return {"memory_fd": self._memory_fd}
        if self._spec.channel == "none":
            return {}
        self._listener = _listen(self._spec.channel, self._count)
        address = self._listener.getsockname()
        return {"listening": address.decode() if isinstance(address, bytes) else address}

    def connect(self, there: Info) -> Info:
        base = there["address"]
        if self._spec.memory == "engine":
            base = self._map(there)
        self._far = self._iovecs(self.plan.addresses(base, self.plan.destination))
        self._pid = there["pid"]
        if "listening" in there:
            for _ in range(self._count):
                self._add_control(_connect(self._spec.channel, there["listening"]))
        self._fds = list(self._controls)
        told: Info = {"address": self._memory.address, "rails": self._count}
        if self._spec.source is Kind.SPLICE:
            pipes = [os.pipe() for _ in range(self._count)]
            self._fds = [writer for _, writer in pipes]
            told["pipes"] = [reader for reader, _ in pipes]
        return told

    def accept(self, there: Info) -> None:
        self._pid = there["pid"]
        self._far = self._iovecs(self.plan.addresses(there["address"], self.plan.source))
        if self._spec.destination is None:
            return
        self._listener.settimeout(self.setup.deadline_s)
        for _ in range(self._count):
            self._add_control(self._listener.accept()[0])
        self._fds = list(self._controls)
        if "pipes" in there:
            self._fds = [self._open_pipe(there["pid"], fd) for fd in there["pipes"]]

    def transfer(self) -> Timing:
        elapsed_ns, times_ns = self._move(self._spec.source, self.plan.source)
        return Timing(elapsed_ns=elapsed_ns, ops_ns=times_ns)

    def receive(self) -> None:
        if self._spec.destination is not None:
            self._move(self._spec.destination, self.plan.destination)

    def _move(self, kind: Kind, slots: npt.NDArray[np.uint64]) -> tuple[int, list[int]]:
        near = self._iovecs(self.plan.addresses(self._memory.address, slots))
        bounds = np.linspace(0, len(near), self._count + 1).astype(np.int64)
        times_ns = np.zeros(len(near), np.uint64)
        none = [-1] * self._count
        elapsed_ns = self._run(
            kind,
            self._pid,
            self.plan.shape.sync,
            near,
            self._far,
            bounds,
            np.array(self._fds or none, np.int32),
            np.array(self._controls or none, np.int32),
            times_ns,
        )
        steps = times_ns if self.plan.shape.sync else times_ns[bounds[:-1]]
        return elapsed_ns, steps.tolist()

    def _iovecs(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """struct iovec for each block; for a large one, for each piece, the same on both sides."""
        offsets = np.arange(0, self.plan.shape.nbytes, PIECE_BYTES, dtype=np.uint64)
        rows = np.empty((addresses.size, offsets.size, 2), np.uint64)
        rows[:, :, 0] = addresses.reshape(-1, 1) + offsets
        rows[:, :, 1] = np.minimum(
            np.uint64(PIECE_BYTES), np.uint64(self.plan.shape.nbytes) - offsets
        )
        return rows.reshape(-1, 2)

    def _add_control(self, connection: socket.socket) -> None:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            timeout = struct.pack("ll", int(self.setup.deadline_s), 0)
            connection.setsockopt(socket.SOL_SOCKET, option, timeout)
        connection.setblocking(True)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._kept.append(connection)
        self._controls.append(connection.fileno())

    def _map(self, there: Info) -> int:
        """Maps the destination's memory; the address it has here."""
        fd = os.open(f"/proc/{there['pid']}/fd/{there['memory_fd']}", os.O_RDWR)
        far = np.frombuffer(mmap.mmap(fd, self.plan.memory_nbytes), np.uint8)
        far.reshape(-1)[::4096].sum()  # touched now, so that no round pays for the page faults
        self._kept.append(far)
        return int(far.ctypes.data)

    def _open_pipe(self, pid: int, fd: int) -> int:
        reader = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        with contextlib.suppress(PermissionError):  # above pipe-max-size: as large as it is
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return reader


def _listen(channel: str, backlog: int) -> socket.socket:
    if channel == "tcp":
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0te-bench-{secrets.token_hex(16)}")  # abstract: leaves no file behind
    listener.listen(backlog)
    return listener


def _connect(channel: str, address: Sequence[str | int] | str) -> socket.socket:
    if channel == "tcp":
        return socket.create_connection((str(address[0]), int(address[1])))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    return connection
