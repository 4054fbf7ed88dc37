# SPDX-License-Identifier: Apache-2.0
"""What every transport is tested over, and two engines with memory on it. A new transport is one
more line in ``WAYS``, and one in ``STAGING`` if it stages memory that it does not touch itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import numpy as np
import pytest
from te_direct import NullEngine
from te_far import pattern, wait_until
from te_far_gpu import is_shared
from te_sealed import Sealed, SealedMemory, sealed

import te
from te.memory import Remote
from te.transports.tcp import kernel_tls
from te_bench._null import Wires

__all__ = [
    "EMPTY",
    "GUARD",
    "TIMEOUT_S",
    "WAYS",
    "Pair",
    "Way",
    "cancel",
    "copied",
    "outcome",
    "paired",
]

TIMEOUT_S: Final = 60.0
#: What destinations are full of.
GUARD: Final = 0xEE
EMPTY: Final = te.Blocks.of([], [], [])

Maker: TypeAlias = Callable[..., te.Engine]
"""An engine of this transport, with these settings besides."""


#: Transports that carry memory which the kernel cannot touch.
STAGING: Final = ("tcp", "samehost")
#: Large enough for the segments of ``pair``, and smaller than the default ones.
SLOT_BYTES: Final = 256 << 10
#: Of every engine, unless a test is about them: a thread may stand still for seconds.
PATIENT: Final[dict[str, Any]] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
#: Blocks of more bytes than this are faster to copy one by one.
SLICE_BYTES: Final = 64
#: Of each copy: as long as a thread sleeps at the least, more or less.
COPY_DELAY_US: Final = 20


def _of_config(transport: str) -> Callable[[], Maker]:
    return lambda: (
        lambda **config: te.Engine(te.Config(transports=(transport,), **(PATIENT | config)))
    )


def _of_few_slots(transport: str) -> Callable[[], Maker]:
    """Four for each worker and direction."""

    def make(workers: int = 2, **config: Any) -> te.Engine:
        nbytes = 2 * workers * 4 * SLOT_BYTES
        return te.Engine(
            te.Config(
                transports=(transport,),
                workers=workers,
                staging_bytes=nbytes,
                staging_slot_bytes=SLOT_BYTES,
                **(PATIENT | config),
            )
        )

    return lambda: make


def _encrypted(by_kernel: bool) -> Callable[[], Maker]:
    problem = None if by_kernel else "it is left out by a test"
    keys = (pattern(9, 32).tobytes(),)

    def make(**config: Any) -> te.Engine:
        with patch.object(kernel_tls, "problem", lambda: problem):
            return te.Engine(
                te.Config(
                    transports=("tcp",), **(PATIENT | {"keys": keys, "encrypt": True} | config)
                )
            )

    return lambda: make


def _of_null_devices() -> Maker:
    wires = Wires()
    return lambda **config: NullEngine(wires, **(PATIENT | config))


@dataclass(frozen=True)
class Way:
    """A transport, and what is under it."""

    transport: str
    #: Makes what makes engines that reach each other.
    maker: Callable[[], Maker]
    #: Whether a byte moves. Over null devices all else is as over RDMA, but memory stays as it is.
    moves_bytes: bool = True
    #: Whether a destination is looked up as a whole, so that of a refused transfer nothing lands at
    #: all; else nothing of the refused segment. Where it is, ranges of tags bind nobody.
    looks_up_all: bool = False
    #: Whether the other side knows nothing of a read.
    reads_one_sided: bool = False
    #: Whose memory no kernel can touch: the source's, the target's.
    is_sealed: tuple[bool, bool] = (False, False)
    #: Whether the target's kind maps the source's.
    is_mapped: bool = False


def in_turn(name: str) -> list[pytest.MarkDecorator]:
    """What is like one of the plain transports, and is tested in some runs."""
    return [pytest.mark.slow, pytest.mark.by_turns(name)]


WAYS: Final = [
    pytest.param(Way("tcp", _of_config("tcp")), id="tcp"),
    pytest.param(
        Way("tcp", _encrypted(by_kernel=False)), id="tcp-encrypted", marks=in_turn("encrypted")
    ),
    pytest.param(
        Way("tcp", _encrypted(by_kernel=True)),
        id="tcp-encrypted-by-kernel",
        # It is about the testbed's kernel, so one of its drivers is enough.
        marks=[pytest.mark.rdma, pytest.mark.driver("rxe"), pytest.mark.by_turns(alone=True)],
    ),
    pytest.param(Way("samehost", _of_config("samehost")), id="samehost"),
    pytest.param(
        Way("rdma", _of_null_devices, moves_bytes=False, looks_up_all=True, reads_one_sided=True),
        id="null-devices",
    ),
    pytest.param(
        Way("rdma", _of_config("rdma"), looks_up_all=True, reads_one_sided=True),
        id="rdma",
        marks=pytest.mark.rdma,
    ),
    *(
        pytest.param(
            Way("samehost", _of_few_slots("samehost"), is_sealed=is_sealed, is_mapped=True),
            id=f"samehost-mapped-{places}",
            marks=in_turn(f"mapped {places}"),
        )
        for places, is_sealed in (("sealed-sealed", (True, True)), ("sealed-host", (True, False)))
    ),
    *(
        pytest.param(
            Way(transport, _of_few_slots(transport), is_sealed=is_sealed),
            id=f"{transport}-{places}",
            marks=in_turn(f"{transport} {places}"),
        )
        for transport in STAGING
        for places, is_sealed in (
            ("sealed-sealed", (True, True)),
            ("sealed-host", (True, False)),
            ("host-sealed", (False, True)),
        )
    ),
]


class Pair:
    """A source with patterned memory, a target with memory full of ``GUARD``, and the peer."""

    def __init__(
        self,
        way: Way,
        kind: Sealed | None,
        nbytes: int,
        remote: Remote = "read-write",
        **config: Any,
    ) -> None:
        self.way, self.make = way, way.maker()
        self.source, self.target = self.make(**config), self.make(**config)
        #: By the address at which the test sees it.
        self._sealed: dict[int, SealedMemory] = {}
        self.src, self.dst = (
            self._allocate(kind if is_sealed else None, nbytes) for is_sealed in way.is_sealed
        )
        if kind is not None and way.is_mapped:  # Else the target does not know the kind.
            self.register(self.target, self._allocate(kind, 1), remote="none")
        self.src[:], self.dst[:] = _what_is_sent(nbytes), GUARD
        self.src_region = self.register(self.source, self.src, remote="none")
        self.dst_region = self.register(self.target, self.dst, remote=remote)
        self.peer = self.source.connect(self.target.card())
        assert self.peer.transport == way.transport
        if way.is_mapped:
            wait_until(lambda: is_shared(self.source, self.src_region), "the target has mapped it")

    def register(
        self, engine: te.Engine, memory: np.ndarray, remote: Remote = "tagged"
    ) -> te.Region:
        """``src`` or ``dst``, where te is to find it; or some other memory."""
        found = self._sealed.get(memory.ctypes.data)
        if found is None:
            return engine.register(memory, remote=remote)
        return engine.register(found.address, memory.nbytes, remote=remote)

    def blocks(self, src: object, dst: object, nbytes: object) -> te.Blocks:
        """For a write, from offsets."""
        return self._blocks(self.src_region, src, self.dst_region, dst, nbytes)

    def blocks_back(self, src: object, dst: object, nbytes: object) -> te.Blocks:
        """For a read, from offsets: ``src`` is the target's memory."""
        return self._blocks(self.dst_region, src, self.src_region, dst, nbytes)

    def write(
        self, src: object, dst: object, nbytes: object, tag: int = 0, *, is_awaited: bool = False
    ) -> te.Transfer:
        return self.peer.write(self.blocks(src, dst, nbytes), tag, is_awaited=is_awaited)

    def assert_moved(self, memory: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """It is as after what was done; where no byte moves, as before."""
        assert (memory == (after if self.way.moves_bytes else before)).all()

    def moved_nbytes(self) -> int:
        """What both engines have counted."""
        stats = self.source.stats(), self.target.stats()
        return sum(one.bytes_sent + one.bytes_received for one in stats)

    def await_progress(self, since: int, *transfers: te.Transfer) -> None:
        """More has moved than that, or one of these has an outcome."""
        wait_until(
            lambda: (
                self.moved_nbytes() > since
                or any(one.poll() is not te.Status.PENDING for one in transfers)
            ),
            "something moves",
        )

    def flush(self) -> None:
        """What was under way before is over: a write behind it has landed, at the last byte."""
        last = len(self.dst) - 1
        assert self.write(last, last, 1).wait(TIMEOUT_S) is te.Status.DONE

    def close(self) -> None:
        """And nothing of the engines is left."""
        self.source.close()
        self.target.close()
        # The pool's threads are not waited for: they may be in a call that blocks.
        assert all(name.startswith("te-pool-") for name in self.threads()), self.threads()
        wait_until(lambda: not self.threads(), "no thread is left")

    def threads(self) -> list[str]:
        """The names of the engines' threads."""
        ids = self.source.id[:8], self.target.id[:8]
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if any(one in name for one in ids)]

    def _allocate(self, kind: Sealed | None, nbytes: int) -> np.ndarray:
        if kind is None:
            return np.empty(nbytes, np.uint8)
        memory = kind.allocate(nbytes)
        self._sealed[memory.view.ctypes.data] = memory
        return memory.view[:nbytes]

    @staticmethod
    def _blocks(
        src: te.Region, src_at: object, dst: te.Region, dst_at: object, nbytes: object
    ) -> te.Blocks:
        return te.Blocks.of(
            src.address + np.asarray(src_at, np.uint64),
            dst.address + np.asarray(dst_at, np.uint64),
            nbytes,  # type: ignore[arg-type]
        )


@cache
def _what_is_sent(nbytes: int) -> np.ndarray:
    """Kept: making sixteen megabytes takes longer than sending them."""
    made = pattern(1, nbytes)
    made.flags.writeable = False
    return made


@contextlib.contextmanager
def paired(way: Way, nbytes: int = 4 << 20, **config: Any) -> Iterator[Pair]:
    """Engines with these settings."""
    with contextlib.ExitStack() as stack:
        kind = None
        if any(way.is_sealed):
            kind = stack.enter_context(sealed(1, COPY_DELAY_US, way.is_mapped))
        yield stack.enter_context(contextlib.closing(Pair(way, kind, nbytes, **config)))


def copied(
    src: np.ndarray, dst: np.ndarray, src_at: np.ndarray, dst_at: np.ndarray, nbytes: np.ndarray
) -> np.ndarray:
    """What ``dst`` is once these blocks have been copied into it; offsets and sizes, shape (n,)."""
    after = dst.copy()
    if nbytes.sum() > SLICE_BYTES * len(nbytes):
        # An index for each byte would take twenty times as long.
        for source, target, count in zip(src_at, dst_at, nbytes, strict=True):
            after[target : target + count] = src[source : source + count]
        return after
    inside = np.arange(nbytes.sum()) - np.repeat(np.cumsum(nbytes) - nbytes, nbytes)
    after[np.repeat(dst_at, nbytes) + inside] = src[np.repeat(src_at, nbytes) + inside]
    return after


def cancel(transfer: te.Transfer) -> None:
    """A read is not cancelled while something of it lands, by a thread that may stand still."""

    def is_asked() -> bool:
        with contextlib.suppress(te.FenceTimeout):
            transfer.cancel()
            return True
        return False

    wait_until(is_asked, "nothing of it lands any more")


def outcome(transfer: te.Transfer) -> te.Status:
    """Waits for it; it may be any."""
    with contextlib.suppress(te.TransferFailed):
        transfer.wait(TIMEOUT_S)
    assert transfer.poll() is not te.Status.PENDING
    assert bool(transfer.reason) == (transfer.poll() is te.Status.FAILED)
    return transfer.poll()
