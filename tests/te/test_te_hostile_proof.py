# SPDX-License-Identifier: Apache-2.0
"""Greetings that prove nothing: recorded ones, changed ones, halves, those of the wrong size."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_far import wait_until
from te_raw import (
    CHALLENGE,
    RAW_ID,
    TIMEOUT_S,
    RawSource,
    dial,
    dial_unix,
    hello,
    host_hello,
    raw_destination,
    rdma_hello,
    read_greeting,
    refusal,
    take_challenge,
    take_hello,
    welcome,
)
from te_ring import make_rings

import te
from te.connect.greeting import (
    CLAIM,
    GREETING,
    HELLO_BODY_MAX,
    MAGIC,
    NONCE_BYTES,
    Greeting,
    GreetingKind,
    Hello,
    encode_greeting,
    open_answer,
    open_hello,
    seal_answer,
    seal_hello,
)
from te.handshake import PROTOCOL_VERSION, decode_card
from te.proof import CHALLENGE_BYTES, PROOF_BYTES, answer_proof, hello_proof, null_key

NOTHING = Greeting(PROTOCOL_VERSION, GreetingKind.REFUSE, b"")
"""All that a stranger is told."""


@pytest.fixture(scope="module")
def target() -> Iterator[te.Engine]:
    with te.Engine(te.Config(connect_timeout_s=1.0)) as engine:
        yield engine


def answered(card: bytes, data: bytes) -> Greeting | None:
    """What an engine says to these bytes, whatever its challenge was."""
    with dial(card) as sock:
        take_challenge(sock)
        sock.sendall(data)
        return read_greeting(sock)


# -- the codes

HELLO = Hello(id="ab" * 16, epoch=1, peer_id="cd" * 16, peer_epoch=2, link=3, transport="tcp")
HELLOS = st.builds(
    Hello,
    id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    epoch=st.integers(0, 2**64 - 1),
    peer_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    peer_epoch=st.integers(0, 2**64 - 1),
    link=st.integers(0, 2**64 - 1),
    transport=st.text("abcdefgh-_09", min_size=1, max_size=16),
    body=st.binary(max_size=100),
)
CHALLENGES = st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES)
NONCES = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)


@pytest.mark.pure
@given(HELLOS, CHALLENGES, NONCES)
def test_a_hello_is_read_as_it_was_written(said: Hello, challenge: bytes, nonce: bytes) -> None:
    body, proof = seal_hello(said, challenge, nonce, null_key)
    proven = open_hello(body, challenge, null_key)
    assert proven is not None
    assert (proven.hello, proven.proof) == (said, proof)


@pytest.mark.pure
@given(HELLOS, CHALLENGES, NONCES, st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_of_a_hello_can_be_changed(
    said: Hello, challenge: bytes, nonce: bytes, at: int, by: int
) -> None:
    body = bytearray(seal_hello(said, challenge, nonce, null_key)[0])
    body[at % len(body)] ^= by
    assert open_hello(bytes(body), challenge, null_key) is None
    assert open_hello(bytes(body) + b"x", challenge, null_key) is None


@pytest.mark.pure
@given(HELLOS, CHALLENGES, CHALLENGES)
def test_a_hello_answers_one_challenge(said: Hello, challenge: bytes, other: bytes) -> None:
    body, _ = seal_hello(said, challenge, bytes(NONCE_BYTES), null_key)
    assert (open_hello(body, other, null_key) is None) == (other != challenge)


@pytest.mark.pure
@given(st.binary(max_size=HELLO_BODY_MAX))
def test_any_bytes_are_no_hello(data: bytes) -> None:
    with contextlib.suppress(te.ProtocolViolation):
        assert open_hello(data, CHALLENGE, null_key) is None


@pytest.mark.pure
def test_a_name_that_is_no_text_is_a_violation() -> None:
    claim = bytearray(seal_hello(HELLO, CHALLENGE, bytes(NONCE_BYTES), null_key)[0][: CLAIM.size])
    claim[-1] = 0xFF
    body = bytes(claim) + hello_proof(null_key, CHALLENGE, bytes(claim), b"")
    with pytest.raises(te.ProtocolViolation, match="is no text"):
        open_hello(body, CHALLENGE, null_key)


@pytest.mark.pure
def test_an_answer_is_to_one_hello_and_of_one_kind() -> None:
    one, other = os.urandom(PROOF_BYTES), os.urandom(PROOF_BYTES)
    body = seal_answer(GreetingKind.WELCOME, b"said", one, null_key)
    answer = Greeting(PROTOCOL_VERSION, GreetingKind.WELCOME, body)
    assert open_answer(answer, one, null_key) == b"said"
    assert open_answer(answer, other, null_key) is None
    refuse = dataclasses.replace(answer, kind=GreetingKind.REFUSE)
    assert open_answer(refuse, one, null_key) is None
    assert open_answer(dataclasses.replace(answer, body=body + b"x"), one, null_key) is None
    assert open_answer(dataclasses.replace(answer, body=b""), one, null_key) is None


@pytest.mark.pure
def test_a_key_is_all_that_a_proof_takes() -> None:
    """The format is the same with any."""

    def other_key(said: bytes) -> bytes:
        return null_key(b"secret" + said)

    body, proof = seal_hello(HELLO, CHALLENGE, bytes(NONCE_BYTES), other_key)
    assert open_hello(body, CHALLENGE, null_key) is None
    assert open_hello(body, CHALLENGE, other_key) is not None
    assert len(body) == len(seal_hello(HELLO, CHALLENGE, bytes(NONCE_BYTES), null_key)[0])
    assert answer_proof(other_key, proof, 2, b"") != answer_proof(null_key, proof, 2, b"")
    # RFC 4231 has no case with an empty key; this is one that is often published.
    expected = "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad"
    assert null_key(b"").hex() == expected


# -- engines that are dialled


def test_a_recorded_greeting_counts_on_no_other_connection(target: te.Engine) -> None:
    card = target.card()
    with dial(card) as sock:
        recorded = hello(sock, card)
        sock.sendall(recorded)
        greeting = read_greeting(sock)
        assert greeting is not None
        assert greeting.kind == GreetingKind.WELCOME
    for _ in range(3):
        assert answered(card, recorded) == NOTHING
    wait_until(lambda: target.stats().rails == 0, "the link has ended")


@pytest.mark.parametrize(
    "changes", [{"link": 7}, {"id": "ef" * 16}, {"epoch": 9}, {"transport": "rdma"}, {"body": b"x"}]
)
def test_a_proof_is_of_what_it_was_made_for(
    target: te.Engine, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """The hello says something else than what was proven, to the right challenge."""
    card = target.card()
    decoded = decode_card(card)
    said = dataclasses.replace(HELLO, peer_id=decoded.id, peer_epoch=decoded.epoch)
    with caplog.at_level(logging.WARNING), dial(card) as sock:
        challenge, nonce = take_challenge(sock), bytes(NONCE_BYTES)
        _, proof = seal_hello(said, challenge, nonce, null_key)
        other = dataclasses.replace(said, **changes)  # type: ignore[arg-type]
        body, _ = seal_hello(other, challenge, nonce, null_key)
        body = body[: CLAIM.size] + proof + body[CLAIM.size + PROOF_BYTES :]
        sock.sendall(encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, body))
        assert read_greeting(sock) == NOTHING
    assert "its hello does not answer the challenge" in caplog.text


def test_later_rails_and_memory_and_queue_pairs_prove_the_same_way(target: te.Engine) -> None:
    """A stranger who knows all of a link but no challenge joins it in no way."""
    card, blind = target.card(), os.urandom(CHALLENGE_BYTES)
    source = RawSource(card, "samehost", link=11)
    with source.sock:
        fd = make_rings()
        for data in (host_hello(blind, card, link=11), rdma_hello(blind, card, link=11)):
            with dial_unix(card) as sock:
                take_challenge(sock)
                socket.send_fds(sock, [data], [fd])
                assert read_greeting(sock) == NOTHING
        os.close(fd)
        assert target.stats().rails == 1
    assert answered(card, rdma_hello(blind, card, link=11)) == NOTHING
    assert answered(card, hello(blind, card, link=11)) == NOTHING


def test_a_challenge_of_one_engine_is_not_answered_for_another(target: te.Engine) -> None:
    """Who is dialled hands the challenge of another engine on, to be taken for the dialler."""
    with raw_destination() as (listener, card), te.Engine() as source, dial(target.card()) as far:
        challenge = take_challenge(far)
        with contextlib.ExitStack() as undo:
            peer = undo.enter_context(_connecting(source, card))
            sock, _ = listener.accept()
            undo.enter_context(sock)
            sock.sendall(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, challenge))
            greeting = read_greeting(sock)
            assert greeting is not None
            far.sendall(encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, greeting.body))
            assert read_greeting(far) == NOTHING
            sock.sendall(encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, b""))
            with pytest.raises(te.ConnectError, match="without a word"):
                peer.result(TIMEOUT_S)


@contextlib.contextmanager
def _connecting(source: te.Engine, card: bytes) -> Iterator[Future[te.Peer]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(source.connect, card)


def test_a_welcome_of_one_connection_is_none_of_another() -> None:
    with raw_destination() as (listener, card), te.Engine(te.Config(rails=2)) as source:
        with contextlib.ExitStack() as undo:
            peer = undo.enter_context(_connecting(source, card))
            first = undo.enter_context(listener.accept()[0])
            recorded = welcome(take_hello(first), rails=2)
            first.sendall(recorded)
            second = undo.enter_context(listener.accept()[0])
            take_hello(second)
            second.sendall(recorded)
            with pytest.raises(te.HandshakeError, match="without a proof that it has read"):
                peer.result(TIMEOUT_S)
        assert source.stats().rails == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 1, HELLO_BODY_MAX + 1), "at most"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 1, (1 << 32) - 1), "at most"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 1, 0), "a hello of 0 bytes"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 1, CLAIM.size) + bytes(CLAIM.size), "a hello of"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 2, 1) + b"x", "kind 2 instead"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 4, 32) + CHALLENGE, "kind 4 instead"),
    ],
)
def test_greetings_of_another_size_or_kind_are_closed_without_a_word(
    target: te.Engine, data: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert answered(target.card(), data) is None
    assert says in caplog.text


def test_hellos_of_the_largest_size(target: te.Engine) -> None:
    """As they may be, and one byte more than a transport may say."""
    card = target.card()
    most = HELLO_BODY_MAX - CLAIM.size - PROOF_BYTES
    with dial(card) as sock:
        sock.sendall(hello(sock, card, "smoke", body=bytes(most)))
        assert refusal(sock).reason == "this engine does not offer smoke"
    with dial(card) as sock:
        sock.sendall(hello(sock, card, "smoke", body=bytes(most + 1)))
        assert read_greeting(sock) is None


@pytest.mark.parametrize("reset", [True, False])
def test_half_greetings(target: te.Engine, reset: bool) -> None:
    """The connection ends, or stays and says no more, after any number of bytes."""
    card, rng = target.card(), random.Random(5)
    with contextlib.ExitStack() as undo:
        for _ in range(60):
            sock = undo.enter_context(dial(card))
            data = hello(sock, card)
            sock.sendall(data[: rng.randrange(len(data))])
            if reset:
                linger = struct.pack("ii", 1, 0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                sock.close()
        with te.Engine(te.Config(transports=("tcp",))) as friend:
            assert friend.connect(card).alive
    wait_until(lambda: not target._acceptor._greeting, "no greeting is left")
    assert not any(key.engine_id == RAW_ID for key in target._acceptor._links)


def test_strangers_read_nothing_of_an_engine(target: te.Engine) -> None:
    """Neither its id nor its epoch, nor a sentence."""
    card = target.card()
    heard = bytearray()
    strange = [b"", bytes(500), hello(CHALLENGE, card), hello(CHALLENGE, card, version=7)]
    for data in strange:
        with dial(card) as sock:
            sock.sendall(data)
            with contextlib.suppress(OSError):  # The engine may have closed it by now.
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while more := sock.recv(1 << 16):
                    heard += more
    challenges, refusals = heard.count(MAGIC), heard.count(GREETING.pack(*_refuse()))
    assert (challenges, refusals) == (len(strange) + 2, 2)
    assert len(heard) == challenges * GREETING.size + len(strange) * CHALLENGE_BYTES


def _refuse() -> tuple[bytes, int, int, int]:
    return MAGIC, PROTOCOL_VERSION, GreetingKind.REFUSE, 0
