# SPDX-License-Identifier: Apache-2.0
"""Links to prefill ranks over real zmq sockets: each event once, in order, and none of a link that
has been replaced."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import zmq
from handover import FIRST, HOST, PATIENT, WAIT_S, Pool, make_context, until
from msgspec import structs
from te_ports import held_port
from zmtp_peer import claim

import te
from bootstrap_server import Rank, Why
from sglang_mooncake.context import Deadlines
from sglang_mooncake.control import ControlLoop
from sglang_mooncake.layout import Buffers
from sglang_mooncake.links import decode as decode_links
from sglang_mooncake.links.decode import CONNECT_S, DIAL_S, DecodeLinks, LinkKey
from sglang_mooncake.links.sockets import numeric_address, open_router
from sglang_mooncake.messages import (
    Hello,
    HelloReply,
    LinkReset,
    RoomAbort,
    RoomFailed,
    RoomWait,
    decode,
    encode,
)
from sglang_mooncake.rooms.decode_events import LinkDown, LinkRefused, LinkUp, PeerFailed

REGISTRY = "10.0.0.1:8998"
ABORT = RoomAbort(1, 1, "gone")
ENGINE = te.Identity("0a" * 16, 7)
STANDS = HelloReply(None, *ENGINE)


def key_of(port: int, epoch: int = 1) -> LinkKey:
    return LinkKey(REGISTRY, Rank(FIRST, HOST, port, epoch))


def hello() -> Hello:
    context = make_context("decode", "", Deadlines())
    return Hello("decode rank", context.place, b"card", Pool().layout(Buffers((), (), ())))


def nobody(*_: object) -> None:
    """Is told of nothing."""


class Hand:
    """A loop that is turned by hand."""

    def __init__(self, context: zmq.Context) -> None:
        self.zmq_context = context
        self.readers: dict[zmq.Socket, object] = {}
        self.remove_reader = self.readers.pop

    def add_reader(self, socket, readable) -> None:
        self.readers[socket] = readable

    def turn(self) -> None:
        """Waits until something can be read, and reads it."""
        poller = zmq.Poller()
        for one in self.readers:
            poller.register(one, zmq.POLLIN)
        ready = poller.poll(WAIT_S * 1000)
        assert ready, "nothing came"
        for one, _ in ready:
            if one in self.readers:
                self.readers[one]()


class Bench:
    """Links turned by hand, and a router for a prefill rank."""

    def __init__(self, context: zmq.Context) -> None:
        self.loop = Hand(context)
        self.events, self.forgotten, self.refused = [], [], []
        self.links = DecodeLinks(
            self.loop,
            hello,
            PATIENT,
            10.0,
            "T",
            self.events.append,
            self.forgotten.append,
            lambda key, sentence, why: self.refused.append((key, sentence, why)),
        )
        self.router, port = open_router(context, HOST, 1 << 20, deadlines=PATIENT)
        self.key = key_of(port)

    def take(self):
        """Who has sent what."""
        assert self.router.poll(WAIT_S * 1000)
        identity, frame = self.router.recv_multipart()
        return identity, decode(frame)

    def say(self, identity: bytes, *messages) -> None:
        for message in messages:
            self.router.send_multipart([identity, encode(message)])

    def hear(self) -> None:
        """Waits until something has happened to the link: that a host answers is nothing yet."""
        until(lambda: self.events or self.loop.turn(), "an event")

    def connected(self) -> bytes:
        """Opens the link, and has it answered."""
        self.links.open(self.key)
        identity, message = self.take()
        assert isinstance(message, Hello)
        self.say(identity, STANDS)
        self.hear()
        assert self.events.pop() == LinkUp(self.key)
        assert self.links.engine(self.key) == ENGINE
        return identity


@pytest.fixture(scope="module")
def context():
    """Of all tests: the end of one waits for what a link that was given up has still to say."""
    with zmq.Context() as context:
        yield context


@pytest.fixture
def bench(context, monkeypatch):
    monkeypatch.setattr(decode_links, "CONNECT_S", CONNECT_S)  # only tests turn it on
    monkeypatch.setattr(decode_links, "DIAL_S", DIAL_S)
    made = Bench(context)
    yield made
    made.links.close()
    made.router.close(linger=0)


def test_a_link_is_opened_once_and_says_to_each_who_asks_that_it_stands(bench):
    bench.links.open(bench.key)
    bench.links.open(bench.key)
    assert bench.events == []
    assert not bench.links.stands(bench.key)
    identity, _ = bench.take()
    bench.say(identity, STANDS, STANDS)
    bench.hear()
    assert bench.events[0] == LinkUp(bench.key)
    assert bench.links.stands(bench.key)
    bench.events.clear()
    bench.links.open(bench.key)
    assert bench.events == [LinkUp(bench.key)]
    assert not bench.router.poll(0), "one hello"


def test_a_refused_link_can_be_told_and_is_dialled_again_for_the_next_room(bench):
    def told(event):
        bench.events.append(event)
        if isinstance(event, LinkRefused):
            bench.links.send(bench.key, ABORT)

    bench.links._report = told
    bench.links.open(bench.key)
    identity, _ = bench.take()
    bench.say(identity, HelloReply("another page size", why=Why.PAGE_SIZE))
    bench.hear()
    (refused,) = bench.events
    assert isinstance(refused, LinkRefused)
    assert bench.refused == [(bench.key, refused.reason, Why.PAGE_SIZE)]
    assert bench.take() == (identity, ABORT)
    assert len(bench.links) == 0
    bench.events.clear()
    bench.connected()


def test_what_a_rank_says_after_it_has_reset_the_link_is_not_heard(bench):
    identity = bench.connected()
    failed = RoomFailed(1, 1, "no")
    bench.say(identity, failed, LinkReset("lost you"), LinkReset("twice"), failed, STANDS)
    until(lambda: len(bench.events) >= 2 or bench.loop.turn(), "both are heard")
    assert bench.events == [
        PeerFailed(bench.key, failed),
        LinkDown(bench.key, f"{bench.key}: lost you"),
    ]
    assert bench.loop.readers == {}
    assert bench.forgotten == [], "the rank lives"


def test_a_monitor_that_fires_late_says_nothing_of_the_link_that_has_taken_the_place(bench):
    bench.connected()
    former = list(bench.loop.readers.values())
    link = bench.links._links[bench.key]
    bench.links._drop(link, "lost", forget_instance=True)
    assert bench.events == [LinkDown(bench.key, "lost")]
    bench.events.clear()
    bench.connected()
    for readable in former:
        readable()
    assert bench.events == []
    bench.links.open(bench.key)
    assert bench.events == [LinkUp(bench.key)]


def test_a_rank_that_dies_is_found_by_its_connection_and_looked_up_afresh(bench):
    bench.connected()
    bench.router.close(linger=0)
    bench.hear()
    assert bench.events == [LinkDown(bench.key, f"lost the connection to {bench.key}")]
    assert bench.forgotten == [REGISTRY]
    assert len(bench.links) == 0


def test_a_rank_that_could_not_be_told_that_a_room_has_ended_is_told_over_the_next_link(bench):
    """It may have the request, and waits for the decode rank: for minutes, if nobody tells it."""
    bench.connected()
    bench.links._drop(bench.links._links[bench.key], "lost", forget_instance=True)
    bench.links.send(bench.key, ABORT)
    bench.links.send(bench.key, RoomWait(2, 1))
    bench.key = key_of(bench.key.rank.port, epoch=2)  # which has been started again meanwhile
    bench.links.open(bench.key)
    identity, message = bench.take()
    assert isinstance(message, Hello)
    later = RoomAbort(3, 1, "while the hello is under way")
    bench.links.send(bench.key, later)
    assert bench.take() == (identity, later)  # in case the rank refuses us
    bench.say(identity, STANDS)
    bench.loop.turn()
    until(lambda: bench.links.stands(bench.key) or bench.loop.turn(), "it stands")
    assert [bench.take(), bench.take()] == [(identity, ABORT), (identity, later)]
    bench.say(identity, STANDS)
    bench.loop.turn()
    assert not bench.router.poll(0), "once"


def test_of_what_could_not_be_said_so_much_is_kept_and_no_more(bench, monkeypatch):
    monkeypatch.setattr(decode_links, "UNSAID_MAX", 2)
    monkeypatch.setattr(decode_links, "UNSAID_RANKS_MAX", 2)
    for address in "abc":
        for room in (1, 2, 3):
            key = LinkKey(address, Rank(FIRST, HOST, 1, 1))
            bench.links.send(key, RoomAbort(room, 1, "gone"))
    kept = {key[0]: [one.room for one in said] for key, said in bench.links._unsaid.items()}
    assert kept == {"b": [2, 3], "c": [2, 3]}


def test_a_port_at_which_nobody_listens_is_given_up_at_once(bench):
    with held_port() as port:
        bench.links.open(key_of(port))
        bench.loop.turn()
    reason = f"the connection to {key_of(port)} was refused: no process listens there"
    assert bench.events == [LinkDown(key_of(port), reason)]
    assert bench.forgotten == [REGISTRY]
    assert len(bench.links) == 0


class Unsendable(zmq.Socket):
    """libzmq gives no reason but a full queue while the context lives."""

    def send(self, *args, **kwargs):
        raise zmq.ZMQError(zmq.EHOSTUNREACH)


def test_a_message_that_cannot_be_sent_takes_the_link_down_and_raises_nothing(bench):
    """In the middle of a batch, the others of which are for other links."""
    bench.connected()
    bench.links._links[bench.key].dealer.__class__ = Unsendable
    bench.links.send(bench.key, ABORT)
    (down,) = bench.events
    assert isinstance(down, LinkDown)
    assert "cannot write to prefill rank" in down.reason
    assert len(bench.links) == 0
    bench.links.send(bench.key, ABORT)  # over a link that is gone: its rooms have been told
    assert bench.events == [down]


def test_a_link_that_is_lost_while_kept_ends_are_said_is_not_reported_to_stand(bench):
    bench.links.send(bench.key, ABORT)
    bench.links.open(bench.key)
    identity, _ = bench.take()
    bench.links._links[bench.key].dealer.__class__ = Unsendable
    bench.say(identity, STANDS)
    bench.hear()
    (down,) = bench.events
    assert isinstance(down, LinkDown)
    assert [list(said) for said in bench.links._unsaid.values()] == [[ABORT]], "for the next link"


def test_a_rank_that_takes_nothing_in_loses_its_link(bench, monkeypatch):
    monkeypatch.setattr("sglang_mooncake.links.sockets.QUEUE_MESSAGES_MAX", 2)
    with socket.create_server((HOST, 0)) as silent:
        key = key_of(silent.getsockname()[1])
        bench.links.open(key)
        for _ in range(3):
            bench.links.send(key, ABORT)
    assert bench.events == [LinkDown(key, f"{key} does not read its messages")]


def test_a_link_that_cannot_be_opened_says_so_at_once_and_is_opened_for_the_next_room():
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 5)  # a router, and one link of three
        bench = Bench(context)
        bench.connected()
        with socket.create_server((HOST, 0)) as other:
            key = key_of(other.getsockname()[1])
            bench.links.open(key)
            (down,) = bench.events
            assert isinstance(down, LinkDown)
            assert down.link == key
            assert down.reason == f"cannot open a link to {key}: Too many open files"
            bench.links._drop(bench.links._links[bench.key], "lost", forget_instance=False)

            def is_open() -> bool:  # once zmq has closed the former one, which it does beside us
                bench.links.open(key)
                return len(bench.links) == 1

            until(is_open, "the link is dialled again")
        bench.links.close()
        bench.router.close(linger=0)


@contextmanager
def silent_host():
    """Where who dials is not answered, as if the way was cut: a listener, until it accepts one."""
    # The kernel answers nobody while as many connections wait as may.
    with (
        socket.create_server((HOST, 0), backlog=0) as server,
        socket.create_connection(server.getsockname(), WAIT_S),
    ):
        yield server


def test_a_rank_whose_host_answers_nobody_is_given_up_before_its_hello_is_due(bench):
    with silent_host() as server:
        key = key_of(server.getsockname()[1])
        bench.links.open(key)
        link = bench.links._links[key]
        bench.links.tick(link.opened_s + CONNECT_S - 0.1)
        assert bench.events == []
        bench.links.tick(link.opened_s + CONNECT_S)
        assert bench.events == [LinkDown(key, f"{key} does not answer")]
        assert bench.forgotten == [REGISTRY], "it may have been started again elsewhere"


def test_a_host_that_does_not_answer_is_dialled_anew_and_not_when_tcp_likes(bench):
    with silent_host() as server:
        key = key_of(server.getsockname()[1])
        bench.links.open(key)
        link = bench.links._links[key]
        former = link.dealer
        bench.links.tick(link.opened_s + DIAL_S - 0.1)
        assert link.dealer is former
        bench.links.tick(link.opened_s + DIAL_S + 0.01)
        assert former.closed
        assert set(bench.loop.readers) == {link.dealer, link.monitor}
        again = link.dealer
        bench.links.tick(link.opened_s + 2 * DIAL_S - 0.1)
        assert link.dealer is again, "each attempt has its time"
        # The one that was there, and the next: what was dialled before may come, closed as it is.
        accepted = [server.accept()[0] for _ in range(2)]
        until(lambda: link.connected or bench.loop.turn(), "the host answers")
        bench.links.tick(link.opened_s + CONNECT_S)
        assert link.dealer is again
        assert bench.events == []
        for one in accepted:
            one.close()


@pytest.mark.parametrize("later_s", [DIAL_S, CONNECT_S])
def test_a_host_that_has_answered_while_nobody_looked_keeps_its_link(bench, later_s):
    bench.links.open(bench.key)
    bench.take()
    link = bench.links._links[bench.key]
    former = link.dealer
    bench.links.tick(link.opened_s + later_s + 0.01)
    assert bench.events == []
    assert link.dealer is former
    assert link.connected


@pytest.mark.parametrize("later_s", [DIAL_S, CONNECT_S])
def test_a_host_that_has_refused_while_nobody_looked_is_told_of_once(bench, later_s):
    with socket.create_server((HOST, 0)) as gone:
        key = key_of(gone.getsockname()[1])
    bench.links.open(key)
    link = bench.links._links[key]
    assert link.monitor.poll(WAIT_S * 1000), "libzmq reports the refusal"
    bench.links.tick(link.opened_s + later_s + 0.01)
    (down,) = bench.events
    assert "was refused: no process listens there" in down.reason
    assert bench.loop.readers == {}
    assert len(bench.links) == 0


def test_a_host_that_cannot_be_dialled_anew_is_given_up(bench):
    with silent_host() as server:
        key = key_of(server.getsockname()[1])
        bench.links.open(key)
        link = bench.links._links[key]
        bench.loop.zmq_context = zmq.Context()
        bench.loop.zmq_context.term()
        bench.links.tick(link.opened_s + DIAL_S + 0.01)
        (down,) = bench.events
        assert down.reason.startswith(f"cannot open a link to {key}: ")
        assert bench.loop.readers == {}
        assert len(bench.links) == 0


def test_a_rank_that_is_reached_has_longer_for_its_answer(bench):
    with socket.create_server((HOST, 0)) as silent:
        key = key_of(silent.getsockname()[1])
        bench.links.open(key)
        link = bench.links._links[key]
        until(lambda: link.connected or bench.loop.turn(), "the host answers")
        bench.links.tick(link.opened_s + CONNECT_S)
        assert bench.events == []
        bench.links.tick(link.opened_s + 10.0)
        (down,) = bench.events
        assert down.reason == f"{key} did not answer the hello within 10 s (T)"


@pytest.mark.parametrize("deadlines", [PATIENT, Deadlines(heartbeat_s=1e300)])
def test_heartbeats_longer_than_zmq_can_count_are_never(bench, deadlines):
    bench.links._deadlines = deadlines
    bench.connected()


class Peers:
    """A handler that opens links on its loop and notes what becomes of them."""

    def __init__(self, keys: list[LinkKey]) -> None:
        self.keys = keys
        self.up: set[LinkKey] = set()
        self.others: list[object] = []
        self.links: DecodeLinks | None = None

    def started(self, loop: ControlLoop) -> None:
        self.links = DecodeLinks(loop, hello, PATIENT, WAIT_S, "T", self.report, nobody, nobody)
        for key in self.keys:
            self.links.open(key)

    def report(self, event) -> None:
        if isinstance(event, LinkUp):
            self.up.add(event.link)
        else:
            self.others.append(event)

    def on_stimulus(self, stimulus, now_s) -> None:
        pass

    def on_tick(self, now_s) -> None:
        pass

    def stopped(self) -> None:
        self.links.close()


@contextmanager
def answering_router():
    """A prefill rank that answers every hello."""
    stop = threading.Event()
    with zmq.Context() as context:
        router, port = open_router(context, HOST, 1 << 20, deadlines=PATIENT)

        def answer() -> None:
            while not stop.is_set():
                if router.poll(20):
                    identity, _ = router.recv_multipart()
                    router.send_multipart([identity, encode(STANDS)])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield port
        finally:
            stop.set()
            thread.join()
            router.close(linger=0)


def test_a_decode_rank_reaches_four_hundred_prefill_ranks():
    with answering_router() as port:
        peers = Peers([key_of(port, epoch) for epoch in range(400)])
        loop = ControlLoop("many", peers)
        loop.start()
        try:
            until(lambda: len(peers.up) == 400 or peers.others, "all links stand")
            assert peers.others == []
        finally:
            loop.close()


# --- the other end ---


def test_nobody_takes_the_place_of_another_rank(bench):
    identity = bench.connected()
    with claim(bench.key.rank.port, identity, encode(LinkReset("from the thief"))):
        thief, _ = bench.take()
        assert thief != identity
        bench.say(identity, RoomFailed(1, 1, "for the rank itself"))
        bench.hear()
        assert bench.events == [PeerFailed(bench.key, RoomFailed(1, 1, "for the rank itself"))]


def test_who_claims_the_names_that_come_next_ends_no_rank(bench):
    """libzmq would abort the process when it gives out the first of them."""
    first = int.from_bytes(bench.connected()[1:], "big")
    later = [bytes(1) + struct.pack(">I", (first + one) & 0xFFFF_FFFF) for one in range(1, 9)]
    with contextlib.ExitStack() as stack:
        for wanted, given in zip(reversed(later), later, strict=True):
            stack.enter_context(claim(bench.key.rank.port, wanted, encode(ABORT)))
            assert bench.take() == (given, ABORT)
        for _ in later:
            stack.enter_context(claim(bench.key.rank.port, b"", encode(ABORT)))
            assert bench.take()[0] not in later


def test_a_name_is_not_looked_up_by_those_who_have_links(bench):
    """libzmq would do it in its one thread, where the links of all other ranks would wait."""
    named = replace(bench.key, rank=structs.replace(bench.key.rank, host="node7.invalid"))
    bench.links.open(named)
    (down,) = bench.events
    assert isinstance(down, LinkDown)
    assert "'node7.invalid', which is no numeric address" in down.reason


def test_a_rank_tells_its_peers_an_address_and_not_its_name():
    assert numeric_address("localhost") in ("127.0.0.1", "::1")
    assert numeric_address("fd00::1") == "fd00::1"
    with pytest.raises(ValueError, match=r"the host .xxx.*has no address"):
        numeric_address("x" * 64)  # no resolver is asked for a name as long as that
