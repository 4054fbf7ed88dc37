# SPDX-License-Identifier: Apache-2.0
"""Two processes, of which one is killed, frozen or too slow."""

from __future__ import annotations

import base64
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from te_far import FarEngine, FarError, pattern, wait_until
from te_transports import TRANSPORTS

import te

PENDING = te.Status.PENDING
TIMEOUT_S = 60.0
#: Of all engines, unless a test is about them: a thread may stand still for seconds.
PATIENT: dict[str, Any] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
MANY_BYTES = 64 << 20
#: Far more than a thread of a process that runs is off its processor.
STALL_S = 4.0
#: How often each of many transfers writes all of the memory: enough that a test whose thread loses
#: its core for a while still catches them under way. RDMA counts the first when it has landed.
COPIES = [1] + [16] * 63

Far = Callable[..., FarEngine]


@pytest.fixture(params=TRANSPORTS)
def far(request: pytest.FixtureRequest) -> Iterator[Far]:
    """Starts far engines, and ends them whatever happens."""
    engines: list[FarEngine] = []

    def start(**config: Any) -> FarEngine:
        engines.append(FarEngine(**{"transports": [request.param]} | PATIENT | config))
        return engines[-1]

    yield start
    for engine in engines:
        engine.end()


@pytest.mark.slow
def test_scattered_pages_between_processes(far: Far) -> None:
    target = far()
    nbytes, page = 1 << 20, 4096
    dst = target.register(nbytes=nbytes)
    src = pattern(5, nbytes)
    pages = np.random.default_rng(1).permutation(200)
    with te.Engine(te.Config(**PATIENT)) as source:
        region = source.register(src)
        peer = source.connect(target.bytes_card())
        assert peer.id == target.engine_id
        assert [(one.address, one.nbytes) for one in peer.regions] == [(dst, nbytes)]
        target.expect(tag=3)
        blocks = te.Blocks.of(
            region.address + pages * page, dst + 7 + pages[::-1] * (page + 13), page
        )
        peer.write(blocks, tag=3).wait(TIMEOUT_S)
        assert target.arrived(tag=3) == 1
    expected = np.zeros(nbytes, np.uint8)
    for one, two in zip(pages, pages[::-1], strict=True):
        start = 7 + two * (page + 13)
        expected[start : start + page] = src[one * page : (one + 1) * page]
    assert (target.memory(dst) == expected).all()


def start_flood(source: FarEngine, target: te.Engine, memory: np.ndarray, tag: int) -> list[int]:
    """Has the far source write much more than the sockets hold; waits until it is under way."""
    src = source.register(nbytes=len(memory), seed=6)
    peer = source.connect(card=_text(target.card()))
    base = int(memory.ctypes.data)
    numbers = [
        source.write(peer=peer, src=[src] * n, dst=[base] * n, nbytes=[len(memory)] * n, tag=tag)
        for n in COPIES
    ]
    wait_until(lambda: target.stats().bytes_received > 0, "data flows")
    return numbers


def _text(card: bytes) -> str:
    return base64.b64encode(card).decode()


@pytest.mark.slow
def test_nothing_lands_after_a_fence_although_the_source_was_frozen(far: Far) -> None:
    memory = np.zeros(MANY_BYTES, np.uint8)
    source = far()
    with te.Engine(te.Config(**PATIENT)) as target:
        target.register(memory)
        target.expect(11)
        numbers = start_flood(source, target, memory, 11)
        source.signal(signal.SIGSTOP)
        assert target.fence(11, TIMEOUT_S) < len(COPIES)
        memory[:] = 0xCA
        received = target.stats().bytes_received
        source.signal(signal.SIGCONT)
        outcomes = [source.outcome(number=number) for number in numbers]
        assert {status for status, _ in outcomes} <= {"done", "failed"}
        last = outcomes[-1]
        assert last[0] == "failed"
        assert "fenced" in last[1]
        assert (memory == 0xCA).all()
        assert target.stats().bytes_received == received


@pytest.mark.slow
def test_killed_destination(far: Far) -> None:
    target = far()
    dst = target.register(nbytes=MANY_BYTES)
    with te.Engine(te.Config(**PATIENT)) as source:
        buffer = np.zeros(MANY_BYTES, np.uint8)
        region = source.register(buffer)
        card = target.bytes_card()
        peer = source.connect(card)
        transfers = [
            peer.write(te.Blocks.of(region.address, [dst] * n, MANY_BYTES)) for n in COPIES
        ]
        wait_until(lambda: source.stats().bytes_sent > 0, "data flows")
        target.process.kill()
        with pytest.raises(te.TransferFailed, match=f"{target.engine_id} .*(clos|reset|broke)"):
            transfers[-1].wait(TIMEOUT_S)
        for transfer in transfers:
            assert transfer.poll() in (te.Status.DONE, te.Status.FAILED)
        assert not peer.alive
        source.deregister(region, TIMEOUT_S)
        target.process.wait(TIMEOUT_S)
        with pytest.raises(te.ConnectError, match=r"Connection refused|on this host"):
            source.connect(card)


@pytest.mark.slow
def test_frozen_destination(far: Far) -> None:
    target = far()
    dst = target.register(nbytes=MANY_BYTES)
    with te.Engine(te.Config(**PATIENT | {"stall_timeout_s": 0.5})) as source:
        buffer = np.zeros(MANY_BYTES, np.uint8)
        region = source.register(buffer)
        card = target.bytes_card()
        peer = source.connect(card)
        target.signal(signal.SIGSTOP)
        transfer = peer.write(te.Blocks.of(region.address, dst, MANY_BYTES))
        small = peer.write(te.Blocks.of(region.address, dst, 1))
        for one in (transfer, small):
            # Or by the kernel's deadline, twice as long, where the worker has not run meanwhile.
            said = "(no progress for 0.5 s|Connection timed out)"
            with pytest.raises(te.TransferFailed, match=f"{peer.id} .* {said}"):
                one.wait(TIMEOUT_S)
        target.signal(signal.SIGCONT)

        def is_written() -> bool:
            """By a new link, on which a machine that stands still is a stall, too."""
            again = source.connect(card)
            assert again is not peer
            written = again.write(te.Blocks.of(region.address, dst, 1))
            with contextlib.suppress(te.TransferFailed):
                written.wait(TIMEOUT_S)
            return written.poll() is te.Status.DONE

        wait_until(is_written, "a new link carries it")


@pytest.mark.slow
@pytest.mark.parametrize("also_target", [False, True], ids=["source", "both"])
def test_time_in_which_it_stood_still_itself_counts_against_no_peer(
    far: Far, also_target: bool, request: pytest.FixtureRequest
) -> None:
    """Both: as where a machine stands still, and the peer goes on a moment later."""
    # All of it has to arrive, and an emulated machine takes a second for 50 MB.
    copies = [1, 2, 2, 2] if request.node.callspec.params["far"] == "rdma" else COPIES[:4]
    config = {"stall_timeout_s": STALL_S, "workers": 2, "rails": 2}
    source, target = far(**config), far()
    src, dst = source.register(nbytes=MANY_BYTES, seed=6), target.register(nbytes=MANY_BYTES)
    peer = source.connect(card=target.card())
    numbers: list[int] = []

    def is_stopped_on_the_way() -> bool:
        """Before all of it has arrived: this thread may stand still, and they move on."""
        before = target.bytes_received()
        numbers.extend(
            source.write(peer=peer, src=[src] * n, dst=[dst] * n, nbytes=[MANY_BYTES] * n)
            for n in copies
        )
        wait_until(lambda: target.bytes_received() > before, "data flows")
        source.signal(signal.SIGSTOP)
        if target.bytes_received() < before + sum(copies) * MANY_BYTES:
            return True
        source.signal(signal.SIGCONT)
        return False

    wait_until(is_stopped_on_the_way, "it is stopped while data flows")
    if also_target:
        target.signal(signal.SIGSTOP)
    until_s = time.monotonic() + 1.5 * STALL_S
    wait_until(lambda: time.monotonic() > until_s, "it stood still for long")
    source.signal(signal.SIGCONT)
    if also_target:
        for _ in range(10):
            assert source.bytes_received() == 0  # So it runs.
        target.signal(signal.SIGCONT)
    assert {source.outcome(number=number)[0] for number in numbers} == {"done"}


@pytest.mark.slow
def test_a_frozen_destination_does_not_hold_up_others(far: Far) -> None:
    frozen, other = far(), far()
    buffers = {one: one.register(nbytes=MANY_BYTES) for one in (frozen, other)}
    with te.Engine(te.Config(**PATIENT)) as source:
        region = source.register(np.zeros(MANY_BYTES, np.uint8))
        peers = {one: source.connect(one.bytes_card()) for one in (frozen, other)}
        frozen.signal(signal.SIGSTOP)
        blocks = {
            one: te.Blocks.of(region.address, buffers[one], MANY_BYTES) for one in (frozen, other)
        }
        stuck = peers[frozen].write(blocks[frozen])
        assert peers[other].write(blocks[other]).wait(TIMEOUT_S) is te.Status.DONE
        assert stuck.poll() is te.Status.PENDING


@pytest.mark.slow
def test_writes_of_all_sizes_together_leave_none_with_nobody(far: Far) -> None:
    """A frame that the destination reads at once, behind one whose copy any worker may take up."""
    rng, target, nbytes = np.random.default_rng(7), far(), 1 << 20
    dst = target.register(nbytes=nbytes)
    with te.Engine(te.Config(**PATIENT)) as source:
        region = source.register(np.ones(nbytes, np.uint8))
        peer = source.connect(target.bytes_card())
        for _ in range(300):
            sizes = rng.permutation([256 << 10, 350_000, 150_000, 1_000])[: rng.integers(1, 5)]
            transfers = [peer.write(te.Blocks.of(region.address, dst, int(size))) for size in sizes]
            # Not `wait()`, in which the caller would do the workers' work.
            wait_until(lambda t=transfers: all(one.poll() is not PENDING for one in t), "settled")
            assert all(one.poll() is te.Status.DONE for one in transfers), sizes


@pytest.mark.slow
def test_cancel_in_the_middle(far: Far) -> None:
    target = far()
    dst = target.register(nbytes=MANY_BYTES)
    target.expect(tag=2)
    with te.Engine(te.Config(**PATIENT | {"segment_bytes": 1 << 20})) as source:
        region = source.register(np.ones(MANY_BYTES, np.uint8))
        peer = source.connect(target.bytes_card())
        over_rdma = peer.transport == "rdma"
        # So much over RDMA that it is not done before it is cancelled.
        blocks = te.Blocks.of(region.address, [dst] * (256 if over_rdma else 1), MANY_BYTES)
        if not over_rdma:  # There a frozen destination lets nothing begin.
            target.signal(signal.SIGSTOP)  # So that it cannot be done before it is cancelled.
        transfer = peer.write(blocks, tag=2)
        wait_until(lambda: source.stats().bytes_sent > 0, "data flows")
        target.signal(signal.SIGSTOP)
        transfer.cancel()
        assert transfer.poll() is te.Status.PENDING
        target.signal(signal.SIGCONT)
        assert transfer.wait(TIMEOUT_S) is te.Status.CANCELLED
        # Confirmed: what has landed until now is all that ever will.
        landed = target.bytes_received()
        assert landed == 0 if over_rdma else 0 < landed < MANY_BYTES  # RDMA counts whole transfers.
        assert target.arrived(tag=2) == 0
        assert peer.write(te.Blocks.of(region.address, dst, 1), tag=2).wait(TIMEOUT_S)
        assert target.bytes_received() == landed + 1
        assert source.stats().transfers_cancelled == 1


@pytest.mark.slow
def test_cancel_while_the_destination_is_frozen(far: Far) -> None:
    """Too late for what is on its way in sockets; over RDMA nothing begins before it says so."""
    target = far()
    dst = target.register(nbytes=100)
    with te.Engine(te.Config(**PATIENT)) as source:
        region = source.register(np.ones(100, np.uint8))
        peer = source.connect(target.bytes_card())
        over_rdma = peer.transport == "rdma"
        target.signal(signal.SIGSTOP)
        transfer = peer.write(te.Blocks.of(region.address, dst, 100))
        if not over_rdma:
            wait_until(lambda: source.stats().bytes_sent == 100, "sent")
        transfer.cancel()
        assert transfer.poll() is te.Status.PENDING
        target.signal(signal.SIGCONT)
        outcome = te.Status.CANCELLED if over_rdma else te.Status.DONE
        assert transfer.wait(TIMEOUT_S) is outcome
        assert (target.memory(dst) == (0 if over_rdma else 1)).all()


@pytest.mark.slow
def test_far_errors_are_seen_here(far: Far) -> None:
    """The helper itself: a failing operation must not look like a good one."""
    engine = far()
    with pytest.raises(FarError, match="RegistrationError: a region needs"):
        engine.register(nbytes=0)
