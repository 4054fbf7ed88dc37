# SPDX-License-Identifier: Apache-2.0
"""Transfers of Mooncake's engine class that go on after the call that submitted them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_far import near
from hypothesis import given
from hypothesis import strategies as st
from te_far import pattern, wait_until

import te
from sglang_mooncake.faces.mooncake_engine import batches as batches_module
from sglang_mooncake.faces.mooncake_engine import transferring
from sglang_mooncake.faces.mooncake_engine.batches import Batch, Batches, settle
from sglang_mooncake.faces.mooncake_engine.engine import TransferEngine
from sglang_mooncake.faces.mooncake_engine.names import TransferNotify, TransferOpcode
from sglang_mooncake.faces.mooncake_engine.notes import MAGIC, packed, unpacked

NBYTES = 4096
GOING_ON, DONE, FAILED, TOOK_TOO_LONG = 0, 1, -1, -2


@dataclass
class Pair:
    """Two engines of this process, one range of memory each, of the same size."""

    source: TransferEngine
    target: TransferEngine
    here: np.ndarray = field(default_factory=lambda: pattern(1, NBYTES))
    there: np.ndarray = field(default_factory=lambda: np.zeros(NBYTES, np.uint8))

    def __post_init__(self) -> None:
        for engine, memory in ((self.source, self.here), (self.target, self.there)):
            assert engine.register_memory(memory.ctypes.data, NBYTES) == 0
        self.session = f"127.0.0.1:{self.target.get_rpc_port()}"

    def some(self, *lengths: int) -> tuple[str, list[int], list[int], list[int]]:
        """The arguments of a call that copies blocks from every 1000th byte on."""
        places = [1000 * i for i in range(len(lengths))]
        here = [self.here.ctypes.data + place for place in places]
        there = [self.there.ctypes.data + place for place in places]
        return self.session, here, there, list(lengths)

    def ended(self, number: int) -> int:
        """What ``transfer_check_status`` says when it goes on no more."""
        said = [GOING_ON]

        def ends() -> bool:
            said[0] = self.source.transfer_check_status(number)
            return said[0] != GOING_ON

        wait_until(ends, "the transfer has ended")
        return said[0]


@pytest.fixture
def pair() -> Pair:
    return Pair(near("tcp"), near("tcp"))


def test_a_batch_goes_on_behind_the_call_and_is_asked_after(pair) -> None:
    engine = pair.source
    number = engine.batch_transfer_async_write(*pair.some(1000, 0, 500))
    assert number > 0
    assert pair.ended(number) == DONE
    assert (pair.there[:1000] == pair.here[:1000]).all()
    assert not pair.there[1000:2000].any()
    assert (pair.there[2000:2500] == pair.here[2000:2500]).all()

    pair.there[:] = pattern(2, NBYTES)
    number = engine.batch_transfer_async_read(*pair.some(1000, 0, 500))
    assert pair.ended(number) == DONE
    assert (pair.here[:1000] == pair.there[:1000]).all()
    assert (pair.here[1000:2000] == pattern(1, NBYTES)[1000:2000]).all()
    assert (pair.here[2000:2500] == pair.there[2000:2500]).all()


def test_many_batches_are_waited_for_at_once(pair) -> None:
    engine = pair.source
    session, here, there, _ = pair.some(10, 20, 30)
    numbers = [
        engine.transfer_submit_write(session, here[0], there[0], 10),
        engine.batch_transfer_async(session, here[1:], there[1:], [20, 30], TransferOpcode.Write),
        engine.batch_transfer_async_write(session, [], [], []),
    ]
    assert len(set(numbers) - {0}) == 3
    assert engine.get_batch_transfer_status(numbers) == 0
    for place, nbytes in ((0, 10), (1000, 20), (2000, 30)):
        assert (pair.there[place : place + nbytes] == pair.here[place : place + nbytes]).all()
    assert engine.get_batch_transfer_status([]) == 0
    assert len(engine._impl.batches) == 0


def test_an_end_is_told_once(pair, caplog) -> None:
    engine = pair.source
    number = engine.batch_transfer_async_write(*pair.some(10))
    assert pair.ended(number) == DONE
    assert engine.transfer_check_status(number) == FAILED
    assert f"no transfer {number} is under way" in caplog.text
    other = engine.batch_transfer_async_write(*pair.some(10))
    assert engine.get_batch_transfer_status([number, other]) == -1
    assert engine.transfer_check_status(other) == FAILED, "it was waited for"


def test_what_cannot_be_submitted_has_the_number_0(pair, caplog) -> None:
    engine = pair.source
    for session, here, says in [
        ("127.0.0.1:1", pair.here.ctypes.data, "no answer within"),
        ("unreachable", 0, "is not a host and a port"),
        (pair.session, 0, "lie outside the registered memory"),
    ]:
        caplog.clear()
        assert engine.transfer_submit_write(session, here, pair.there.ctypes.data, 16) == 0
        assert says in caplog.text
    assert engine.batch_transfer_async_read(*pair.some(1, 1)[:3], [1]) == 0
    assert engine.batch_transfer_async(*pair.some(1), 7) == 0
    assert len(engine._impl.batches) == 0


def test_one_that_fails_says_why(pair, caplog) -> None:
    engine, outside = pair.source, pair.there.ctypes.data + NBYTES
    number = engine.transfer_submit_write(pair.session, pair.here.ctypes.data, outside, 10)
    assert number > 0
    assert pair.ended(number) == FAILED
    assert "the destination: 10 bytes" in caplog.text
    good = engine.batch_transfer_async_write(*pair.some(100))
    bad = engine.transfer_submit_write(pair.session, pair.here.ctypes.data, outside, 10)
    assert engine.get_batch_transfer_status([bad, good]) == -1
    assert (pair.there[:100] == pair.here[:100]).all(), "the other one was waited for"


@pytest.mark.parametrize("is_write", [True, False])
def test_the_direction_is_an_argument_too(pair, is_write) -> None:
    opcode = TransferOpcode.Write if is_write else TransferOpcode.Read
    wanted = (pair.here if is_write else pair.there).copy()
    session, here, there, lengths = pair.some(NBYTES)
    assert pair.source.transfer_sync(session, here[0], there[0], lengths[0], opcode) == 0
    assert (pair.here == wanted).all()
    assert (pair.there == wanted).all()
    assert pair.source.batch_transfer_sync(*pair.some(10, 10), opcode) == 0


def messages(engine: TransferEngine, count: int) -> list[TransferNotify]:
    found: list[TransferNotify] = []

    def came() -> bool:
        found.extend(engine.get_notifies())
        return len(found) >= count

    wait_until(came, f"{count} messages")
    return found


@pytest.mark.parametrize("opcode", TransferOpcode)
def test_a_message_comes_behind_the_bytes(pair, opcode) -> None:
    sent = [TransferNotify("done", str(i)) for i in range(3)]
    for one in sent:
        assert pair.source.batch_transfer_sync(*pair.some(NBYTES), opcode, one) == 0
    assert pair.source.batch_transfer_sync(*pair.some(), opcode, TransferNotify()) == 0
    assert messages(pair.target, 4) == [*sent, TransferNotify("", "")]
    assert pair.target.get_notifies() == pair.source.get_notifies() == []
    assert (pair.here == pair.there).all()


def test_a_message_that_is_too_long_is_refused_before_anything_is_copied(pair, caplog) -> None:
    message = TransferNotify("done", "x" * (1 << 20))
    result = pair.source.batch_transfer_sync(*pair.some(10), TransferOpcode.Write, message)
    assert result == -1
    assert "a message of 4 and 1048576 bytes" in caplog.text
    assert not pair.there.any()


def test_a_transfer_whose_message_was_not_sent_has_failed(pair, caplog, monkeypatch) -> None:
    def full(peer: te.Peer, data: bytes) -> None:
        raise te.QueueFull("too many notes wait")

    monkeypatch.setattr(te.Peer, "send_note", full)
    sent = (*pair.some(10), TransferOpcode.Write, TransferNotify("done", "1"))
    assert pair.source.batch_transfer_sync(*sent) == -1
    assert "the bytes are there, but its message was not sent: too many notes" in caplog.text
    assert (pair.there[:10] == pair.here[:10]).all()


def test_who_has_the_address_of_a_peer_that_ended_gets_no_message(
    pair, caplog, monkeypatch
) -> None:
    """The bytes went to the one that ended."""
    other = near("tcp")
    former, sessions = transferring.settle, pair.source._impl.sessions

    def settle(*arguments: Any) -> None:
        former(*arguments)
        sessions.peer(pair.session).close()
        sessions._known[pair.session].peer = pair.source._impl.engine.connect(
            other._impl.engine.card()
        )

    monkeypatch.setattr(transferring, "settle", settle)
    sent = (*pair.some(10), TransferOpcode.Write, TransferNotify("done", "1"))
    assert pair.source.batch_transfer_sync(*sent) == -1
    assert "the bytes are there, but its message was not sent: " in caplog.text
    assert sessions.peer(pair.session).alive
    sessions.peer(pair.session).send_note(packed(TransferNotify("later", "2")))
    assert messages(other, 1) == [TransferNotify("later", "2")]


def test_notes_that_are_no_messages_are_told_and_left_out(pair, caplog) -> None:
    session, *_ = pair.some(10)
    peer = pair.source._impl.sessions.peer(session)
    for note in (b"?", packed(TransferNotify("n", "m"))[:-2], MAGIC + b"\0\0\0\1\xff"):
        peer.send_note(note)
    peer.send_note(packed(TransferNotify("n", "m")))
    assert messages(pair.target, 1) == [TransferNotify("n", "m")]
    assert caplog.text.count("mooncake.engine over te: ") == 1, "a peer can send thousands of them"


@given(st.text(), st.text())
def test_messages_are_as_they_were_sent(name: str, text: str) -> None:
    try:
        data = packed(TransferNotify(name, text))
    except UnicodeEncodeError:
        return
    assert unpacked(data) == TransferNotify(name, text)


class Told:
    """A transfer that stands as its test says."""

    def __init__(self, status: te.Status = te.Status.PENDING, duration_s: float = 0.0) -> None:
        self.status, self.duration_s, self.reason = status, duration_s, None
        self.nbytes = 64
        #: What a call of ``cancel`` makes of it; an error is raised.
        self.cancelling: list[te.Status | Exception] = []
        self.waited_s: list[float] = []

    def poll(self) -> te.Status:
        return self.status

    def wait(self, timeout_s: float) -> te.Status:
        self.waited_s.append(timeout_s)
        if self.status is te.Status.PENDING:
            raise te.WaitTimeout("slow")
        if self.status is te.Status.FAILED:
            raise te.TransferFailed(self.reason)
        return self.status

    def cancel(self) -> None:
        then = self.cancelling.pop(0)
        if isinstance(then, Exception):
            raise then
        self.status = then


class Closing:
    """A peer, and what its end makes of a transfer; None: that goes on."""

    def __init__(self, transfer: Told | None = None, then: te.Status | None = None) -> None:
        self.transfer, self.then, self.closed = transfer, then, 0

    def close(self) -> None:
        self.closed += 1
        if self.transfer is not None and self.then is not None:
            self.transfer.status, self.transfer.reason = self.then, "the link was closed"


def submitted(
    batches: Batches, transfer: Told, is_read: bool = False, peer: Closing | None = None
) -> int:
    whom: Any = peer or Closing()
    return batches.submit(lambda: Batch(transfer, is_read, 30.0, whom))


def test_one_that_takes_too_long_is_cancelled_by_who_asks() -> None:
    batches, transfer = Batches(), Told()
    number = submitted(batches, transfer)
    transfer.duration_s = 30.0
    assert batches.check(number) is te.Status.PENDING
    transfer.duration_s = 30.1
    transfer.cancelling = [te.Status.PENDING]
    assert batches.check(number) is te.Status.PENDING, "the peer has not confirmed it"
    assert not transfer.cancelling, "it was cancelled"
    transfer.status = te.Status.CANCELLED
    assert batches.check(number) is te.Status.CANCELLED
    with pytest.raises(ValueError, match="no transfer"):
        batches.check(number)


def test_a_failed_read_has_not_ended_while_pieces_may_land(caplog) -> None:
    batches, transfer = Batches(), Told(te.Status.FAILED)
    transfer.reason = "the peer is gone"
    transfer.cancelling = [te.FenceTimeout("a landing did not end"), te.Status.FAILED]
    number = submitted(batches, transfer, is_read=True)
    assert batches.check(number) is te.Status.PENDING
    assert "a landing did not end" in caplog.text
    with pytest.raises(te.TransferFailed, match="the peer is gone"):
        batches.check(number)
    assert len(batches) == 0


def test_each_is_waited_for_as_long_as_is_left_to_it() -> None:
    batches = Batches()
    transfers = [Told(te.Status.FAILED, 1.0), Told(te.Status.DONE, 29.0), Told(duration_s=99.0)]
    transfers[0].reason = "no"
    transfers[0].cancelling = [te.Status.FAILED]
    transfers[2].cancelling = [te.Status.CANCELLED]
    numbers = [submitted(batches, one) for one in transfers]
    with pytest.raises(te.TransferFailed, match="no"):
        batches.wait([*numbers, numbers[0]])
    assert [one.waited_s[0] for one in transfers] == [29.0, 1.0, 0.0]
    assert transfers[2].status is te.Status.CANCELLED
    assert len(batches) == 0


def test_a_write_that_is_not_confirmed_to_be_cancelled_ends_with_its_connection() -> None:
    transfer = Told()
    peer: Any = Closing(transfer, te.Status.FAILED)
    transfer.cancelling = [te.Status.PENDING, te.Status.FAILED]
    with pytest.raises(te.WaitTimeout, match="slow"):
        settle([Batch(transfer, False, 30.0, peer)], clock=lambda: 0.0)
    assert peer.closed == 1
    assert transfer.waited_s == [30.0, *[batches_module.CANCEL_TIMEOUT_S] * 2]


@pytest.mark.parametrize(
    ("status", "then", "raises"),
    [
        (te.Status.PENDING, te.Status.CANCELLED, pytest.raises(te.WaitTimeout, match="slow")),
        (te.Status.PENDING, te.Status.DONE, nullcontext()),
        (te.Status.FAILED, te.Status.FAILED, pytest.raises(te.TransferFailed, match="is gone")),
    ],
)
def test_a_call_goes_on_while_something_of_a_read_may_land(status, then, raises, caplog) -> None:
    """It says every ten seconds what it waits for; each cancellation takes one."""
    transfer = Told(status)
    transfer.reason = "the peer is gone"
    transfer.cancelling = [te.FenceTimeout("a landing did not end")] * 50 + [then]
    peer: Any = Closing()
    with raises:
        settle([Batch(transfer, True, 30.0, peer)], lambda: 51.0 - len(transfer.cancelling))
    assert not transfer.cancelling
    assert peer.closed == 50
    assert caplog.text.count("waiting until te has done with 64 bytes of memory of 1 transf") == 5


def test_all_are_cancelled_though_the_first_does_not_stop() -> None:
    """Others would go on, and time-outs would add up."""
    batches, left = Batches(), list[list[int]]()
    transfers = [Told(), Told(), Told()]
    for one in transfers:
        one.cancelling = [te.Status.CANCELLED]
    transfers[0].cancelling.insert(0, te.FenceTimeout("a landing did not end"))
    peer: Any = SimpleNamespace(close=lambda: left.append([len(it.cancelling) for it in transfers]))
    numbers = [submitted(batches, one, one is not transfers[2], peer) for one in transfers]
    with pytest.raises(te.WaitTimeout):
        batches.wait(numbers)
    assert left == [[1, 0, 0]]
    assert [one.status for one in transfers] == [te.Status.CANCELLED] * 3
    assert len(batches) == 0


def test_a_call_returns_only_once_te_has_done_with_the_memory(pair, monkeypatch) -> None:
    wait, may_end, tried = te.Transfer.wait, threading.Event(), threading.Semaphore(0)

    def late(transfer: te.Transfer, timeout_s: float) -> te.Status:
        tried.release()
        if not may_end.is_set():
            raise te.WaitTimeout("slow")
        return wait(transfer, timeout_s)

    session, here, there, lengths = pair.some(10)
    peer = pair.source._impl.sessions.peer(pair.session)
    write = pair.source.transfer_sync_write
    with ThreadPoolExecutor(1) as threads, monkeypatch.context() as patch:
        patch.setattr(te.Transfer, "wait", late)
        under_way = threads.submit(write, session, here[0], there[0], lengths[0])
        try:
            for _ in range(3):
                assert tried.acquire(timeout=60.0)
            assert not under_way.done()
        finally:
            may_end.set()
        assert under_way.result(60.0) in (0, -1), "it may have been done before it was cancelled"
    assert not peer.alive
    assert write(session, here[0], there[0], lengths[0]) == 0


def test_who_never_asks_gets_no_more_at_some_time() -> None:
    batches = Batches(most=2)
    numbers = [submitted(batches, Told(te.Status.DONE)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="2 transfers were submitted and not asked after"):
        submitted(batches, Told())
    assert batches.check(numbers[0]) is te.Status.DONE
    assert submitted(batches, Told()) not in numbers


def test_what_was_not_submitted_takes_no_place() -> None:
    batches = Batches(most=1)

    def fails() -> Batch:
        raise te.ConnectError("gone")

    for _ in range(3):
        with pytest.raises(te.ConnectError):
            batches.submit(fails)
    assert len(batches) == 0
