# SPDX-License-Identifier: Apache-2.0
"""Connections that say nothing, or too little: however many there are, engines find in."""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_far import FarEngine, wait_until
from te_raw import (
    BLIND,
    TIMEOUT_S,
    dial,
    dial_unix,
    hello,
    raw_destination,
    read_greeting,
    take_challenge,
    take_hello,
    welcome,
)

import te
from te.connect import admission as rule
from te.connect.admission import (
    HALF_OPEN_MAX,
    HALF_OPEN_OF_SOURCE_MAX,
    SILENT_S,
    Admission,
    HalfOpen,
    source_of,
)
from te.connect.greeting import GREETING, MAGIC, GreetingKind
from te.handshake import PROTOCOL_VERSION

MANY = 1200


@pytest.fixture
def descriptors_enough() -> Iterator[None]:
    """The silent ends are in this process, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * MANY)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


DIALLERS = {"tcp": dial, "samehost": dial_unix}


def kept_by(engine: te.Engine) -> set[int]:
    """How many connections it keeps that have not introduced themselves, as it counts them in two
    places: once it has done what it was about."""
    acceptor, told = engine._acceptor, queue.SimpleQueue[set[int]]()
    acceptor.loop.call(lambda: told.put({len(acceptor._half_open), len(acceptor._admission)}))
    return told.get(timeout=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.usefixtures("descriptors_enough")
@pytest.mark.parametrize("transport", ["tcp", "samehost"])
@pytest.mark.parametrize("said", [0, 1, 15])
def test_silent_connections_lock_nobody_out(transport: str, said: int) -> None:
    """``said`` bytes of a hello, and then nothing; new ones come while an engine connects."""
    config = te.Config(connect_timeout_s=60.0)
    with contextlib.ExitStack() as undo:
        engine = undo.enter_context(te.Engine(config))
        friend = undo.enter_context(te.Engine(te.Config(transports=(transport,))))
        card = engine.card()
        beginning = hello(BLIND, card)[:said]
        enough, stop = threading.Event(), threading.Event()

        def annoy() -> None:
            count = 0
            while not stop.is_set():
                sock = undo.enter_context(DIALLERS[transport](card))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(beginning)
                count += 1
                if count == MANY:
                    enough.set()
                if count >= 2 * MANY:
                    return

        thread = threading.Thread(target=annoy)
        thread.start()
        try:
            assert enough.wait(60.0)
            assert friend.connect(card, timeout_s=60.0).alive
        finally:
            stop.set()
            thread.join(60.0)
        kept = kept_by(engine)
        assert len(kept) == 1
        assert kept.pop() <= HALF_OPEN_OF_SOURCE_MAX


@pytest.mark.slow
def test_a_peer_that_drips_has_one_deadline_for_its_whole_hello() -> None:
    with te.Engine(te.Config(connect_timeout_s=3.0)) as engine:
        with dial(engine.card()) as sock:
            data = hello(sock, engine.card())
            sock.settimeout(0.05)
            for byte in data[:-1] * 20:
                try:
                    sock.send(bytes([byte]))
                    if sock.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            else:
                pytest.fail("it may drip for as long as it likes")
        wait_until(lambda: not engine._acceptor._greeting, "no greeting is left")


def test_the_end_of_descriptors_is_no_end_of_connections() -> None:
    """Silent connections are closed for one that can be accepted only then."""
    with te.Engine(te.Config(connect_timeout_s=TIMEOUT_S)) as engine:
        card = engine.card()
        far = FarEngine(transports=["tcp"], connect_timeout_s=TIMEOUT_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        silent = [dial(card) for _ in range(40)]
        try:
            wait_until(lambda: len(engine._acceptor._admission) == 40, "all are accepted")
            used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - pathlib keeps one open
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
            assert far.connect(card=base64.b64encode(card).decode()) == engine.id
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for sock in silent:
                sock.close()
            far.end()


# -- the other way round: who answers an engine that dials


def served(serve: Callable[[socket.socket], None]) -> contextlib.AbstractContextManager[bytes]:
    """The card of a destination whose connections are handed to ``serve``."""

    @contextlib.contextmanager
    def block() -> Iterator[bytes]:
        with raw_destination() as (listener, card):

            def run() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        sock, _ = listener.accept()
                        with sock, contextlib.suppress(ConnectionError):
                            serve(sock)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            try:
                yield card
            finally:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                thread.join(TIMEOUT_S)

    return block()


@pytest.mark.parametrize("drips_challenge", [True, False])
def test_connecting_to_a_peer_that_drips_has_a_deadline(drips_challenge: bool) -> None:
    dripped, answer = 0, b""

    def drip(sock: socket.socket) -> None:
        nonlocal dripped, answer
        challenge = GREETING.pack(MAGIC, PROTOCOL_VERSION, GreetingKind.CHALLENGE, 72) + bytes(72)
        try:
            answer = challenge if drips_challenge else welcome(take_hello(sock))
        except AssertionError:
            return  # It has given up before it was answered.
        sock.settimeout(0.05)
        # It would take a minute and a half.
        for byte in answer.ljust(2000, b"\0"):
            sock.send(bytes([byte]))
            dripped += 1
            with contextlib.suppress(TimeoutError):
                while sock.recv(1 << 16):
                    pass
                return

    with served(drip) as card, te.Engine() as engine:

        def has_dripped() -> int:
            """Whether the end came while something did: a thread may not have come so far."""
            with pytest.raises(te.ConnectError, match=r"did not answer within 0.5 s"):
                engine.connect(card, timeout_s=0.5)
            return dripped

        wait_until(has_dripped, "something has been dripped")
    assert dripped < len(answer)


# -- the rule


@pytest.mark.pure
@given(
    st.sampled_from([SILENT_S / 1000, SILENT_S / 10, SILENT_S]),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=600),
)
def test_who_stays(pause_s: float, events: list[tuple[int, bool]]) -> None:
    """The bounds hold, and a connection that has just come is never the one that goes."""
    admission = Admission()
    here: list[HalfOpen] = []
    for number, (source, speaks) in enumerate(events):
        now_s = number * pause_s
        one = admission.enter(str(source), now_s, 5.0)
        here.append(one)
        one.has_spoken = speaks
        while (gone := admission.surplus(now_s)) is not None:
            assert gone is not one
            older = [each for each in here if each.source == gone.source]
            silent = [
                each for each in older if not each.has_spoken and now_s >= each.since_s + SILENT_S
            ]
            assert gone is (silent or older)[0]
            here.remove(gone)
            admission.leave(gone)
            admission.leave(gone)
        assert len(admission) == len(here) <= HALF_OPEN_MAX
        for name in {each.source for each in here}:
            assert sum(each.source == name for each in here) <= HALF_OPEN_OF_SOURCE_MAX


@pytest.mark.pure
def test_one_loud_source_costs_no_other_its_place() -> None:
    admission = Admission()
    quiet = [admission.enter(f"host {i}", 0.0, 5.0) for i in range(100)]
    for i in range(10 * HALF_OPEN_MAX):
        admission.enter("loud", float(i), 5.0)
        while (gone := admission.surplus(float(i))) is not None:
            assert gone.source == "loud"
            admission.leave(gone)
    assert len(admission) == len(quiet) + HALF_OPEN_OF_SOURCE_MAX


@pytest.mark.pure
@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_counts_as_one_source(address: str, source: str) -> None:
    assert source_of(address) == source


def test_all_addresses_of_a_network_of_ipv6_are_one_source() -> None:
    with (
        te.Engine(te.Config(host="::1", connect_timeout_s=TIMEOUT_S)) as engine,
        dial(engine.card()),
    ):
        wait_until(lambda: engine._acceptor._admission._of_source == {"::/64": 1}, "it is accepted")


@pytest.mark.pure
def test_who_has_called_counts_as_the_youngest_once_more() -> None:
    admission = Admission()
    first, second = admission.enter("a", 0.0, 5.0), admission.enter("a", 0.0, 5.0)
    first.has_spoken = second.has_spoken = True
    admission.renew(first)
    assert admission.sacrifice(0.1) is second
    assert first.due_s == 5.0
    admission.leave(first)
    admission.renew(first)  # It was closed meanwhile.
    assert len(admission) == 1


@pytest.mark.pure
def test_deadlines_of_the_first_byte_and_of_all() -> None:
    admission = Admission()
    one = admission.enter("a", 10.0, 60.0)
    assert one.due_s == 10.0 + rule.FIRST_BYTE_TIMEOUT_S
    one.has_spoken = True
    assert one.due_s == 70.0
    assert admission.enter("a", 10.0, 0.5).due_s == 10.5
    assert admission.sacrifice(10.0) is not None
    assert Admission().sacrifice(10.0) is None
    assert Admission().surplus(10.0) is None


@pytest.mark.slow
def test_silent_ones_are_told_by_the_first_byte_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far before ``connect_timeout_s``."""
    with monkeypatch.context() as patch:
        patch.setattr(rule, "FIRST_BYTE_TIMEOUT_S", 0.3)
        with te.Engine(te.Config(connect_timeout_s=600.0)) as engine, dial(engine.card()) as sock:
            assert read_greeting(sock) is None
    with te.Engine(te.Config(connect_timeout_s=3.0)) as engine, dial(engine.card()) as sock:
        take_challenge(sock, engine.card())
        assert read_greeting(sock) is None  # What comes behind the call has its deadline, too.
