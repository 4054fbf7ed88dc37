# SPDX-License-Identifier: Apache-2.0
"""Control links of a deployment with a secret: who comes in, by which name he is known, and what is
to be seen on the way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Self

import msgspec
import pytest
import zmq
from handover import FIRST, HOST, NEVER_S, PATIENT, WAIT_S, handover, make_context, until
from prefill_links import NEW, OLD, OTHER, Dealer, Prefill, hello
from zmq.utils import z85

from bootstrap_server import Rank, RankRecord
from bootstrap_server.admission import refusals
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import key_index, signed
from sglang_mooncake.control import ControlLoop
from sglang_mooncake.links import prefill as links
from sglang_mooncake.links.curve import Gatekeeper, decode_pair, new_pair
from sglang_mooncake.links.decode import DecodeLinks, LinkKey
from sglang_mooncake.links.sockets import HANDSHAKE_FAILED
from sglang_mooncake.messages import RoomAbort
from sglang_mooncake.rooms.decode_events import LinkDown
from sglang_mooncake.rooms.prefill_events import RoomAborted

BOTH = Keys.from_secrets([b"0123456789abcdef-new", b"0123456789abcdef-old"])
ABORT = RoomAbort(1, 1, "gone")


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    with Prefill(OLD) as made:
        yield made


# --- pairs ---


def test_one_pair_follows_from_each_secret():
    (key,), (other,) = OLD.control, NEW.control
    pair = decode_pair(key)
    assert decode_pair(key) == pair
    assert decode_pair(other).public != pair.public
    assert zmq.curve_public(pair.secret) == pair.public


def test_no_key_shows_in_what_is_printed():
    pair = new_pair()
    assert pair.secret.decode() not in repr(pair)
    key = LinkKey("10.0.0.1:8998", Rank(FIRST, HOST, 1, control_key=pair.public.decode()))
    assert pair.public.decode() not in str(key)


# --- who comes in ---


def test_a_holder_of_the_secret_is_heard(prefill):
    with Dealer(prefill, decode_pair(OLD.control[0])) as dealer:
        dealer.say(ABORT)
        until(lambda: prefill.events, "it is heard")
        (event,) = prefill.events
        assert isinstance(event, RoomAborted)
        assert event.message == ABORT


@pytest.mark.parametrize(
    "pair",
    [None, new_pair(), decode_pair(OTHER.control[0])],
    ids=["no key", "a key of his own", "another secret"],
)
def test_strangers_are_refused_before_anything_is_heard(prefill, pair, caplog):
    with Dealer(prefill, pair) as dealer:
        dealer.try_to_say(ABORT)
        assert dealer.event() & HANDSHAKE_FAILED
        # What a later one says comes after all that the stranger could have said.
        with Dealer(prefill, decode_pair(OLD.control[0])) as friend:
            friend.say(RoomAbort(2, 1, "later"))
            until(lambda: prefill.events, "the friend is heard")
        assert [event.message.room for event in prefill.events] == [2]
        assert not dealer.socket.poll(0), "nothing is said to strangers"
    if pair is not None:
        assert "refused a control connection from 127.0.0.1: its secret differs" in caplog.text


def test_strangers_fill_no_log(prefill, caplog, monkeypatch):
    monkeypatch.setattr(refusals, "LOG_EVERY_S", NEVER_S)
    for _ in range(5):
        with Dealer(prefill, new_pair()) as dealer:
            dealer.try_to_say(ABORT)
            assert dealer.event() & HANDSHAKE_FAILED
    assert caplog.text.count("refused a control connection") == 1


def test_whoever_has_not_the_ranks_key_cannot_speak_for_it(prefill):
    pair = decode_pair(OLD.control[0])
    with Dealer(prefill, pair, router_key=new_pair().public) as dealer:
        dealer.try_to_say(ABORT)
        assert dealer.event() & HANDSHAKE_FAILED
    assert not prefill.events


def test_without_a_gatekeeper_nobody_comes_in(monkeypatch):
    """libzmq lets everybody in whom nobody asks about, unless the domain is enforced."""

    class Absent:
        def __init__(self, *_) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(links, "Gatekeeper", Absent)
    with Prefill(OLD) as prefill, Dealer(prefill, decode_pair(OLD.control[0])) as dealer:
        dealer.try_to_say(ABORT)
        assert dealer.event() & HANDSHAKE_FAILED
        assert not prefill.events


def test_a_gatekeeper_answers_what_libzmq_would_never_ask():
    """Questions without credentials (another mechanism) are refused, too."""
    with zmq.Context() as context:

        class Loop:
            zmq_context = context

            def add_reader(self, socket, readable):
                self.socket, self.readable = socket, readable

        loop = Loop()
        gatekeeper = Gatekeeper(loop, OLD.control)  # type: ignore[arg-type]
        asking = context.socket(zmq.REQ)
        asking.connect("inproc://zeromq.zap.01")
        public = z85.decode(decode_pair(OLD.control[0]).public)
        for credentials, status in (
            ([], b"400"),
            ([b"x" * 32], b"400"),
            ([public, public], b"400"),
            ([public], b"200"),
        ):
            asking.send_multipart([b"1.0", b"7", b"d", b"10.0.0.9", b"", b"CURVE", *credentials])
            assert loop.socket.poll(WAIT_S * 1000)
            loop.readable()
            answer = asking.recv_multipart()
            assert answer[:3] == [b"1.0", b"7", status]
        loop.readable()  # nothing was asked: it does not wait
        asking.close(linger=0)
        gatekeeper.close()


# --- by which name ---


def test_a_name_belongs_to_one_connection(prefill):
    names = []
    for _ in range(2):
        with Dealer(prefill, decode_pair(OLD.control[0])) as dealer:
            dealer.try_to_say(ABORT)
            until(lambda: prefill.events, "it is heard")
            names.append(prefill.events.pop().peer)
    first, second = (int(name, 16) for name in names)
    assert second == (first + 1) & 0xFFFF_FFFF


# --- the decode side ---


class Opener:
    """Links of a decode rank on a loop of their own."""

    def __init__(self, keys: Keys, wanted: LinkKey) -> None:
        self.keys, self.wanted = keys, wanted
        self.events: list[object] = []
        self.forgotten: list[str] = []
        self.loop = ControlLoop("decode", self)

    def started(self, loop: ControlLoop) -> None:
        self.links = DecodeLinks(
            loop,
            hello,
            PATIENT,
            WAIT_S,
            "T",
            self.events.append,
            self.forgotten.append,
            lambda *_: None,
            self.keys.control,
        )
        self.links.open(self.wanted)

    def on_stimulus(self, stimulus, now_s) -> None:
        pass

    def on_tick(self, now_s) -> None:
        pass

    def stopped(self) -> None:
        self.links.close()

    def __enter__(self) -> Self:
        self.loop.start()
        return self

    def __exit__(self, *_) -> None:
        self.loop.close()


def rank(prefill: Prefill, control_key: str) -> LinkKey:
    return LinkKey("10.0.0.1:8998", Rank(FIRST, HOST, prefill.port, 1, control_key=control_key))


def test_a_rank_whose_record_has_no_key_is_not_asked(prefill):
    with Opener(OLD, rank(prefill, "")) as opener:
        until(lambda: opener.events, "the link is given up")
        (down,) = opener.events
        assert isinstance(down, LinkDown)
        assert "its record in the registry has no key for control links" in down.reason


@pytest.mark.parametrize("keys", [OLD, OTHER], ids=["another process", "another secret"])
def test_a_rank_that_proves_another_key_is_named_and_looked_up_afresh(prefill, keys):
    wrong = new_pair().public.decode() if keys is OLD else prefill.links.control_key
    with Opener(keys, rank(prefill, wrong)) as opener:
        until(lambda: opener.events, "the link is given up")
        (down,) = opener.events
        assert isinstance(down, LinkDown)
        assert "another key than its record in the registry" in down.reason
        assert f"{HOST}:{prefill.port}" in down.reason
        assert opener.forgotten == ["10.0.0.1:8998"]


# --- whole ranks ---


class Tap:
    """Passes on what goes to a port, over one connection, and keeps a copy."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._target = port
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with (
            contextlib.suppress(OSError),
            self._listener.accept()[0] as one,
            socket.create_connection((HOST, self._target)) as other,
        ):
            back = threading.Thread(target=self._pass_on, args=(other, one), daemon=True)
            back.start()
            self._pass_on(one, other)
            back.join(WAIT_S)

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(1 << 16):
                self.seen += data
                there.sendall(data)
        for one in (here, there):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._listener.close()


@pytest.mark.parametrize("encrypted", [True, False], ids=["secret", "open"])
def test_what_ranks_say_is_to_be_seen_only_without_a_secret(encrypted):
    name = f"decode-{os.urandom(4).hex()}"
    with Prefill(OLD if encrypted else Keys()) as prefill:
        tap = Tap(prefill.port)
        prefill.port = tap.port
        pair = decode_pair(OLD.control[0]) if encrypted else None
        with Dealer(prefill, pair) as dealer:
            prefill.may_connect.set()
            dealer.say(hello(name))
            assert "no engine" in dealer.hear().refused
        tap.close()
    assert (name.encode() in tap.seen) is not encrypted
    assert tap.seen


def test_ranks_with_a_secret_hand_over_and_encrypt():
    with handover(keys=BOTH) as pair:
        pair.decode.know(pair.address)
        pair.complete(1, [0, 1], [2, 3], aux=0)
        (instance,) = pair.decode.side.instances._known.values()
        assert len(instance.ranks[0].control_key) == 40
        (link,) = pair.decode.side._links._links
        assert link.secret == 0


FORTH = Keys.from_secrets([b"0123456789abcdef-old", b"0123456789abcdef-new"])


@pytest.mark.parametrize(
    ("prefill_keys", "decode_keys", "number"),
    [(OLD, FORTH, 0), (FORTH, OLD, 0), (FORTH, BOTH, 1), (BOTH, FORTH, 1), (NEW, BOTH, 0)],
    ids=["o-on", "on-o", "on-no", "no-on", "n-no"],
)
def test_a_secret_is_replaced_without_a_moment_in_which_links_are_refused(
    prefill_keys, decode_keys, number
):
    """A decode rank proves the secret with which the record is signed: that one the rank has."""
    with handover(keys=prefill_keys, decode_keys=decode_keys) as pair:
        pair.decode.know(pair.address)
        pair.complete(1, [0, 1], [2, 3], aux=0)
        (link,) = pair.decode.side._links._links
        assert link.secret == number


def test_a_registry_that_gives_out_another_key_is_not_believed():
    config = make_context("prefill", "", PATIENT).config
    rank = Rank(FIRST, HOST, 1, 1, control_key=new_pair().public.decode())
    mine = signed(RankRecord(config, rank), OLD.record).rank
    theirs = msgspec.structs.replace(mine, control_key=new_pair().public.decode())
    assert key_index(config, mine, OLD.record) == 0
    assert key_index(config, theirs, OLD.record) is None
