# SPDX-License-Identifier: Apache-2.0
"""The session key of a link: all of its connections but the first prove it, and no others' do."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from te_direct import NullEngine, RawDirectSource
from te_far import wait_until
from te_host import PAGE, memory_file
from te_raw import (
    TIMEOUT_S,
    RawSource,
    dial,
    dial_unix,
    hello,
    host_hello,
    knows_session,
    raw_destination,
    rdma_hello,
    read_greeting,
    refusal,
    session_of,
    take_hello,
    welcome,
    with_keys,
)
from te_ring import make_rings

import te
from te.connect.greeting import Greeting, GreetingKind, called_keys, encode_greeting
from te.handshake import PROTOCOL_VERSION
from te.proof import NO_KEY, Key, keys_of, session_key
from te.transports.rdma.messages import RailOffer
from te.transports.samehost.messages import Shared
from te_bench._null import Wires

KEY = b"k" * 32
NOTHING = Greeting(PROTOCOL_VERSION, GreetingKind.REFUSE, b"")
WELCOMED = "an earlier connection of this link was welcomed; connect again"


@pytest.fixture(params=[(), (KEY,)], ids=["no keys", "keys"])
def keys(request: pytest.FixtureRequest) -> Iterator[tuple[bytes, ...]]:
    """Of the engines, and of all that is said by hand."""
    with with_keys(*request.param):
        yield request.param


def patient(keys: tuple[bytes, ...]) -> te.Config:
    """Of engines: the test's thread may stand still for seconds."""
    return te.Config(keys=keys, connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)


Later = Callable[..., bytes]
"""The hello of a later connection: by this socket, to the engine of this card."""


def _rail(to: socket.socket, card: bytes, **changes: object) -> bytes:
    return hello(to, card, **changes)  # type: ignore[arg-type]


def _host_rail(to: socket.socket, card: bytes, **changes: object) -> bytes:
    return host_hello(to, card, **changes)  # type: ignore[arg-type]


def _memory(to: socket.socket, card: bytes, **changes: object) -> bytes:
    return host_hello(to, card, shared=Shared(PAGE, PAGE, 1, 1), **changes)  # type: ignore[arg-type]


LATER = [
    pytest.param("tcp", _rail, id="tcp"),
    pytest.param("samehost", _host_rail, id="samehost"),
    pytest.param("samehost", _memory, id="memory"),
]


@contextlib.contextmanager
def greeted(card: bytes, transport: str) -> Iterator[socket.socket]:
    with (dial_unix if transport == "samehost" else dial)(card) as sock:
        yield sock


def answer(
    card: bytes, transport: str, later: Later, link: int, joins: bool = True
) -> Greeting | str | None:
    """What a later connection hears; ``str``: the reason of a refusal."""
    with greeted(card, transport) as sock:
        try:
            data = later(sock, card, link=link, joins=joins)
        except ConnectionRefusedError:
            return NOTHING
        if transport == "samehost":
            fd = memory_file(PAGE) if later is _memory else make_rings()
            socket.send_fds(sock, [data], [fd])
            os.close(fd)
        else:
            sock.sendall(data)
        if not joins:
            return refusal(sock).reason
        return read_greeting(sock)


@pytest.mark.parametrize(("transport", "later"), LATER)
def test_a_later_connection_proves_the_session_of_its_link_and_no_other(
    keys: tuple[bytes, ...], transport: str, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    with te.Engine(patient(keys)) as engine, caplog.at_level(logging.WARNING):
        card = engine.card()
        one, other = RawSource(card, transport, link=1), RawSource(card, transport, link=2)
        with one.sock, other.sock:
            mine, others = session_of(card, 1), session_of(card, 2)
            assert mine.id != others.id
            links = engine._acceptor._links
            wait_until(lambda: len(links) == 2, "both are known")
            assert {link.session.id for link in links if link.session} == {mine.id, others.id}
            # Whoever has the engine's key, and knows the link.
            assert answer(card, transport, later, 1, joins=False) == WELCOMED
            # Another link's session key, of the same source.
            knows_session(card, 1, others._secret)
            assert answer(card, transport, later, 1) == NOTHING
            assert "for another link than the session key that it proves" in caplog.text
            # None that there is; one by the right name.
            knows_session(card, 1, b"x" * 32)
            assert answer(card, transport, later, 1) == NOTHING
            assert "the link that it names has ended, or never existed" in caplog.text
            assert engine.stats().rails == 2
            knows_session(card, 1, mine._secret)
            found = answer(card, transport, later, 1)
            assert isinstance(found, Greeting)
            assert found.kind == GreetingKind.WELCOME


@pytest.mark.parametrize(("transport", "later"), LATER)
def test_a_session_ends_with_its_link(
    keys: tuple[bytes, ...], transport: str, later: Later
) -> None:
    with te.Engine(patient(keys)) as engine:
        card = engine.card()
        source = RawSource(card, transport, link=3)
        wait_until(lambda: len(engine._acceptor._links) == 1, "the link is known")
        source.sock.close()
        wait_until(lambda: not engine._acceptor._links, "the link is forgotten")
        wait_until(lambda: not engine._acceptor._links._by_session, "and its session")
        assert answer(card, transport, later, 3) == NOTHING


def test_queue_pairs_are_offered_with_the_session_key(
    keys: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    wires = Wires()
    with (
        NullEngine(wires, keys=keys, connect_timeout_s=TIMEOUT_S) as engine,
        caplog.at_level(logging.WARNING),
    ):
        card = engine.card()
        one, other = RawDirectSource(card, wires), RawDirectSource(card, wires)
        with contextlib.closing(one), contextlib.closing(other):
            offer = RailOffer(rail=0, epoch=1, nic=0, remote_nic=0, gid=b"", remote_gid_index=0)

            def answered(joins: bool) -> Greeting | str | None:
                with dial(card) as sock:
                    data = rdma_hello(sock, card, offer, link=one.link, joins=joins)
                    sock.sendall(data)
                    return read_greeting(sock) if joins else refusal(sock).reason

            assert answered(joins=False) == WELCOMED
            mine = session_of(card, one.link)
            knows_session(card, one.link, session_of(card, other.link)._secret)
            assert answered(joins=True) == NOTHING
            assert "for another link than the session key that it proves" in caplog.text
            knows_session(card, one.link, mine._secret)
            assert one.rail() is not None


@pytest.mark.parametrize("knows", [True, False])
def test_a_source_proves_the_session_with_its_second_rail(
    keys: tuple[bytes, ...], knows: bool
) -> None:
    with (
        raw_destination() as (listener, card),
        te.Engine(patient(keys)) as source,
        ThreadPoolExecutor(1) as pool,
    ):
        peer = pool.submit(source.connect, card)
        with listener.accept()[0] as first:
            proven = take_hello(first)
            assert proven.key.id == keys_of(keys)[0].id
            first.sendall(welcome(proven, rails=2))
            with listener.accept()[0] as second:
                if knows:
                    again = take_hello(second)
                    assert again.key.id != proven.key.id
                    assert again.hello.link == proven.hello.link
                    second.sendall(welcome(again, rails=2))
                    assert peer.result(TIMEOUT_S).rails == 2
                    return
                call = read_greeting(second)
                assert call is not None
                assert call.kind == GreetingKind.CALL_LINK
                assert len(called_keys(call)) == 1
                second.sendall(encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, b""))
                says = "the link that this connection is for has ended there"
                with pytest.raises(te.ConnectError, match=says):
                    peer.result(TIMEOUT_S)


@pytest.mark.pure
def test_a_session_key_takes_the_key_and_both_proofs() -> None:
    """What anybody on the way hears is not enough."""
    one, other = b"1" * 32, b"2" * 32
    made = {
        session_key(key, hello, answer).id
        for key in (NO_KEY, Key(KEY))
        for hello in (one, other)
        for answer in (one, other)
    }
    assert len(made) == 8
