# SPDX-License-Identifier: Apache-2.0
"""Greetings that are deep, reset, strange or carry descriptors: each costs its own connection and
nothing else."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from te_far import wait_until
from te_raw import (
    BLIND,
    RAW_ID,
    TIMEOUT_S,
    RawSource,
    descriptors,
    dial,
    dial_unix,
    hello,
    host_hello,
    read_greeting,
    refusal,
    with_keys,
)
from te_ring import make_rings

import te
from te import nesting
from te.connect.greeting import CLAIM, GREETING, HELLO_BODY_MAX, NONCE_BYTES, encode_call
from te.connect.loop import READABLE, IoLoop
from te.connect.throttle import BURST, PAUSE_S, SILENCE_S, Throttle
from te.handshake import BODY_BYTES_MAX, PROTOCOL_VERSION, Refuse, decode_body, decode_card
from te.proof import NO_KEY, PROOF_BYTES, Key

RESET = struct.pack("ii", 1, 0)


KEY = b"k" * 32


@pytest.fixture(scope="module")
def target() -> Iterator[te.Engine]:
    with te.Engine(te.Config(connect_timeout_s=TIMEOUT_S)) as engine:
        yield engine


@pytest.fixture(scope="module", params=[(), (KEY,)], ids=["no keys", "keys"])
def fuzzed(request: pytest.FixtureRequest) -> Iterator[te.Engine]:
    with te.Engine(te.Config(connect_timeout_s=TIMEOUT_S, keys=request.param)) as engine:
        yield engine


def assert_accepts(engine: te.Engine) -> None:
    """A new engine finds in, by each transport."""
    for transport in ("tcp", "samehost"):
        config = te.Config(
            transports=(transport,), keys=engine._config.keys, connect_timeout_s=TIMEOUT_S
        )
        with te.Engine(config) as friend:
            assert friend.connect(engine.card()).alive


def in_loop(engine: te.Engine) -> contextlib.AbstractContextManager[None]:
    """Keeps the engine's accepting thread busy for the length of the block."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_S)

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        engine._acceptor.loop.call(wait)
        assert begun.wait(TIMEOUT_S)
        try:
            yield
        finally:
            go_on.set()

    return block()


# -- B1: nothing that a stranger says ends the accepting thread

DEEP = [
    b"\x91" * BODY_BYTES_MAX,
    b"\x81\xa1x" + b"\x91" * (BODY_BYTES_MAX - 3),
    b"\x81\xa1x" * (BODY_BYTES_MAX // 3),
    b"\x81" * BODY_BYTES_MAX,
    b"\xdc\x00\x02\xc0" * (BODY_BYTES_MAX // 4),
]


@pytest.mark.usefixtures("every_line")
@pytest.mark.parametrize("body", DEEP)
def test_a_deep_greeting_costs_its_own_connection_alone(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    # Of its own: an engine says little of strangers who have been there before.
    with te.Engine(te.Config(connect_timeout_s=TIMEOUT_S)) as target:
        with caplog.at_level(logging.WARNING), dial_unix(target.card()) as sock:
            sock.sendall(hello(sock, target.card(), "samehost", body=body))
            assert read_greeting(sock) is None
        assert "not a te HostHello message: values nested more than" in caplog.text
        assert_accepts(target)


@pytest.mark.parametrize("body", DEEP)
def test_a_deep_card_is_refused(body: bytes) -> None:
    with pytest.raises(te.HandshakeError, match="nested more than"):
        decode_card(body)


@pytest.mark.pure
def test_a_card_of_too_many_values_is_refused() -> None:
    many = msgspec.msgpack.encode({"regions": [0] * nesting.ITEMS_MAX})
    with pytest.raises(te.HandshakeError, match="more than 131072 values"):
        decode_card(many)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth(one) for one in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth(one) for one in value), default=0)
    return 0


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=60,
)


@pytest.mark.slow
@pytest.mark.pure
@given(VALUES, st.integers(0, 30))
def test_depth_is_what_it_is(value: object, levels: int) -> None:
    for _ in range(levels):
        value = [value]
    says = nesting.complaint(msgspec.msgpack.encode(value))
    # What is inside an empty array or map is not a level.
    assert (says is None) == (depth(value) - _has_empty_leaf(value) <= nesting.DEPTH_MAX)


def _has_empty_leaf(value: object) -> int:
    """1 if all of the deepest containers are empty."""
    deepest = depth(value)

    def reaches(one: object, level: int) -> bool:
        """Whether a container with something in it lies at that level."""
        inside = list(one.values()) if isinstance(one, dict) else one
        if not isinstance(inside, list):
            return False
        if level == 1:
            return bool(inside)
        return any(reaches(each, level - 1) for each in inside)

    return int(deepest > 0 and not reaches(value, deepest))


@pytest.mark.pure
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_handshake_error(data: bytes) -> None:
    for body in (data, b"\x91" * 1000 + data, data * 20):
        with contextlib.suppress(te.HandshakeError):
            decode_body(body, Refuse)


@st.composite
def greetings(draw: st.DrawFn) -> bytes:
    """Mostly a good header and version; a body of any MessagePack, or of any bytes."""
    kind = draw(st.sampled_from([1, 5, 5, 5, 5, 6, 2, 3, 4, 9]))
    version = draw(st.sampled_from([PROTOCOL_VERSION] * 6 + [0, 65535]))
    body = draw(
        st.one_of(
            VALUES.map(msgspec.msgpack.encode),
            st.binary(max_size=300),
            st.binary(min_size=CLAIM.size + PROOF_BYTES, max_size=300),
            st.integers(0, 5).flatmap(
                lambda n: st.binary(min_size=32 + 8 * n, max_size=32 + 8 * n)
            ),
            st.sampled_from([NO_KEY, Key(KEY)]).map(
                lambda key: encode_call(bytes(NONCE_BYTES), (key,))
            ),
            st.sampled_from(DEEP),
        )
    )[:HELLO_BODY_MAX]
    claimed = draw(st.sampled_from([len(body)] * 6 + [0, HELLO_BODY_MAX, 1 << 31]))
    return GREETING.pack(b"te-wire\0", version, kind, claimed) + body


HOST_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "nonce": st.tuples(st.sampled_from([0, 1, 2**64 - 1]), st.binary(min_size=1, max_size=64)),
        "shared": st.tuples(
            st.sampled_from([0, 1, 2**64 - 1]),
            st.sampled_from([1, 2**40, 2**64 - 1]),
            st.just(1),
            st.just(1),
        ),
        "rail": st.none(),
    },
)
BODIES = HOST_BODIES.map(msgspec.msgpack.encode)

HELLO_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "peer_epoch": st.sampled_from([1, 2**64 - 1]),
        "link": st.sampled_from([5, 6, 2**64 - 1]),
        "transport": st.sampled_from(["tcp", "samehost", "rdma", "smoke"]),
        "body": st.binary(max_size=100) | st.sampled_from(DEEP) | BODIES,
    },
)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(greetings(), HELLO_CHANGES, st.booleans(), st.integers(0, 4), st.booleans(), st.booleans())
def test_greetings_of_any_kind(
    fuzzed: te.Engine,
    strange: bytes,
    changes: dict[str, object],
    is_hello: bool,
    fds_n: int,
    over_unix: bool,
    resets: bool,
) -> None:
    card = fuzzed.card()
    sock = dial_unix(card) if over_unix else dial(card)
    # It may have closed the connection at any of these.
    keys = with_keys(*fuzzed._config.keys)
    with sock, keys, contextlib.suppress(OSError):
        data = hello(sock, card, **changes) if is_hello else strange  # type: ignore[arg-type]
        if over_unix:
            fd = make_rings()
            try:
                socket.send_fds(sock, [data], [fd] * fds_n)
            finally:
                os.close(fd)
        else:
            sock.sendall(data)
        if resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        else:
            sock.shutdown(socket.SHUT_WR)
            read_greeting(sock)


def test_after_all_these_greetings(fuzzed: te.Engine) -> None:
    wait_until(lambda: not fuzzed._acceptor._greeting, "no greeting is left")
    assert_accepts(fuzzed)


def test_a_reset_at_the_limit_of_connections(caplog: pytest.LogCaptureFixture) -> None:
    with te.Engine(te.Config(max_connections=1)) as engine, caplog.at_level(logging.WARNING):
        card = engine.card()
        first = RawSource(card)
        with in_loop(engine):
            for _ in range(50):
                with dial(card) as sock:
                    sock.sendall(hello(BLIND, card))
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        with dial(card) as sock:
            sock.sendall(hello(sock, card))
            assert refusal(sock).reason == "1 connections are open already"
        first.sock.close()
        wait_until(lambda: engine.stats().rails == 0, "the first is gone")
        with te.Engine(te.Config(transports=("tcp",), rails=1)) as friend:
            assert friend.connect(card).alive


@pytest.mark.usefixtures("every_line")
def test_a_bug_in_one_greeting_is_logged_and_costs_that_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("made up")

    with te.Engine() as engine, caplog.at_level(logging.ERROR):
        with monkeypatch.context() as patch:
            patch.setattr("te.connect.accept.Acceptor.limit", bug)
            with dial(engine.card()) as sock:
                sock.sendall(hello(sock, engine.card()))
                assert read_greeting(sock) is None
        assert "a bug in greeting" in caplog.text
        assert "RuntimeError: made up" in caplog.text
        assert_accepts(engine)


def test_a_loop_goes_on_after_bugs_of_any_kind(caplog: pytest.LogCaptureFixture) -> None:
    ticks: list[float] = []

    def on_tick(now_s: float) -> float | None:
        ticks.append(now_s)
        if len(ticks) == 1:
            raise RuntimeError("tick")
        return None

    def bug(_: int = 0) -> None:
        raise RuntimeError("made up")

    served = threading.Event()
    with caplog.at_level(logging.ERROR):
        loop = IoLoop("test-loop", on_tick, lambda reason: None)
        here, there = socket.socketpair()
        good, better = socket.socketpair()
        with here, there, good, better:
            loop.start()
            there.send(b"x")
            better.send(b"x")
            loop.call(lambda: loop.watch(here.fileno(), READABLE, bug))
            loop.call(bug)
            loop.call(lambda: loop.watch(good.fileno(), READABLE, lambda _: served.set()))
            assert served.wait(TIMEOUT_S)
            wait_until(lambda: caplog.text.count("goes on after a bug") >= 3, "all were logged")
            assert loop.stop(TIMEOUT_S)
    for what in ("a deadline", "a call from another thread", "the handler of descriptor"):
        assert f"goes on after a bug in {what}" in caplog.text


class FullOnce:
    """An epoll that once has no room for a descriptor."""

    def __init__(self, real: Any) -> None:
        self._real, self._errors = real, iter([OSError(errno.ENOSPC, "No space left on device")])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def register(self, fd: int, events: int) -> None:
        for error in self._errors:
            raise error
        self._real.register(fd, events)


def test_a_loop_goes_on_where_the_kernel_watches_no_more_descriptors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te.connect.loop.FAILED_PAUSE_S", 0.01)
    served = threading.Event()
    loop = IoLoop("test-loop", lambda _: None, lambda reason: None)
    here, there = socket.socketpair()

    def begin() -> None:
        loop.watch(here.fileno(), READABLE, lambda _: served.set())
        loop.pause(here.fileno(), 0.0)
        loop._epoll = FullOnce(loop._epoll)

    with here, there:
        loop.start()
        there.send(b"x")
        loop.call(begin)
        assert served.wait(TIMEOUT_S)
        assert loop.stop(TIMEOUT_S)
    assert "a bug in watching descriptor" in caplog.text


def test_the_ends_of_all_links_are_told_whatever_becomes_of_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(_number: int) -> None:
        raise RuntimeError("made up")

    with te.Engine() as target:
        monkeypatch.setattr(target._acceptor.transports, "on_event", bug)
        with te.Engine() as one, te.Engine() as other:
            for engine in (one, other):
                engine.connect(target.card())
            wait_until(lambda: len(target._acceptor._links) == 2, "both are connected")
        wait_until(lambda: not target._acceptor._links, "both have ended")
    assert "a bug in an event of a link" in caplog.text


@pytest.mark.pure
def test_lines_about_strangers_are_limited() -> None:
    throttle = Throttle()
    assert [throttle.admits(0.0) for _ in range(BURST + 5)] == [True] * BURST + [False] * 5
    assert not throttle.admits(PAUSE_S / 2)
    assert throttle.admits(PAUSE_S)
    assert not throttle.admits(PAUSE_S)
    assert throttle.more() == " (7 more were not logged)"
    assert throttle.more() == ""


@pytest.mark.pure
def test_who_attacks_for_five_minutes_gets_eight_lines() -> None:
    throttle = Throttle()
    written = [now_s for now_s in range(300) for _ in range(10) if throttle.admits(now_s)]
    assert written == [0] * BURST + [5, 15, 35, 75, 155]
    # It is anew after a silence alone.
    assert not throttle.admits(300)
    assert [throttle.admits(300 + SILENCE_S) for _ in range(BURST + 1)] == [True] * BURST + [False]


# -- B5: descriptors


@pytest.mark.slow
def test_a_greeting_brings_one_descriptor_at_most(caplog: pytest.LogCaptureFixture) -> None:
    with te.Engine() as engine, caplog.at_level(logging.WARNING):
        card = engine.card()
        before = descriptors()
        with dial_unix(card) as sock:
            fd = make_rings()
            with contextlib.suppress(ConnectionError):
                for byte in host_hello(sock, card):
                    socket.send_fds(sock, [bytes([byte])], [fd])
            os.close(fd)
            assert read_greeting(sock) is None
            assert "a hello with more than one descriptor" in caplog.text
        # The connection ends first.
        wait_until(lambda: descriptors() <= before, "all that came were closed")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_a_connection_of_another_transport_joins_no_link(target: te.Engine, transport: str) -> None:
    card = target.card()
    before = descriptors()
    source = RawSource(card, transport, link=4711)
    with source.sock:
        other = dial_unix(card) if transport == "tcp" else dial(card)
        with other:
            if transport == "tcp":
                fd = make_rings()
                socket.send_fds(other, [host_hello(other, card, link=4711)], [fd])
                os.close(fd)
            else:
                other.sendall(hello(other, card, link=4711))
            assert refusal(other).reason == "the link that it names is over another transport"
        wait_until(lambda: target.stats().rails == 1, "the first link stands")
    wait_until(lambda: target.stats().rails == 0, "the link has ended")
    wait_until(lambda: descriptors() <= before, "nothing was kept")


def test_rings_that_cannot_be_used_are_given_back(target: te.Engine) -> None:
    card = target.card()
    before = descriptors()
    for _ in range(5):
        with dial_unix(card) as sock:
            fd = make_rings(4096)
            socket.send_fds(sock, [host_hello(sock, card)], [fd])
            os.close(fd)
            read_greeting(sock)
            with contextlib.suppress(ConnectionError):
                sock.recv(1)
    wait_until(lambda: descriptors() <= before, "nothing was kept")
    assert not any(one.key.engine_id == RAW_ID for one in target._acceptor._links)


def test_the_memory_of_an_engine_that_was_greeted_badly_is_as_it_was() -> None:
    memory = np.zeros(100, np.uint8)
    with te.Engine() as engine, te.Engine() as friend:
        here, there = (
            friend.register(np.ones(100, np.uint8)),
            engine.register(memory, remote="read-write"),
        )
        peer = friend.connect(engine.card())
        for body in DEEP:
            with dial(engine.card()) as sock:
                sock.sendall(hello(sock, engine.card(), "rdma", body=body))
                assert "RDMA" in refusal(sock).reason
        assert not memory.any()
        blocks = te.Blocks.of(here.address, there.address, 100)
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
