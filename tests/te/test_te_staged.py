# SPDX-License-Identifier: Apache-2.0
"""Engines whose memory no kernel can touch, over every transport that stages: what copies that
hang or fail, and a lack of slots, make of transfers. What holds for any memory is the contract's
(te_contract.py)."""

from __future__ import annotations

import base64
import contextlib
import errno
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from te_far import FarEngine, pattern, wait_until
from te_sealed import Sealed, SealedMemory, sealed

import te

TIMEOUT_S = 60.0
#: Of all engines: a thread may stand still for seconds.
PATIENT: dict[str, Any] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
TAG = 0x5EA1ED
PAGE = 4096
NBYTES = 256 * PAGE
SLOT_BYTES = 16 << 10
TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "samehost"])


def config(transport: str, slots: int = 4, **changes: Any) -> te.Config:
    """With so many slots for each worker and direction."""
    changes = {"rails": 2, "workers": 2, "segment_bytes": 100_000, **PATIENT, **changes}
    nbytes = 2 * changes["workers"] * slots * SLOT_BYTES
    return te.Config(
        transports=(transport,), staging_bytes=nbytes, staging_slot_bytes=SLOT_BYTES, **changes
    )


@dataclass
class Memory:
    """Some memory: where te finds it, and as the test sees it."""

    address: int
    view: np.ndarray[Any, Any]
    #: Keeps it.
    owner: SealedMemory | None = None


def memory_of(kind: Sealed, place: str, nbytes: int = NBYTES) -> Memory:
    if place == "sealed":
        found = kind.allocate(nbytes)
        return Memory(found.address, found.view, found)
    array = np.zeros(nbytes, np.uint8)
    return Memory(array.ctypes.data, array)


@dataclass
class World:
    """Two engines, and memory of each."""

    kind: Sealed
    source: te.Engine
    target: te.Engine
    src: Memory
    dst: Memory
    peer: te.Peer

    def blocks(self, seed: int = 1, size: int = PAGE, count: int | None = None) -> te.Blocks:
        """Pages, or pieces of them, in any order on both sides."""
        generator = random.Random(seed)
        pages = range(NBYTES // PAGE)
        near = np.array(generator.sample(pages, len(pages)), np.uint64)[:count] * np.uint64(PAGE)
        far = np.array(generator.sample(pages, len(pages)), np.uint64)[:count] * np.uint64(PAGE)
        self.near, self.far, self.size = near, far, size
        return te.Blocks.of(
            np.uint64(self.src.address) + near, np.uint64(self.dst.address) + far, size
        )

    @property
    def has_arrived(self) -> bool:
        """Whether the destination has what the last ``blocks`` name."""
        return all(
            (self.dst.view[far : far + self.size] == self.src.view[near : near + self.size]).all()
            for near, far in zip(self.near.tolist(), self.far.tolist(), strict=True)
        )


@contextlib.contextmanager
def world(
    transport: str, places: str = "sealed-sealed", delay_us: int = 100, **changes: Any
) -> Iterator[World]:
    near, far = places.split("-")
    with (
        sealed(3, delay_us) as kind,
        te.Engine(config(transport, **changes)) as source,
        te.Engine(config(transport, **changes)) as target,
    ):
        src, dst = memory_of(kind, near), memory_of(kind, far)
        src.view[:] = np.frombuffer(random.Random(7).randbytes(NBYTES), np.uint8)
        source.register(src.address, NBYTES)
        target.register(dst.address, NBYTES)
        target.expect(TAG)
        yield World(kind, source, target, src, dst, source.connect(target.card()))


def outcome(transfer: te.Transfer) -> te.Status:
    with contextlib.suppress(te.TransferFailed):
        transfer.wait(TIMEOUT_S)
    return transfer.poll()


@TRANSPORTS
@pytest.mark.parametrize("slots", [1, 4])
def test_small_and_large_transfers_at_once(transport: str, slots: int) -> None:
    with world(transport, slots=slots) as here:
        blocks = [*(here.blocks(1, 100 + i, 3) for i in range(20)), here.blocks(1, PAGE)]
        transfers = [here.peer.write(one, tag=TAG) for one in blocks]
        for transfer in transfers:
            assert transfer.wait(TIMEOUT_S) is te.Status.DONE
        assert here.target.arrived(TAG) == 21
        assert here.has_arrived


@pytest.mark.slow
@TRANSPORTS
def test_workers_that_never_spin_see_that_copies_are_over(transport: str) -> None:
    """They look at deadlines a few times a second: with nothing else each took 0.15 s."""
    took_s = []
    with world(transport, spin_s=0.0) as here:
        for _ in range(400):
            begun_s = time.monotonic()
            transfer = here.peer.write(here.blocks(1, 64, 1), tag=TAG)
            assert transfer.wait(TIMEOUT_S) is te.Status.DONE
            took_s.append(time.monotonic() - begun_s)
    assert statistics.median(took_s) < 0.075  # Some wait for a core.


@TRANSPORTS
def test_a_transfer_of_both_kinds(transport: str) -> None:
    """As the pages of a GPU and the metadata of a request, which is in host memory."""
    with world(transport) as here:
        src, dst = memory_of(here.kind, "host"), memory_of(here.kind, "host")
        src.view[:] = np.frombuffer(random.Random(8).randbytes(NBYTES), np.uint8)
        here.source.register(src.address, NBYTES)
        here.target.register(dst.address, NBYTES)
        starts = np.arange(0, NBYTES, PAGE, np.uint64)
        near = np.where(starts // PAGE % 2, here.src.address, src.address).astype(np.uint64)
        far = np.where(starts // PAGE % 3, here.dst.address, dst.address).astype(np.uint64)
        blocks = te.Blocks.of(near + starts, far + starts, PAGE)
        assert here.peer.write(blocks, tag=TAG).wait(TIMEOUT_S) is te.Status.DONE
        for at in range(0, NBYTES, PAGE):
            one = (here.src if at // PAGE % 2 else src).view[at : at + PAGE]
            other = (here.dst if at // PAGE % 3 else dst).view[at : at + PAGE]
            assert (one == other).all()


@TRANSPORTS
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("how", ["fail", "refuse"])
def test_a_copy_that_fails_fails_its_transfer_alone(transport: str, side: str, how: str) -> None:
    places = "sealed-host" if side == "source" else "host-sealed"
    says = "the source memory cannot be read" if side == "source" else "cannot be written"
    with world(transport, places) as here:
        getattr(here.kind, how)(2)
        transfer = here.peer.write(here.blocks(), tag=TAG)
        assert outcome(transfer) is te.Status.FAILED
        assert says in str(transfer.reason)
        assert here.target.arrived(TAG) == 0
        assert here.peer.write(here.blocks(), tag=TAG).wait(TIMEOUT_S) is te.Status.DONE
        assert here.has_arrived


@TRANSPORTS
def test_a_fence_waits_for_copies(transport: str) -> None:
    with world(transport, "host-sealed") as here:
        with here.kind.stuck():
            transfer = here.peer.write(here.blocks(), tag=TAG)
            while here.kind.events == 0:
                transfer.poll()
            with pytest.raises(te.FenceTimeout, match="a landing did not end"):
                here.target.fence(TAG, 0.05)
            other = TAG + 1
            here.target.expect(other)
            here.target.fence(other, TIMEOUT_S)  # Nothing of it is under way.
        assert here.target.fence(TAG, TIMEOUT_S) == 0
        before = here.dst.view.copy()
        assert outcome(transfer) is te.Status.FAILED
        assert "was fenced" in transfer.reason
        assert (here.dst.view == before).all()


@TRANSPORTS
@pytest.mark.parametrize("places", ["sealed-host", "host-sealed"])
def test_an_engine_says_that_a_device_still_copies(
    transport: str, places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te.engine.CLOSE_TIMEOUT_S", 0.2)
    with world(transport, places) as here:
        engine = here.source if places == "sealed-host" else here.target
        with here.kind.stuck():
            transfer = here.peer.write(here.blocks(), tag=TAG)
            while here.kind.events == 0:
                transfer.poll()
            with pytest.raises(te.FenceTimeout, match="memory must not be reused"):
                engine.close()
            if places == "sealed-host":
                assert transfer.poll() is te.Status.PENDING  # Its memory is being read.
        monkeypatch.setattr("te.engine.CLOSE_TIMEOUT_S", TIMEOUT_S)
        engine.close()
        assert outcome(transfer) in (te.Status.FAILED, te.Status.DONE)


@TRANSPORTS
def test_many_peers_share_few_slots(transport: str) -> None:
    with world(transport, workers=1, slots=1) as here, contextlib.ExitStack() as stack:
        others = []
        for i in range(4):
            engine = stack.enter_context(te.Engine(config(transport, workers=1, slots=1)))
            memory = memory_of(here.kind, "sealed")
            memory.view[:] = i + 1
            engine.register(memory.address, NBYTES)
            others.append((engine.connect(here.target.card()), memory))
        whole = [
            peer.write(te.Blocks.of(memory.address, here.dst.address, NBYTES), tag=TAG)
            for peer, memory in others
        ]
        for transfer in whole:
            assert transfer.wait(TIMEOUT_S) is te.Status.DONE
        assert set(np.unique(here.dst.view)) <= {1, 2, 3, 4}


@pytest.mark.slow
@TRANSPORTS
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_peer_that_is_killed_takes_no_slot_along(transport: str, side: str) -> None:
    """While it is written to, or writes."""
    with (
        sealed(3) as kind,
        te.Engine(config(transport, slots=1)) as near,
        contextlib.ExitStack() as stack,
    ):
        memory = kind.allocate(NBYTES)
        near.register(memory.address, NBYTES, remote="read-write")
        for turn in range(3):
            far = FarEngine(transports=[transport], **PATIENT)
            stack.callback(far.end)
            there = far.register(nbytes=NBYTES, seed=turn)
            before = near.stats()
            if side == "source":
                peer = near.connect(far.bytes_card())
                blocks = te.Blocks.of(memory.address, there, NBYTES)
                transfers = [peer.write(blocks) for _ in range(20)]
                wait_until(lambda b=before: near.stats().bytes_sent > b.bytes_sent, "data flows")
                far.process.kill()
                assert {outcome(one) for one in transfers} <= {te.Status.DONE, te.Status.FAILED}
            else:
                write_from(far, there, near, memory, 20)
                wait_until(
                    lambda b=before: near.stats().bytes_received > b.bytes_received, "data flows"
                )
                far.process.kill()
                wait_until(lambda: near.stats().rails == 0, "its link is gone")
        far = FarEngine(transports=[transport], **PATIENT)
        stack.callback(far.end)
        there = far.register(nbytes=NBYTES, seed=9)
        assert far.outcome(number=write_from(far, there, near, memory, 1))[0] == "done"
        assert (memory.view == pattern(9, NBYTES)).all()
        peer = near.connect(far.bytes_card())
        blocks = te.Blocks.of(memory.address, there, NBYTES)
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE


def write_from(
    far: FarEngine, there: int, near: te.Engine, memory: SealedMemory, count: int
) -> int:
    """Has it write all of it so many times; the number of the last."""
    peer = far.connect(card=base64.b64encode(near.card()).decode())
    for _ in range(count):
        number = far.write(peer=peer, src=[there], dst=[memory.address], nbytes=[NBYTES])
    return int(number)


def test_memory_whose_kind_cannot_use_the_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "the driver pins nothing")

    with sealed() as kind, te.Engine(config("tcp")) as engine:
        memory = kind.allocate(NBYTES)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "pin", refuse)
            with pytest.raises(
                te.RegistrationError, match=r"no host memory to stage sealed .* pins"
            ):
                engine.register(memory.address, NBYTES)
        region = engine.register(memory.address, NBYTES)
        assert (region.kind, region.export) == ("sealed", None)
        engine.deregister(region)
