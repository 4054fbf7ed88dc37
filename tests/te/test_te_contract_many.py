# SPDX-License-Identifier: Apache-2.0
"""The contract of a transport: many transfers at once, each with one outcome. Order, bounds,
threads, both directions, counters."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import Counter

import numpy as np
from te_contract import EMPTY, TIMEOUT_S, Pair, Way, cancel, copied, outcome, paired
from te_far import pattern, wait_until

import te

DONE, FAILED, CANCELLED = te.Status.DONE, te.Status.FAILED, te.Status.CANCELLED


# -- order, and the bound


def test_a_full_queue_is_refused_and_takes_more_later(way: Way) -> None:
    with paired(way, max_queued_transfers=8) as pair:
        pair.target.expect(1)
        transfers: list[te.Transfer] = []
        for _ in range(3):
            full = False
            while not full:  # It fills up as submitting is quicker than moving.
                assert len(transfers) < 10_000
                try:
                    transfers.append(pair.write(0, 0, len(pair.src), tag=1))
                except te.QueueFull as exc:
                    assert "8 unfinished transfers" in str(exc)  # noqa: PT017
                    full = True
            for one in transfers:
                assert one.wait(TIMEOUT_S) is DONE
        assert pair.target.fence(1, TIMEOUT_S) == len(transfers)
        assert pair.source.stats().transfers_done == len(transfers)
        assert pair.source.stats().transfers_failed == 0


def test_many_transfers_are_each_done_and_counted_once(way: Way) -> None:
    ends: list[int] = []
    with paired(way, 1 << 20) as pair:
        pair.target.expect(2)
        transfers = []
        for i in range(300):
            nbytes = 1 + (i * 7919) % 30_000
            transfers.append(pair.write(i, 0, nbytes, tag=2))
            transfers[-1].add_done_callback(lambda _, i=i: ends.append(i))  # type: ignore[misc]
        for one in transfers:
            assert one.wait(TIMEOUT_S) is DONE
        wait_until(lambda: len(ends) == 300, "all callbacks have run")
        assert sorted(ends) == list(range(300))
        assert pair.target.arrived(2) == 300


# -- one outcome


def test_every_outcome_is_told_once(pair: Pair) -> None:
    """By a callback, to a thread that waits, to one that asks again."""
    told: Counter[te.Transfer] = Counter()
    lock = threading.Lock()

    def tell(transfer: te.Transfer) -> None:
        with lock:
            told[transfer] += 1

    transfers = [pair.write(i, i, 20_000) for i in range(60)]
    transfers += [pair.peer.read(pair.blocks_back(i, i, 20_000)) for i in range(20)]
    transfers += [pair.write(0, 0, 10, tag=77) for _ in range(20)]
    for one in transfers:
        one.add_done_callback(tell)
    for one in transfers[::3]:
        cancel(one)
    for one in transfers:
        assert outcome(one) is one.poll()
        one.add_done_callback(tell)  # There is an outcome: at once.
    wait_until(lambda: told.total() >= 2 * len(transfers), "all callbacks have run")
    assert set(told.values()) == {2}
    ends = Counter(outcome(one) for one in transfers)
    assert ends.total() == len(transfers) == len(told)
    stats = pair.source.stats()
    assert (stats.transfers_done, stats.transfers_failed, stats.transfers_cancelled) == (
        ends[DONE], ends[FAILED], ends[CANCELLED],
    )  # fmt: skip
    assert all("tag 0x4d is not open" in str(one.reason) for one in transfers if one.reason)


def test_callbacks_may_write(pair: Pair) -> None:
    first, second = pair.blocks(0, 0, 10), pair.blocks(10, 10, 10)
    followed: concurrent.futures.Future[te.Transfer] = concurrent.futures.Future()

    def follow(_: te.Transfer) -> None:
        followed.set_result(pair.peer.write(second))

    before = pair.dst.copy()
    transfer = pair.peer.write(first)
    transfer.add_done_callback(follow)
    assert transfer.wait(TIMEOUT_S) is DONE
    assert followed.result(TIMEOUT_S).wait(TIMEOUT_S) is DONE
    pair.assert_moved(pair.dst[:20], before[:20], pair.src[:20])


def test_a_callback_may_close_the_engine(pair: Pair) -> None:
    transfer = pair.write(0, 0, 10)
    closed = threading.Event()

    def close(_: te.Transfer) -> None:
        pair.source.close()
        closed.set()

    transfer.add_done_callback(close)
    transfer.wait(TIMEOUT_S)
    assert closed.wait(TIMEOUT_S)
    try:
        pair.source.connect(pair.target.card()).write(EMPTY).wait(TIMEOUT_S)
    except (te.ClosedError, te.TransferFailed) as exc:
        assert "closed" in str(exc)  # noqa: PT017
    else:
        raise AssertionError("a closed engine writes")


# -- at once


def test_several_threads_submit_at_once(way: Way) -> None:
    with paired(way, 4 << 20) as pair:
        pair.target.expect(6)
        per_thread, nbytes, threads = 100, 1000, 8

        def submit(thread: int) -> None:
            transfers = []
            for i in range(per_thread):
                offset = (thread * per_thread + i) * nbytes
                transfers.append(pair.write(offset, offset, nbytes, tag=6))
                if i % 3 == 0:
                    assert transfers[-1].wait(TIMEOUT_S) is DONE
            for transfer in transfers:
                assert transfer.wait(TIMEOUT_S) is DONE

        before = pair.dst.copy()
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for one in [pool.submit(submit, i) for i in range(threads)]:
                one.result(2 * TIMEOUT_S)
        total = threads * per_thread * nbytes
        after = before.copy()
        after[:total] = pair.src[:total]
        pair.assert_moved(pair.dst, before, after)
        assert pair.target.arrived(6) == threads * per_thread
        assert pair.source.stats().transfers_done == threads * per_thread
        assert pair.source.stats().bytes_sent == pair.target.stats().bytes_received == total


def test_threads_that_write_read_and_cancel_at_once(way: Way) -> None:
    """Each in memory of its own."""
    room = 1 << 19
    with paired(way, 8 * room) as pair:
        pair.dst[:] = pattern(8, len(pair.dst))
        source, target = pair.src.copy(), pair.dst.copy()

        def work(thread: int) -> None:
            rng = np.random.default_rng(thread)
            at = thread * room
            for _ in range(40):
                nbytes = int(rng.integers(1, room))
                if thread % 2:
                    transfer = pair.peer.read(pair.blocks_back(at, at, nbytes))
                else:
                    transfer = pair.write(at, at, nbytes)
                if rng.random() < 0.3:
                    cancel(transfer)
                assert outcome(transfer) in (DONE, CANCELLED)
            last = (
                pair.peer.read(pair.blocks_back(at, at, room))
                if thread % 2
                else pair.write(at, at, room)
            )
            assert outcome(last) is DONE

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for one in [pool.submit(work, i) for i in range(8)]:
                one.result(2 * TIMEOUT_S)
        for thread in range(8):
            part = slice(thread * room, (thread + 1) * room)
            if thread % 2:
                pair.assert_moved(pair.src[part], source[part], target[part])
            else:
                pair.assert_moved(pair.dst[part], target[part], source[part])


def test_both_directions_at_once(way: Way) -> None:
    with paired(way, 2 << 20) as pair:
        near, far = np.zeros(2 << 20, np.uint8), pattern(9, 2 << 20)
        near_region = pair.source.register(near, remote="read-write")
        far_region = pair.target.register(far, remote="none")
        back = pair.target.connect(pair.source.card())
        pair.target.expect(1)
        pair.source.expect(1)
        rng = np.random.default_rng(6)
        before, dst, landed = pair.dst.copy(), pair.dst.copy(), near.copy()
        transfers = []
        for _ in range(60):
            at, nbytes = rng.integers(0, 1 << 20, 50), rng.integers(1, 9000, 50)
            at = at // 9000 * 9000 % (1 << 20)
            at, first = np.unique(at, return_index=True)
            nbytes = nbytes[first]
            transfers.append(pair.write(at, at, nbytes, tag=1))
            blocks = te.Blocks.of(far_region.address + at, near_region.address + at, nbytes)
            transfers.append(back.write(blocks, tag=1))
            dst, landed = copied(pair.src, dst, at, at, nbytes), copied(far, landed, at, at, nbytes)
        for one in transfers:
            assert one.wait(TIMEOUT_S) is DONE
        assert pair.target.fence(1, TIMEOUT_S) == pair.source.fence(1, TIMEOUT_S) == 60
        pair.assert_moved(pair.dst, before, dst)
        pair.assert_moved(near, np.zeros_like(near), landed)


# -- counters


def test_counters_add_up(pair: Pair) -> None:
    pair.target.expect(1)
    sizes = [1, 100, 70_000, 3 << 20, 0, 2048, 4096]
    for nbytes in sizes:
        blocks = pair.blocks(0, 0, nbytes) if nbytes else EMPTY
        assert pair.peer.write(blocks, tag=1).wait(TIMEOUT_S) is DONE
    source, target = pair.source.stats(), pair.target.stats()
    assert source.bytes_sent == target.bytes_received == sum(sizes)
    assert source.bytes_received == target.bytes_sent == 0
    assert (source.transfers_done, target.transfers_done) == (len(sizes), 0)
    for nbytes in sizes:
        blocks = pair.blocks_back(0, 0, nbytes) if nbytes else EMPTY
        assert pair.peer.read(blocks).wait(TIMEOUT_S) is DONE
    for _ in range(3):
        assert outcome(pair.write(0, 0, 100, tag=2)) is FAILED
    source = pair.source.stats()
    assert source.bytes_received == sum(sizes)
    if not pair.way.reads_one_sided:
        # It counts after the call that has sent them, and then they may have landed.
        wait_until(lambda: pair.target.stats().bytes_sent >= sum(sizes), "the target has counted")
        assert pair.target.stats().bytes_sent == sum(sizes)
    target = pair.target.stats()
    assert (source.transfers_done, source.transfers_failed) == (2 * len(sizes), 3)
    assert (target.transfers_done, target.transfers_failed) == (0, 0)
    assert source.transfers_cancelled == target.transfers_cancelled == 0
    assert source.peer_transports == {pair.target.id: (pair.way.transport, "")}
