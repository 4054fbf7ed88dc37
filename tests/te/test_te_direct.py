# SPDX-License-Identifier: Apache-2.0
"""Links over RDMA on devices that move nothing: keys, fences and what the plane tells, in cases
that real devices do not give at will."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from te_direct import (
    DeviceEngine,
    NullEngine,
    RawDirectListener,
    RawDirectSource,
    ask,
    raw_direct_destination,
    table,
    word,
)
from te_far import wait_until
from te_frames import AckStatus, Kind, abandon, ack

import te
from te.connect.pool import Pool
from te.core.engine import Engine as Plane
from te.transports.rdma import link as link_module
from te.transports.rdma import transport as transport_module
from te.transports.rdma._core import RdmaLink, nic_failed
from te.transports.rdma.direct import accept_rail, build_rail
from te.transports.rdma.link import RailedLink
from te.transports.rdma.messages import RailAnswer
from te.transports.rdma.rails import RailState
from te.transports.rdma.reasons import RailReason
from te.transports.tcp._core import TcpLink
from te_bench._null import Device, QueuePair, Wires

TIMEOUT_S = 60.0
PAGE = 4096
#: So long a fence leaves the rails to a source that is to stop (te/core/engine.pyx, SUSPECT_NS).
STOPS_S = 0.25


def railed(peer: te.Peer) -> RailedLink:
    link = peer._opened.link
    assert isinstance(link, RailedLink)
    return link


def test_keys_of_a_region_are_not_used_after_it() -> None:
    """The second part's keys lay in the middle of a block that is free by now, and still say what
    they said. (Under AddressSanitizer it is the read that fails.)"""
    wires = Wires(checks_keys=True)
    with (
        NullEngine(wires, nics=1, region_bytes_max=PAGE) as source,
        NullEngine(wires, nics=1) as target,
    ):
        near, far = np.zeros(2 * PAGE, np.uint8), np.zeros(PAGE, np.uint8)
        landing = target.register(far, remote="read-write")
        peer = source.connect(target.card())
        for _ in range(3):
            region = source.register(near)
            write = peer.write(te.Blocks.of(region.address + PAGE, landing.address, PAGE))
            assert write.wait(TIMEOUT_S)
            assert peer.stats().rails[0].reason == ""
            source.deregister(region)


def test_a_fence_that_comes_during_another_one_is_not_forgotten() -> None:
    """Three tags of one link at random distances: some fences come at the end of another one. Half
    of the transfers are stopped by their source, for the others the rails are broken."""
    wires = Wires()
    rng = random.Random(3)
    with (
        NullEngine(wires, nics=1, rail_timeout_s=0.02) as engine,
        contextlib.closing(RawDirectSource(engine.card(), wires)) as source,
        ThreadPoolExecutor(3) as pool,
    ):
        tags = iter(range(1, 1000))
        for turn in range(30):
            assert source.rail(epoch=1 + turn) is not None
            mine = [next(tags) for _ in range(3)]
            for tag in mine:
                engine.expect(tag)
                source.send(ask(tag, 2, tag=tag))
                source.granted()
            begun = threading.Barrier(3)

            def fence(tag: int, spins: int, begun: threading.Barrier = begun) -> int:
                begun.wait(TIMEOUT_S)
                for _ in range(spins):
                    pass
                return engine.fence(tag, TIMEOUT_S)

            fences = [pool.submit(fence, tag, rng.randrange(20000)) for tag in mine]
            for _ in mine:
                tag = source.await_frame(Kind.ACK).transfer
                if rng.random() < 0.5:
                    source.send(abandon(tag, tag, 0))
            assert [one.result(TIMEOUT_S) for one in fences] == [0, 0, 0]


def test_no_end_of_a_link_is_lost_however_late_it_is_read() -> None:
    plane = Plane(1, 20.0, 1.0, 0.0, 1 << 20, 64)
    worker = threading.Thread(target=plane.work, args=[0])
    worker.start()
    links = []
    for _ in range(600):
        link = TcpLink(plane, True)
        near, far = socket.socketpair()
        near.setblocking(False)
        assert link.add_rail(near.detach())
        links.append(link)
        far.close()
    told: set[int] = set()
    wait_until(lambda: plane.connections()[1] == 0, "all connections are closed")

    def read() -> bool:
        told.update(number for number, has_ended, *_ in plane.events() if has_ended)
        return told == {link.number for link in links}

    wait_until(read, "each end was told")
    plane.stop()
    worker.join()


@pytest.mark.slow
def test_a_rail_that_breaks_behind_a_flood_of_events_comes_back() -> None:
    wires = Wires()
    with contextlib.ExitStack() as undo:
        engine = undo.enter_context(NullEngine(wires, nics=1, stall_timeout_s=TIMEOUT_S))
        peer, raw = undo.enter_context(raw_direct_destination(wires, engine))
        strangers = [RawDirectSource(engine.card(), wires) for _ in range(300)]
        wait_until(lambda: engine.stats().rails == 1 + len(strangers), "all are taken in")
        gate, reached = threading.Event(), threading.Event()

        def stand_still() -> None:
            reached.set()
            gate.wait(TIMEOUT_S)

        engine._acceptor.loop.call(stand_still)
        assert reached.wait(TIMEOUT_S)
        try:
            for stranger in strangers:
                stranger.close()
            wait_until(lambda: engine.stats().rails == 1, "all have ended")
            memory = np.zeros(PAGE, np.uint8)
            region = engine.register(memory)
            write = peer.write(te.Blocks.of(region.address, 1 << 20, PAGE))
            number = raw.await_frame(Kind.ASK).transfer
            raw.send(word(Kind.RAIL_BROKEN, 0, 1, []))
            assert raw.await_frame(Kind.RAIL_LOST).tag == 1
            raw.send(word(Kind.RAIL_CLOSED, 0, 1, []), table([]))
            raw.send(ack(number, AckStatus.GRANTED))
            raw.await_frame(Kind.ABANDON)  # It has read what was sent before, too.
            raw.send(ack(number, AckStatus.ABANDONED))
            with pytest.raises(te.TransferFailed, match="nothing is registered"):
                write.wait(TIMEOUT_S)
        finally:
            gate.set()
        wait_until(lambda: (0, 2) in raw.rails and peer.rails == 1, "the rail is back")


@pytest.mark.slow
def test_rails_go_before_their_link_where_both_have_the_same_time_out() -> None:
    """Its end tells what had landed, and the link stays for the rail that comes back."""
    wires, memory = Wires(), np.zeros((2, PAGE), np.uint8)
    alike = {"rail_timeout_s": 2.0, "stall_timeout_s": 2.0, "rail_backoff_max_s": 0.05}
    with NullEngine(wires, 1, **alike) as source, NullEngine(wires, 1) as target:
        source.register(memory[0])
        target.register(memory[1], remote="read-write")
        peer = source.connect(target.card(), TIMEOUT_S)
        blocks = te.Blocks.of(memory[0].ctypes.data, memory[1].ctypes.data, PAGE)
        wires.hold(True)
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        assert peer.alive
        wires.hold(False)
        wait_until(lambda: peer.rails == 1, "the rail is back")
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE


class HeldAttempt:
    """The first attempt to make a rail, held until it is let go; the others go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.gate, self.ended = (threading.Event() for _ in range(3))
        self._first = threading.Lock()
        monkeypatch.setattr(link_module, "build_rail", self._build)

    def _build(self, *arguments: Any) -> None:
        if not self._first.acquire(blocking=False):
            return build_rail(*arguments)
        self.begun.set()
        assert self.gate.wait(TIMEOUT_S)
        try:
            return build_rail(*arguments)
        finally:
            self.ended.set()


def test_an_attempt_that_ends_behind_a_newer_one_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "BUILD_TIMEOUT_S", 0.5)
    wires = Wires()
    with NullEngine(wires, nics=1) as source, NullEngine(wires, nics=1) as target:
        near, far = np.zeros(PAGE, np.uint8), np.zeros(PAGE, np.uint8)
        regions = source.register(near), target.register(far, remote="read-write")
        peer = connected(source, target.card())
        link = railed(peer)
        held = HeldAttempt(monkeypatch)
        nic_failed(source._plane, 0, RailReason.PORT_DOWN)
        assert held.begun.wait(TIMEOUT_S)
        wait_until(lambda: peer.rails == 1, "the attempt behind it has made the rail")
        (newer,) = link.rows
        held.gate.set()
        assert held.ended.wait(TIMEOUT_S)
        for _ in range(10):
            blocks = te.Blocks.of(regions[0].address, regions[1].address, PAGE)
            assert peer.write(blocks).wait(TIMEOUT_S)
        (row,) = link.rows
        assert (row.epoch, row.ups, row.state) == (newer.epoch, newer.ups, RailState.RAIL_UP)


def connected(source: te.Engine, card: bytes) -> te.Peer:
    """Also if an attempt of each way has failed."""
    while True:
        try:
            return source.connect(card, TIMEOUT_S)
        except te.ConnectError:
            pass


def test_who_waits_for_the_rails_of_a_link_hears_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldAttempt(monkeypatch)
    wires = Wires()
    with (
        NullEngine(wires, nics=1) as engine,
        RawDirectListener(wires) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        connecting = pool.submit(engine.connect, listener.card, TIMEOUT_S)
        assert held.begun.wait(TIMEOUT_S)
        listener.next_link().close()
        with pytest.raises(te.ConnectError, match="the link has ended"):
            connecting.result(TIMEOUT_S)
        held.gate.set()


def test_a_rail_is_made_by_so_many_attempts_at_once_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "BUILD_TIMEOUT_S", -0.45)
    gate = threading.Event()
    begun: list[int] = []
    asked: list[int] = []
    begin = RailedLink._begin

    def ask_for(link: RailedLink, index: int, epoch: int, path: Any) -> None:
        asked.append(epoch)
        begin(link, index, epoch, path)

    def build(*arguments: Any) -> None:
        begun.append(arguments[4])
        assert gate.wait(TIMEOUT_S)
        raise OSError(errno.ETIMEDOUT, "the device gave up")

    def await_all_blocked(link: RailedLink, deadline_s: float) -> str:
        """An attempt whose thread comes late is given up before it has begun."""
        wait_until(lambda: len(begun) == link_module.ATTEMPTS_MAX, "so many are blocked")
        return await_refusal(link, deadline_s)

    monkeypatch.setattr(link_module, "build_rail", build)
    monkeypatch.setattr(RailedLink, "_begin", ask_for)
    wires = Wires()
    with (
        NullEngine(wires, nics=1, rail_backoff_max_s=0.01) as engine,
        RawDirectListener(wires) as listener,
    ):
        monkeypatch.setattr(link_module.RailedLink, "await_rails", await_all_blocked)
        with pytest.raises(te.ConnectError, match="5 attempts to make the rail are still blocked"):
            engine.connect(listener.card, TIMEOUT_S)
        at_once = list(begun)
        gate.set()
        listener.next_link().close()
    assert asked == sorted(set(asked)), "one for each epoch, in their order"
    assert set(at_once) <= set(asked)
    assert len(set(at_once)) == len(at_once) == link_module.ATTEMPTS_MAX


def test_an_attempt_for_which_there_is_no_thread_is_refused_and_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wires = Wires()
    with (
        NullEngine(wires, nics=1, rail_backoff_max_s=0.01) as engine,
        RawDirectListener(wires) as listener,
    ):
        left, start = iter([False] * (link_module.ATTEMPTS_MAX + 1)), Pool._start
        monkeypatch.setattr(Pool, "_start", lambda pool: next(left, True) and start(pool))
        monkeypatch.setattr(link_module.RailedLink, "await_rails", await_rail)
        peer = engine.connect(listener.card, TIMEOUT_S)
        assert "no thread can be started" in peer.stats().rails[0].reason
        listener.next_link().close()


def test_a_device_that_takes_no_work_request_and_names_none_loses_its_rail() -> None:
    wires, memory = Wires(), np.zeros((2, PAGE), np.uint8)
    with NullEngine(wires, 1) as source, NullEngine(wires, 1) as target:
        source.register(memory[0])
        target.register(memory[1], remote="read-write")
        peer = source.connect(target.card(), TIMEOUT_S)
        wires.refuse(errno.ENOMEM)
        write = peer.write(te.Blocks.of(memory[0].ctypes.data, memory[1].ctypes.data, PAGE))
        wait_until(lambda: "ibv_post_send" in peer.stats().rails[0].reason, "the rail is lost")
        wires.refuse(0)
        assert write.wait(TIMEOUT_S) is te.Status.DONE


def test_a_fence_waits_for_a_queue_pair_that_its_device_does_not_destroy() -> None:
    """It may still write."""
    wires = Wires()
    with NullEngine(wires, nics=1, rail_timeout_s=0.02) as engine, contextlib.closing(
        RawDirectSource(engine.card(), wires)
    ) as source:  # fmt: skip
        assert source.rail() is not None
        engine.expect(1)
        source.send(ask(1, 2, tag=1))
        source.granted()
        wires.keep(errno.EBUSY)
        with pytest.raises(te.FenceTimeout):
            engine.fence(1, 0.3)
        wires.keep(0)
        assert engine.fence(1, TIMEOUT_S) == 0


def test_an_engine_is_not_closed_while_a_device_keeps_its_queue_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wires = Wires()
    with NullEngine(wires, nics=1) as source, NullEngine(wires, nics=1) as target:
        peer = source.connect(target.card(), TIMEOUT_S)
        wires.keep(errno.EBUSY)
        with monkeypatch.context() as short:
            short.setattr("te.engine.CLOSE_TIMEOUT_S", 0.3)
            with pytest.raises(te.FenceTimeout, match="call close again"):
                source.close()
        assert not peer.alive
        wires.keep(0)
        source.close()


class Unwatchable(Device):
    """Its first queue pair has a completion channel that epoll(7) refuses."""

    is_first = True

    def queue_pair(self, *depths: int) -> QueuePair:
        pair = super().queue_pair(*depths)
        if self.is_first:
            self.is_first = False
            with Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), pair.fd)
        return pair


def test_a_rail_whose_completions_cannot_be_watched_says_why() -> None:
    wires = Wires()
    with (
        DeviceEngine(Unwatchable(wires), ("rdma",)) as source,
        NullEngine(wires, nics=1) as target,
        pytest.raises(te.ConnectError, match="epoll_ctl of its completion channel: Operation not"),
    ):
        source.connect(target.card(), TIMEOUT_S)


def test_what_is_made_behind_the_end_of_a_worker_stays_who_made_it() -> None:
    wires, plane = Wires(), Plane(1, 1.0, 1.0, 0.0, 1 << 20, 16)
    worker = threading.Thread(target=plane.work, args=[0])
    worker.start()
    plane.stop()
    worker.join()
    pair = Device(wires).queue_pair(1, 1, 1, 1 << 30)
    with pytest.raises(OSError, match="the engine is closed"):
        RdmaLink(plane, False).add_qp(pair.address, 0, 1, 0, 0, 0)
    assert pair.number == 1  # It has its queue pair still, and gives it back itself.
    near, far = socket.socketpair()
    with near, far:
        assert not RdmaLink(plane, True).add_connection(near.fileno())


def await_rail(link: RailedLink, _deadline_s: float) -> None:
    """In place of waiting for the first failure."""
    wait_until(lambda: link.rows[0].state == RailState.RAIL_UP, "the rail is up")


def await_refusal(link: RailedLink, _deadline_s: float) -> str:
    """The same, for one that was refused."""
    wait_until(lambda: link.rows[0].code == RailReason.ATTEMPT_FAILED, "one was refused")
    return link.rows[0].text


def test_a_rail_that_comes_late_replaces_none_that_is_newer() -> None:
    """Two attempts at one rail, of which the first is over last."""
    wires = Wires()
    with NullEngine(wires, nics=1) as engine, contextlib.closing(
        RawDirectSource(engine.card(), wires)
    ) as source:  # fmt: skip
        newer = source.rail(epoch=2)
        assert newer is not None
        source.rail(epoch=1)
        # The worker takes them up one after the other: behind this one, it has seen both.
        assert source.rail(index=1, epoch=1) is not None
        engine.expect(3)
        source.send(ask(1, 1, tag=3))
        mark = source.granted()
        assert newer.send_marks([mark])
        wait_until(lambda: engine.arrived(3) == 1, "it has landed")


def test_who_asks_for_a_rail_again_has_it_though_what_it_asked_first_is_done_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection broke before it had the answer."""
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def accept(*arguments: Any) -> RailAnswer:
        if begun.is_set():
            return accept_rail(*arguments)
        begun.set()
        assert gate.wait(TIMEOUT_S)
        try:
            return accept_rail(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(transport_module, "accept_rail", accept)
    wires = Wires()
    with (
        NullEngine(wires, nics=1) as engine,
        contextlib.closing(RawDirectSource(engine.card(), wires)) as source,
        ThreadPoolExecutor(1) as pool,
        contextlib.ExitStack() as undo,
    ):
        undo.callback(gate.set)
        first = pool.submit(source.rail)
        assert begun.wait(TIMEOUT_S)
        pair = source.rail()
        assert pair is not None
        gate.set()
        assert ended.wait(TIMEOUT_S)
        first.result(TIMEOUT_S)
        # Its worker has taken up what it was given before some turn of these.
        for tag in range(1, 11):
            engine.expect(tag)
            source.send(ask(tag, 1, tag=tag))
            assert pair.send_marks([source.granted()])
            assert source.await_frame(Kind.ACK).status == AckStatus.LANDED


def test_what_is_cancelled_is_given_up_by_the_worker_of_its_link() -> None:
    """Before it was granted, and when it waits for rails; what is not cancelled goes on."""
    wires = Wires()
    with (
        NullEngine(wires, nics=1, stall_timeout_s=TIMEOUT_S) as engine,
        raw_direct_destination(wires, engine) as (peer, raw),
    ):
        memory = np.zeros(PAGE, np.uint8)
        region = engine.register(memory)
        raw.send(table([(1 << 20, (1 << 20) + PAGE)]))
        blocks = te.Blocks.of(region.address, 1 << 20, PAGE)
        asked, granted, kept = (peer.write(blocks) for _ in range(3))
        numbers = [raw.await_frame(Kind.ASK).transfer for _ in range(3)]
        raw.send(word(Kind.RAIL_BROKEN, 0, 1, []))
        assert raw.await_frame(Kind.RAIL_LOST).tag == 1
        raw.send(ack(numbers[1], AckStatus.GRANTED), ack(numbers[2], AckStatus.GRANTED))
        for transfer, number in ((asked, numbers[0]), (granted, numbers[1])):
            transfer.cancel()
            assert raw.await_frame(Kind.ABANDON).transfer == number
            raw.send(ack(number, AckStatus.ABANDONED))
            assert transfer.wait(TIMEOUT_S) is te.Status.CANCELLED
        assert kept.poll() is te.Status.PENDING
        raw.send(word(Kind.RAIL_CLOSED, 0, 1, []))
        wait_until(lambda: (0, 2) in raw.rails, "the rail is made anew")
        wait_until(lambda: peer.stats().rails[0].flow.bytes_sent == PAGE, "it is written")
        raw.send(ack(numbers[2], AckStatus.LANDED))
        assert kept.wait(TIMEOUT_S) is te.Status.DONE


def test_a_fence_ends_what_was_granted_and_never_written() -> None:
    """A source that asks and then does nothing: the rails are broken, the slot is free again."""
    wires = Wires()
    with NullEngine(wires, nics=1) as engine, contextlib.closing(
        RawDirectSource(engine.card(), wires)
    ) as source:  # fmt: skip
        pair = source.rail()
        assert pair is not None
        for tag in range(1, 4):
            engine.expect(tag)
            source.send(ask(tag, 2, tag=tag))
            mark = source.granted()
            assert pair.send_marks([mark])
            assert engine.fence(tag, TIMEOUT_S) == 0
            refused = source.await_frame(Kind.ACK)
            assert (refused.transfer, refused.status) == (tag, AckStatus.REFUSED)
            pair = source.rail(epoch=1 + tag)
            assert pair is not None
            pair.send_marks([mark + 1])
        engine.expect(9)
        source.send(ask(9, 1, tag=9))
        assert pair.send_marks([source.granted()])
        wait_until(lambda: engine.arrived(9) == 1, "the last one has landed")


def test_a_fence_leaves_the_rails_of_a_source_that_stops() -> None:
    """It has posted what has not completed when the tag is closed."""
    wires, tags = Wires(), itertools.count(1)
    with NullEngine(wires, nics=1) as source, NullEngine(wires, nics=1) as target:
        near, far = np.zeros(64 * PAGE, np.uint8), np.zeros(64 * PAGE, np.uint8)
        regions = source.register(near), target.register(far, remote="read-write")
        peer = source.connect(target.card())
        direct = railed(peer)

        def is_stopped_in_time() -> bool:
            """Whoever stands still for longer than the target waits may cost the rail."""
            wait_until(lambda: peer.rails == 1, "a rail")
            epoch, tag, other = direct.rows[0].epoch, next(tags), next(tags)
            target.expect(tag)
            wires.hold(True)
            write = peer.write(te.Blocks.of(regions[0].address, regions[1].address, len(near)), tag)
            wait_until(lambda: peer.stats().rails[0].bytes_in_flight, "it is posted")
            begun_s = time.monotonic()
            fence = threading.Thread(target=target.fence, args=[tag, TIMEOUT_S])
            fence.start()
            wait_until(lambda: is_being_fenced(target, tag), "the tag is closed")
            wires.hold(False)
            fence.join()
            is_in_time = time.monotonic() < begun_s + STOPS_S
            with pytest.raises(te.TransferFailed, match=f"the tag {tag:#x} was fenced"):
                write.wait(TIMEOUT_S)
            target.expect(other)
            assert peer.write(te.Blocks.of(regions[0].address, regions[1].address, 9), other).wait(
                TIMEOUT_S
            )
            assert not is_in_time or direct.rows[0].epoch == epoch
            return is_in_time

        for _ in range(6):
            wait_until(is_stopped_in_time, "it stops in time")


def is_being_fenced(engine: te.Engine, tag: int) -> bool:
    revocation = engine._plane.revoke_tag(tag)
    return revocation is None or not engine._plane.open_tag(tag)[1]


def test_a_fence_waits_for_the_last_mark_of_what_was_stopped() -> None:
    wires, tags = Wires(), itertools.count(1)
    with NullEngine(wires, nics=1) as engine, contextlib.closing(
        RawDirectSource(engine.card(), wires)
    ) as source:  # fmt: skip
        pair, epoch = source.rail(), 1

        def is_stopped_in_time() -> bool:
            """If the source, or the engine, stands still for longer, the rail may be broken."""
            nonlocal pair, epoch
            assert pair is not None
            tag = next(tags)
            engine.expect(tag)
            source.send(ask(tag, 4, tag=tag))
            mark = source.granted()
            begun_s = time.monotonic()
            fence = threading.Thread(target=engine.fence, args=[tag, TIMEOUT_S])
            fence.start()
            refused = source.await_frame(Kind.ACK)
            assert (refused.transfer, refused.status) == (tag, AckStatus.REFUSED)
            pair.send_marks([mark])
            source.send(abandon(tag, tag, 2))
            pair.send_marks([mark + 1])
            fence.join()
            is_in_time = time.monotonic() < begun_s + STOPS_S
            if any(status for status, _ in pair.poll()) or not pair.send_marks([0]):
                assert not is_in_time
                epoch += 1
                pair = source.rail(epoch=epoch)
            return is_in_time

        for _ in range(6):
            wait_until(is_stopped_in_time, "it stops in time")


def test_an_engine_that_only_receives_keeps_nothing_of_links_that_ended() -> None:
    wires = Wires()
    with NullEngine(wires, nics=1) as engine:
        for _ in range(3):
            RawDirectSource(engine.card(), wires).close()
        wait_until(lambda: engine.stats().rails == 0, "all have ended")
        wait_until(lambda: not engine._acceptor._links, "their ends were told")


def test_a_closed_engine_has_its_devices_closed() -> None:
    """Whatever of it is still there."""
    wires = Wires(checks_keys=True)
    source, target = NullEngine(wires), NullEngine(wires)
    region = source.register(np.zeros(PAGE, np.uint8))
    with source, target:
        peer = source.connect(target.card())
    assert [nic.device.events_fd for nic in source._null_fabric.nics] == [-1, -1]
    assert [nic.device.events_fd for nic in target._null_fabric.nics] == [-1, -1]
    assert not peer.alive
    assert region.registration is not None
    source.close()
    region.registration.close()
