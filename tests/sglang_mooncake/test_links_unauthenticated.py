# SPDX-License-Identifier: Apache-2.0
"""Connections to a prefill rank's control port that say nothing, too little or too much: bounded,
and no other one suffers."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import zmq
from handover import HOST, NEVER_S, WAIT_S, until
from prefill_links import FRIEND, hello
from test_links_curve import ABORT, OLD, Dealer, Prefill

from bootstrap_server.admission import refusals, unauthenticated
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.unauthenticated import BYTES_MAX
from sglang_mooncake.links import sockets
from sglang_mooncake.links.curve import decode_pair
from sglang_mooncake.messages import encode

LISTEN = "0A"  # TCP_LISTEN of linux/tcp_states.h
MANY = 1200
#: ZMTP 3.0 with CURVE (RFC 23), and the greeting of one without security.
CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
PLAIN = CURVE.replace(b"CURVE", b"NULL\0")
SAYINGS = {"nothing": b"", "a byte": b"\xff", "a greeting": CURVE, "of no security": PLAIN}


@pytest.fixture
def descriptors_enough() -> Iterator[None]:
    """The strangers are in this process, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * MANY)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=["secret", "no secret"])
def prefill(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    with Prefill(OLD if request.param == "secret" else Keys.from_secrets([])) as made:
        yield made


def pair(prefill: Prefill):
    return decode_pair(OLD.control[0]) if prefill.router_key else None


def stands(prefill: Prefill, friend: Dealer) -> None:
    """Its link does: it is authenticated."""
    prefill.may_connect.set()
    friend.say(hello(card=FRIEND))
    assert friend.hear().refused is None
    assert not len(prefill.links._unauthenticated)


def connect(prefill: Prefill) -> socket.socket:
    return socket.create_connection((HOST, prefill.port), timeout=WAIT_S)


def is_heard(prefill: Prefill) -> None:
    """One who connects now, and nobody else since the events were looked at."""
    with Dealer(prefill, pair(prefill)) as dealer:
        dealer.say(ABORT)
        until(lambda: prefill.events, "a friend is heard")
        assert len(prefill.events) == 1
        prefill.events.clear()


def accepted(prefill: Prefill) -> int:
    """Connections that the process has at the rank's port; strangers' ends do not count."""
    port, own = f":{prefill.port:04X}", set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(path.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        row[1].endswith(port) and row[3] != LISTEN and f"socket:[{row[9]}]" in own for row in rows
    )


@pytest.mark.slow
@pytest.mark.usefixtures("descriptors_enough")
@pytest.mark.parametrize("said", SAYINGS)
def test_however_many_say_too_little_few_are_kept_and_friends_are_heard(
    prefill, said, caplog, monkeypatch
):
    monkeypatch.setattr(unauthenticated, "OF_SOURCE_MAX", 100)
    monkeypatch.setattr(refusals, "LOG_EVERY_S", NEVER_S)
    with (
        Prefill(prefill.keys) as prefill,
        contextlib.ExitStack() as undo,
        Dealer(prefill, pair(prefill)) as friend,
    ):
        stands(prefill, friend)
        for _ in range(MANY):
            stranger = undo.enter_context(connect(prefill))
            with contextlib.suppress(OSError):
                stranger.sendall(SAYINGS[said])
        prefill.events.clear()
        is_heard(prefill)
        until(lambda: accepted(prefill) <= 100 + 1, "few are kept")
        assert len(prefill.links._unauthenticated) <= 100
        friend.say(ABORT)
        until(lambda: prefill.events, "the friend's connection has gone on")
    # Not by libzmq, when the time for a handshake is over; and they fill no log.
    at_once = said == ("of no security" if prefill.router_key else "a greeting")
    least = 0 if at_once else 1
    assert least <= caplog.text.count("ended a control connection from 127.0.0.1") <= 1


def test_the_oldest_goes_for_a_new_one(prefill, monkeypatch):
    monkeypatch.setattr(unauthenticated, "OF_SOURCE_MAX", 3)
    with Prefill(prefill.keys) as few, contextlib.ExitStack() as undo:
        strangers = []
        for _ in range(5):
            strangers.append(undo.enter_context(connect(few)))
            strangers[-1].recv(1)  # libzmq has said its first words: it has been accepted
        for gone in strangers[:2]:
            while gone.recv(4096):
                pass
        until(lambda: len(few.links._unauthenticated) == 3, "the others are kept")
        for here in strangers[2:]:
            here.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                assert here.recv(4096), "it was ended"
        is_heard(few)


def test_words_alone_make_nobody_a_friend(prefill):
    """An abort, or a hello whose engine cannot be reached, costs a stranger nothing."""
    prefill.may_connect.set()
    watch = prefill.links._unauthenticated
    with (
        Dealer(prefill, pair(prefill)) as one,
        Dealer(prefill, pair(prefill)) as other,
        Dealer(prefill, pair(prefill)) as friend,
    ):
        one.say(ABORT)
        other.say(hello())
        assert "no engine" in other.hear().refused
        until(lambda: prefill.events, "the abort is heard")
        friend.say(hello(card=FRIEND))
        assert friend.hear().refused is None
        assert len(watch) == 2


def test_who_drips_has_one_deadline_for_the_whole_handshake(monkeypatch):
    monkeypatch.setattr(sockets, "_HANDSHAKE_MS_MAX", 300)
    with Prefill(OLD) as prefill, connect(prefill) as stranger:
        stranger.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            # A greeting, and a command that would take 20 s; libzmq itself allows 30.
            for byte in (CURVE + b"\x06" + (1 << 20).to_bytes(8, "big")).ljust(400, b"x"):
                stranger.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(4096):
                        break
            else:
                pytest.fail("it may drip for as long as it likes")
        until(lambda: not len(prefill.links._unauthenticated), "it is forgotten")


def received(prefill: Prefill) -> list[int]:
    """So many bytes of each unauthenticated connection."""
    known = list(prefill.links._unauthenticated._by_fd.values())
    return [unauthenticated.bytes_received(one.fd) for one in known]


def begins_to_say(prefill: Prefill) -> bytes:
    """The head of a frame that may be as long as any, in a handshake or behind it."""
    greeting = CURVE
    if not prefill.router_key:
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        greeting = PLAIN + b"\x04" + bytes([len(ready)]) + ready
    return greeting + b"\x02" + (32 << 20).to_bytes(8, "big")


def test_who_sends_too_much_before_a_message_is_ended(prefill, caplog):
    with connect(prefill) as stranger:
        stranger.sendall(begins_to_say(prefill))
        with contextlib.suppress(ConnectionError):
            stranger.sendall(bytes(BYTES_MAX))
            while stranger.recv(4096):
                pass
    until(lambda: "bytes, and its link does not stand" in caplog.text, "it is said")
    until(lambda: not len(prefill.links._unauthenticated), "it is forgotten")
    is_heard(prefill)


def test_of_those_who_send_much_together_the_one_with_most_goes(prefill, monkeypatch, caplog):
    monkeypatch.setattr(unauthenticated, "ALL_BYTES_MAX", 100_000)

    def is_said() -> bool:
        return "bytes, and its link does not stand" in caplog.text

    with contextlib.ExitStack() as undo:
        for nbytes in (70_000, 10_000, 60_000):
            stranger = undo.enter_context(connect(prefill))
            stranger.sendall(begins_to_say(prefill).ljust(nbytes, b"x"))
            until(lambda n=nbytes: n in received(prefill) or is_said(), "all of it has come")
        until(is_said, "one is ended")
        assert "it has sent 70000 bytes, and its link does not stand" in caplog.text
        is_heard(prefill)
        until(lambda: len(prefill.links._unauthenticated) == 2, "the others are kept")


def test_a_number_that_is_anothers_by_now_is_let_alone(prefill):
    """What libzmq closes may be anything before we look."""
    watch = prefill.links._unauthenticated
    with socket.create_server((HOST, 0)) as listener, socket.socket() as ours:
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs, Path(os.devnull).open() as file:
            for fd in (theirs.fileno(), file.fileno(), 10_000):
                watch._accepted(fd)
                assert not len(watch), "it is no connection of the rank's"
            stranger = connect(prefill)
            until(lambda: len(watch) == 1, "it is accepted")
            (one,) = watch._by_fd.values()
            watch.end(one._replace(fd=theirs.fileno()), "a test")
            watch.end(one._replace(fd=10_000), "a test")
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"
            stranger.close()


@pytest.mark.slow
@pytest.mark.usefixtures("descriptors_enough")
def test_a_thousand_friends_at_once_all_come_in(prefill):
    """Of one address, as behind a translation of addresses: a bound that friends meet would be an
    attack itself."""
    count = 1000
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count)
    dealers = []
    for _ in range(count):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        if prefill.router_key:
            friend = pair(prefill)
            dealer.curve_serverkey = prefill.router_key
            dealer.curve_publickey, dealer.curve_secretkey = friend.public, friend.secret
        dealer.connect(f"tcp://{HOST}:{prefill.port}")
        dealers.append(dealer)
    for dealer in dealers:
        dealer.send(encode(ABORT))
    until(lambda: len(prefill.events) == count, "all are heard")
    context.destroy(linger=0)


def test_lines_about_bad_messages_are_limited(prefill, caplog, monkeypatch):
    monkeypatch.setattr(refusals, "LOG_EVERY_S", NEVER_S)
    with Dealer(prefill, pair(prefill)) as dealer:
        for _ in range(20):
            dealer.socket.send(b"noise")
            assert dealer.hear().refused
    assert caplog.text.count("refused a message") == 1


# --- what was recorded, or comes back ---


@dataclass
class Recorder:
    """Stands between a rank and one that dials it."""

    port: int
    #: What the one who dials has said.
    said: bytearray = field(default_factory=bytearray)

    def __enter__(self) -> Self:
        self.listener = socket.create_server((HOST, 0))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.thread.join(WAIT_S)
        self.listener.close()

    def run(self) -> None:
        near, _ = self.listener.accept()
        with near, socket.create_connection((HOST, self.port)) as far:
            back = threading.Thread(target=copy, args=(far, near))
            back.start()
            copy(near, far, self.said)
            back.join()


def copy(source: socket.socket, target: socket.socket, into: bytearray | None = None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
            if into is not None:
                into += data
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_a_recorded_connection_counts_once():
    with Prefill(OLD) as prefill:
        with Recorder(prefill.port) as recorder:
            there = SimpleNamespace(
                port=recorder.listener.getsockname()[1], router_key=prefill.router_key
            )
            with Dealer(there, pair(prefill)) as friend:
                friend.say(ABORT)
                until(lambda: prefill.events, "the friend is heard")
        prefill.events.clear()
        with connect(prefill) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(recorder.said)
            while stranger.recv(4096):
                pass
        is_heard(prefill)  # and nobody before


def test_who_sends_back_what_a_rank_says_is_not_let_in():
    with Prefill(OLD) as prefill:
        with connect(prefill) as stranger, contextlib.suppress(ConnectionError):
            said = 0
            while data := stranger.recv(4096):
                stranger.sendall(data)
                said += len(data)
                if said == len(CURVE):  # it would wait for the other side's first command
                    stranger.shutdown(socket.SHUT_WR)
            assert said == len(CURVE)
        assert not prefill.events
        is_heard(prefill)
