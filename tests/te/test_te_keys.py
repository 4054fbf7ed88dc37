# SPDX-License-Identifier: Apache-2.0
"""Engines with keys: who has none in common is refused, and told nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from te_far import wait_until
from te_raw import (
    RAW_ID,
    TIMEOUT_S,
    RawSource,
    dial,
    hello,
    raw_destination,
    read_greeting,
    take_challenge,
    take_hello,
    welcome,
    with_keys,
)
from te_transports import TRANSPORTS

import te
from te import nesting
from te.connect.greeting import (
    CLAIM,
    GREETING,
    MAGIC,
    NONCE_BYTES,
    Greeting,
    GreetingKind,
    Hello,
    Turn,
    called_keys,
    encode_call,
    encode_greeting,
    seal_answer,
    seal_hello,
)
from te.connect.throttle import BURST
from te.handshake import PROTOCOL_VERSION, Welcome, decode_card, encode
from te.proof import KEY_ID_BYTES, NO_KEY, PROOF_BYTES, Key, keys_of

OLD, NEW, THIRD = b"o" * 32, b"n" * 32, b"t" * 32
NOTHING = Greeting(PROTOCOL_VERSION, GreetingKind.REFUSE, b"")
#: All that there are of two keys: before, while and after one replaces the other.
LISTS = [(), (OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]


def engine(*keys: bytes, transports: tuple[str, ...] = ("tcp",)) -> te.Engine:
    return te.Engine(
        te.Config(
            transports=transports, keys=keys, connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S
        )
    )


# -- the setting


@pytest.mark.pure
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((OLD, OLD), "keys has 2: give at most 4, each once"),
        (tuple(bytes([i]) * 32 for i in range(5)), "keys has 5: give at most 4, each once"),
        ((OLD, NEW[:31]), r"keys\[1\] is of 31 bytes, and must be of 32 bytes"),
        ((b"",), r"keys\[0\] is of 0 bytes"),
        ((OLD, bytes(32)), r"keys\[1\] is all zeros: give random bytes"),
        ((OLD.decode(),), r"keys\[0\] is of str"),
    ],
)
def test_keys_that_are_none(keys: tuple[bytes, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        te.Config(keys=keys)
    assert "ooo" not in str(caught.value)
    assert "nnn" not in str(caught.value)


@pytest.mark.pure
def test_keys_are_shown_nowhere() -> None:
    config = te.Config(keys=(OLD,))
    assert "ooo" not in repr(config) + repr(keys_of(config.keys))
    assert OLD.hex() not in repr(config) + repr(keys_of(config.keys))
    with te.Engine(config) as one:
        assert b"ooo" not in one.card()
        assert "ooo" not in repr(one) + repr(one._local)


@pytest.mark.pure
def test_identifiers_of_keys() -> None:
    keys = [NO_KEY, *keys_of((OLD, NEW, OLD[:31] + b"x"))]
    assert len({one.id for one in keys}) == len(keys)
    assert {len(one.id) for one in keys} == {KEY_ID_BYTES}
    assert keys_of(()) == (NO_KEY,)


# -- who connects


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "samehost"])
@pytest.mark.parametrize("here", LISTS, ids=str)
@pytest.mark.parametrize("there", LISTS, ids=str)
def test_engines_connect_that_have_a_key_in_common(
    here: tuple[bytes, ...],
    there: tuple[bytes, ...],
    transport: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        engine(*here, transports=(transport,)) as source,
        engine(*there, transports=(transport,)) as target,
    ):
        if set(here) & set(there) or (not here and not there):
            assert source.connect(target.card()).alive
            assert not caplog.records
            return
        with pytest.raises(te.KeyMismatch) as caught:
            source.connect(target.card())
        assert "refused this engine and closed the connection" in str(caught.value)
        assert "give both the same secret (keys in te.Config)" in str(caught.value)
        if not here:
            why = "it has no key, and this engine has some"
            assert "it has keys, and this engine has none" in str(caught.value)
        else:
            why = "none of its keys is one of" if there else "it has keys, and this engine has none"
            assert f"none of the {len(here)} keys of this engine, or no key" in str(caught.value)
        assert f"wrong key: {why}" in caplog.text
        assert "give both the same secret" in caplog.text
        assert source.id not in caplog.text  # It has not said who it is.
        assert not target._acceptor._links


@pytest.mark.pure
@pytest.mark.parametrize("there", LISTS[1:], ids=str)
def test_the_first_key_of_the_source_that_the_destination_has(there: tuple[bytes, ...]) -> None:
    for here in itertools.permutations((OLD, NEW, THIRD)):
        with engine(*there) as target, dial(target.card()) as sock:
            turn = take_challenge(sock, target.card(), keys=keys_of(here))
            assert turn.key.id == Key(next(one for one in here if one in there)).id


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transfers_between_engines_with_keys(transport: str) -> None:
    """With further rails, and memory to be mapped, after the other has taken the new key first."""
    with (
        engine(OLD, NEW, transports=(transport,)) as source,
        engine(NEW, transports=(transport,)) as target,
        engine(OLD, transports=(transport,)) as stranger,
    ):
        here = te.allocate(1 << 20)
        src, dst = np.frombuffer(here, np.uint8), np.zeros(1 << 20, np.uint8)
        src[:] = 7
        near, far = source.register(here), target.register(dst, remote="read-write")
        peer = source.connect(target.card())
        assert peer.rails > 1 or transport == "rdma"
        blocks = te.Blocks.of(near.address, far.address, 1 << 20)
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 7).all()
        with pytest.raises(te.ConnectError, match="give both the same secret"):
            stranger.connect(target.card())
        (link,) = target._acceptor._links
        assert link.session is not None
        if transport == "samehost":
            (shares,) = source._transports.get("samehost")._sharing._links  # type: ignore[union-attr]
            assert shares.has(near.serial)


# -- strangers


@pytest.fixture
def target() -> Iterator[te.Engine]:
    with engine(OLD, transports=("samehost", "tcp")) as one:
        yield one


def said_to(card: bytes, data: bytes) -> bytes:
    """All that an engine says to that, until it closes the connection."""
    heard = b""
    with dial(card) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data)
        while more := sock.recv(1 << 16):
            heard += more
    return heard


def call(*keys: Key, kind: GreetingKind = GreetingKind.CALL) -> bytes:
    return encode_greeting(kind, PROTOCOL_VERSION, encode_call(os.urandom(NONCE_BYTES), keys))


def test_a_wrong_key_and_none_hear_the_same_and_nothing(target: te.Engine) -> None:
    card, empty = target.card(), GREETING.pack(MAGIC, PROTOCOL_VERSION, GreetingKind.REFUSE, 0)
    for data in (
        call(NO_KEY),
        call(Key(NEW)),
        call(*keys_of((NEW, THIRD))),
        call(Key(OLD), kind=GreetingKind.CALL_LINK),
    ):
        assert said_to(card, data) == empty


@pytest.mark.parametrize(
    "wrong", [OLD[:31], OLD[1:], OLD + b"x", OLD[:31] + b"p", OLD[:16] + NEW[16:], NEW, b""]
)
def test_who_knows_the_name_of_a_key_and_not_the_key(
    target: te.Engine,
    wrong: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As anybody does who has seen a call. Nothing of what he says is decoded."""
    card, decoded = target.card(), []
    complaint = nesting.complaint
    with caplog.at_level(logging.WARNING), dial(card) as sock:
        turn = take_challenge(sock, card, keys=keys_of((OLD,)))
        data = hello(Turn(Key(wrong), turn.proof), card, "samehost", body=b"\x91" * 100)
        monkeypatch.setattr(nesting, "complaint", lambda one: decoded.append(one) or complaint(one))
        sock.sendall(data)
        assert read_greeting(sock) == NOTHING
        assert sock.recv(1) == b""
    assert not decoded
    assert "its hello does not answer the challenge" in caplog.text
    assert RAW_ID not in caplog.text


def test_lines_about_wrong_keys_are_limited(
    target: te.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te.connect.throttle.PAUSE_S", 1e3)  # However long all of them take.
    with caplog.at_level(logging.WARNING):
        for _ in range(4 * BURST):
            assert said_to(target.card(), call(Key(NEW)))
    assert BURST <= caplog.text.count("wrong key") < 2 * BURST


def test_a_recorded_greeting_counts_on_no_other_connection(target: te.Engine) -> None:
    card = target.card()
    with with_keys(OLD), dial(card) as sock:
        recorded = hello(sock, card)
        sock.sendall(recorded)
        greeting = read_greeting(sock)
        assert greeting is not None
        assert greeting.kind == GreetingKind.WELCOME
        with dial(card) as other:
            take_challenge(other, card)
            other.sendall(recorded)
            assert read_greeting(other) == NOTHING


def test_the_proof_of_the_destination_is_none_of_a_source(target: te.Engine) -> None:
    """A stranger hands back what the challenge proves."""
    card = target.card()
    with dial(card) as sock:
        turn = take_challenge(sock, card, keys=keys_of((OLD,)))
        claim = seal_hello(_hello_to(card), turn)[0][: CLAIM.size]
        body = claim + turn.proof
        sock.sendall(encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, body))
        assert read_greeting(sock) == NOTHING


def _hello_to(card: bytes) -> Hello:
    to = decode_card(card)
    return Hello(
        id=RAW_ID, epoch=1, peer_id=to.id, peer_epoch=to.epoch, link=1 << 50, transport="tcp"
    )


# -- destinations that are none


@contextlib.contextmanager
def connecting(source: te.Engine) -> Iterator[tuple[Future[te.Peer], socket.socket]]:
    """The engine dials one by hand."""
    with (
        raw_destination() as (listener, card),
        ThreadPoolExecutor(1) as pool,
    ):
        peer = pool.submit(source.connect, card)
        with listener.accept()[0] as sock:
            yield peer, sock


def test_a_source_shows_a_false_destination_the_names_of_its_keys_alone() -> None:
    """Not whom it looks for, nor who it is."""
    with engine(OLD, NEW) as source, connecting(source) as (peer, sock):
        greeting = read_greeting(sock)
        assert greeting is not None
        assert called_keys(greeting) == [Key(OLD).id, Key(NEW).id]
        assert len(greeting.body) == NONCE_BYTES + 2 * KEY_ID_BYTES
        body = Key(NEW).id + bytes(64)
        sock.sendall(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, body))
        with pytest.raises(te.ConnectError, match="does not prove to be the engine abab"):
            peer.result(TIMEOUT_S)
        assert sock.recv(1) == b""


def test_a_source_is_not_told_its_own_challenge() -> None:
    """Who is dialled calls the source itself, to have it prove what it asks for."""
    with engine(OLD) as source, connecting(source) as (peer, sock):
        greeting = read_greeting(sock)
        assert greeting is not None
        with dial(source.card()) as back:
            back.sendall(encode_greeting(GreetingKind.CALL, PROTOCOL_VERSION, greeting.body))
            reflected = read_greeting(back)
            assert reflected is not None
        sock.sendall(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, reflected.body))
        with pytest.raises(te.ConnectError, match="does not prove to be the engine abab"):
            peer.result(TIMEOUT_S)


def test_a_recorded_challenge_answers_no_other_call() -> None:
    with engine(OLD) as source, with_keys(OLD):
        with connecting(source) as (peer, sock):
            recorded: list[bytes] = []
            sent = sock.sendall

            class Recorder:
                """Keeps what is sent."""

                recv_into = staticmethod(sock.recv_into)

                @staticmethod
                def sendall(data: bytes) -> None:
                    recorded.append(data)
                    sent(data)

            sock.sendall(welcome(take_hello(Recorder)))  # type: ignore[arg-type]
            first = peer.result(TIMEOUT_S)
        wait_until(lambda: not first.alive, "it will be dialled again")
        with connecting(source) as (again, sock):
            read_greeting(sock)
            sock.sendall(recorded[0])
            with pytest.raises(te.ConnectError, match="does not prove to be"):
                again.result(TIMEOUT_S)


@pytest.mark.parametrize("how", ["hello", "other key", "challenge"])
def test_a_proof_of_another_role_or_key_is_no_welcome(how: str) -> None:
    with engine(OLD, NEW) as source, with_keys(OLD, NEW), connecting(source) as (peer, sock):
        proven = take_hello(sock)
        said = encode(Welcome(rails=1))
        other = dataclasses.replace(proven, key=Key(NEW))
        proof = {
            "hello": proven.proof,
            "other key": seal_answer(GreetingKind.WELCOME, said, other)[1],
            "challenge": bytes(PROOF_BYTES),
        }[how]
        sock.sendall(encode_greeting(GreetingKind.WELCOME, PROTOCOL_VERSION, proof + said))
        with pytest.raises(te.HandshakeError, match="without a proof that it has read the hello"):
            peer.result(TIMEOUT_S)


def test_a_source_by_hand_with_the_key_is_welcome(target: te.Engine) -> None:
    with with_keys(OLD):
        source = RawSource(target.card())
        source.sock.close()
