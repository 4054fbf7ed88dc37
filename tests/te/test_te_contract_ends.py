# SPDX-License-Identifier: Apache-2.0
"""The contract of a transport: whatever ends a transfer, it has one outcome, and nothing of it
lands behind that. Cancellations, fences, memory that goes, engines that close."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from te_contract import GUARD, TIMEOUT_S, Pair, Way, cancel, outcome, paired
from te_far import pattern, wait_until

import te

#: So much that it is under way for a while.
BIG = 16 << 20
DONE, FAILED, CANCELLED = te.Status.DONE, te.Status.FAILED, te.Status.CANCELLED


def submitted(pair: Pair, what: str, count: int, tag: int = 0) -> list[te.Transfer]:
    """Transfers of all the memory."""
    nbytes = len(pair.src)
    if what == "read":
        return [pair.peer.read(pair.blocks_back(0, 0, nbytes)) for _ in range(count)]
    return [pair.write(0, 0, nbytes, tag) for _ in range(count)]


# -- cancel


def test_cancelled_writes_land_nothing_more(way: Way) -> None:
    """At once, and when something has moved."""
    with paired(way, BIG) as pair:
        seen: set[te.Status] = set()
        for turn in range(10):
            since = pair.moved_nbytes()
            transfers = submitted(pair, "write", 6)
            if turn % 2:
                pair.await_progress(since, *transfers)
            for one in transfers[::-1] * 2:
                one.cancel()
            seen.update(outcome(one) for one in transfers)
            pair.dst[:] = turn
            pair.flush()
            assert (pair.dst[:-1] == turn).all()
        assert seen <= {DONE, CANCELLED}
        assert pair.peer.alive


def test_cancelled_reads_land_nothing_more(way: Way) -> None:
    """From when ``cancel`` returns."""
    with paired(way, BIG) as pair:
        pair.dst[:] = GUARD
        for turn in range(10):
            since = pair.moved_nbytes()
            transfers = submitted(pair, "read", 2)
            if turn % 2:
                pair.await_progress(since, *transfers)
            for one in transfers:
                cancel(one)
            pair.src[:] = turn
            assert {outcome(one) for one in transfers} <= {DONE, CANCELLED}
            again = pair.peer.read(pair.blocks_back(BIG - 1, BIG - 1, 1))
            assert again.wait(TIMEOUT_S) is DONE
            assert (pair.src[:-1] == turn).all()


def test_what_is_over_cannot_be_cancelled(pair: Pair) -> None:
    write, read = pair.write(0, 0, 100), pair.peer.read(pair.blocks_back(0, 0, 100))
    refused = pair.write(0, 0, 100, tag=3)
    for one, ends in ((write, DONE), (read, DONE), (refused, FAILED)):
        assert outcome(one) is ends
        reason = one.reason
        one.cancel()
        assert outcome(one) is ends
        assert one.reason == reason
    stats = pair.source.stats()
    assert (stats.transfers_done, stats.transfers_failed, stats.transfers_cancelled) == (2, 1, 0)


# -- fences


def test_nothing_lands_behind_a_fence(way: Way) -> None:
    """Of transfers that wait, that move and that are over. Each that arrived was counted."""
    with paired(way, BIG, segment_bytes=1 << 18) as pair:
        page = 1 << 14
        pages = np.arange(BIG // page) * page
        for turn in range(1, 13):
            pair.target.expect(turn)
            since = pair.moved_nbytes()
            if turn % 2:
                transfers = submitted(pair, "write", 3, tag=turn)
            else:
                transfers = [pair.write(pages, pages, page - 8, tag=turn) for _ in range(3)]
            if turn % 3 == 1:
                pair.await_progress(since, *transfers)
            elif turn % 3 == 2:
                wait_until(lambda: pair.target.arrived(turn), "one has arrived")  # noqa: B023
            count = pair.target.fence(turn, TIMEOUT_S)
            pair.dst[:] = turn
            ends = [outcome(one) for one in transfers]
            assert (pair.dst == turn).all()
            assert ends.count(DONE) == count
            assert set(ends) <= {DONE, FAILED}
            assert all("fenced" in str(one.reason) for one in transfers if one.reason)
            late = pair.write(0, 0, 100, tag=turn)
            assert outcome(late) is FAILED
            assert "is not open here" in str(late.reason)
        assert (pair.dst == turn).all()
        wait_until(lambda: pair.peer.rails, "there is a rail")
        assert pair.write(0, 0, 100).wait(TIMEOUT_S) is DONE


def test_a_fence_leaves_other_tags_alone(way: Way) -> None:
    with paired(way, BIG) as pair:
        for turn in range(1, 5):
            pair.target.expect(turn)
            pair.target.expect(turn + 100)
            fenced = submitted(pair, "write", 2, tag=turn)
            kept = [pair.write(i, i, 1, tag=turn + 100) for i in range(50)]
            pair.target.fence(turn, TIMEOUT_S)
            assert {outcome(one) for one in kept} == {DONE}
            assert {outcome(one) for one in fenced} <= {DONE, FAILED}
            assert pair.target.fence(turn + 100, TIMEOUT_S) == 50


# -- memory that goes


def test_nothing_lands_in_memory_that_was_taken_back(way: Way) -> None:
    with paired(way, BIG) as pair:
        for turn in range(4):
            since = pair.moved_nbytes()
            transfers = submitted(pair, "write", 2)
            if turn % 2:
                pair.await_progress(since, *transfers)
            pair.target.deregister(pair.dst_region, TIMEOUT_S)
            pair.dst[:] = turn
            assert {outcome(one) for one in transfers} <= {DONE, FAILED}
            reasons = [one.reason for one in transfers if one.reason]
            assert all("registered" in reason for reason in reasons), reasons
            assert (pair.dst == turn).all()
            pair.dst_region = pair.register(pair.target, pair.dst, "read-write")
            wait_until(lambda: pair.peer.rails, "there is a rail")
            pair.flush()


@pytest.mark.parametrize("what", ["write", "read"])
def test_memory_of_transfers_under_way_stays_or_they_end(way: Way, what: str) -> None:
    """A source's, and the two of a read: taking it back is refused, or ends what uses it."""
    with paired(way, BIG) as pair:
        for turn in range(4):
            since = pair.moved_nbytes()
            transfers = submitted(pair, what, 2)
            if turn % 2:
                pair.await_progress(since, *transfers)
            engine, region, memory = (
                (pair.target, pair.dst_region, pair.dst)
                if what == "read" and turn > 1
                else (pair.source, pair.src_region, pair.src)
            )
            try:
                engine.deregister(region, timeout_s=0.0)
            except te.RegistrationError as exc:
                assert "unfinished transfers read from" in str(exc)  # noqa: PT017
                assert {outcome(one) for one in transfers} == {DONE}
                engine.deregister(region, TIMEOUT_S)
            except te.FenceTimeout:  # One piece is landing: it ends.
                engine.deregister(region, TIMEOUT_S)
            memory[:] = turn
            assert {outcome(one) for one in transfers} <= {DONE, FAILED}
            assert (memory == turn).all()
            pair.src_region, pair.dst_region = (
                pair.register(engine, memory, "read-write") if one is region else one
                for one in (pair.src_region, pair.dst_region)
            )
            wait_until(lambda: pair.peer.rails, "there is a rail")
            pair.flush()


# -- engines that close


@pytest.mark.parametrize("what", ["write", "read"])
@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_every_transfer_ends_when_an_engine_closes(
    way: Way, what: str, who: str, has_begun: bool
) -> None:
    """With a reason, or done; and nothing lands in an engine that is closed."""
    with paired(way, BIG) as pair:
        since = pair.moved_nbytes()
        transfers = submitted(pair, what, 6)
        if has_begun:
            pair.await_progress(since, *transfers)
        (pair.source if who == "source" else pair.target).close()
        lands = pair.src if what == "read" else pair.dst
        is_closed = (who == "source") == (what == "read")
        if is_closed:
            lands[:] = 7
        assert {outcome(one) for one in transfers} <= {DONE, FAILED}
        reasons = {one.reason for one in transfers if one.reason}
        assert len(reasons) <= 1, reasons
        for reason in reasons:
            assert ("this engine was closed" if who == "source" else "connection") in reason
        assert not is_closed or (lands == 7).all()
        wait_until(lambda: not pair.peer.alive, "dead")
        with pytest.raises(te.TransferFailed):
            pair.write(0, 0, 1).wait(TIMEOUT_S)


def test_a_peer_that_is_closed_fails_what_is_unfinished(way: Way) -> None:
    with paired(way, BIG) as pair:
        transfers = submitted(pair, "write", 4) + submitted(pair, "read", 4)
        pair.peer.close()
        pair.peer.close()
        assert {outcome(one) for one in transfers} <= {DONE, FAILED}
        says = "the application closed this peer"
        assert {one.reason for one in transfers} <= {None, says}
        wait_until(lambda: not pair.peer.alive, "dead")
        with pytest.raises(te.TransferFailed, match=says):
            pair.write(0, 0, 1).wait(TIMEOUT_S)
        again = pair.source.connect(pair.target.card())
        assert again is not pair.peer
        pair.peer = again
        pair.flush()


def test_one_peer_per_engine_until_it_dies(pair: Pair) -> None:
    assert pair.source.connect(pair.target.card()) is pair.peer
    assert pair.source.stats().peers == 1
    pair.peer.close()
    wait_until(lambda: not pair.peer.alive, "dead")
    assert pair.source.connect(pair.target.card()) is not pair.peer


def test_a_peer_connects_again_after_a_restart(way: Way) -> None:
    """Of either: what the former life had open is not open to the next."""
    with paired(way) as pair:
        for turn in range(3):
            pair.target.close()
            wait_until(lambda: not pair.peer.alive, "dead")
            pair.target = pair.make()
            pair.dst_region = pair.register(pair.target, pair.dst, "read-write")
            pair.peer = pair.source.connect(pair.target.card())
            assert pair.source.stats().peers == 1
            pair.target.expect(9, peer=te.Identity(pair.source.id, pair.source.epoch))
            before = pair.dst.copy()
            pair.src[:] = turn
            assert pair.write(0, 0, 1000, tag=9).wait(TIMEOUT_S) is DONE
            after = before.copy()
            after[:1000] = turn
            pair.assert_moved(pair.dst, before, after)

            pair.source.close()
            wait_until(lambda: pair.target.stats().rails == 0, "its rails are gone")
            pair.source = pair.make()
            pair.src_region = pair.register(pair.source, pair.src)
            pair.peer = pair.source.connect(pair.target.card())
            with pytest.raises(te.TransferFailed, match="tag 0x9 is not open here"):
                pair.write(0, 0, 1000, tag=9).wait(TIMEOUT_S)
            assert pair.target.fence(9, TIMEOUT_S) == 1
            pair.flush()


def test_engines_that_come_and_go_disturb_no_other(way: Way) -> None:
    """Sources that are closed while they write, beside one that goes on."""
    with paired(way, 1 << 20) as pair:
        far = np.zeros(4 << 20, np.uint8)
        region = pair.target.register(far, remote="read-write")
        card, stop = pair.target.card(), threading.Event()
        ends: list[te.Status] = []

        def come_and_go() -> None:
            near = pattern(3, len(far))
            while not stop.is_set():
                with pair.make() as source:
                    mine = source.register(near)
                    peer = source.connect(card)
                    blocks = te.Blocks.of(mine.address, region.address, len(far))
                    transfers = [peer.write(blocks) for _ in range(3)]
                ends.extend(outcome(one) for one in transfers)

        thread = threading.Thread(target=come_and_go)
        thread.start()
        try:
            for turn in range(300):
                assert pair.write(turn, turn, 50_000).wait(TIMEOUT_S) is DONE
            wait_until(lambda: len(ends) > 15, "some have come and gone")
        finally:
            stop.set()
            thread.join(TIMEOUT_S)
        assert set(ends) <= {DONE, FAILED}
        assert pair.peer.alive
