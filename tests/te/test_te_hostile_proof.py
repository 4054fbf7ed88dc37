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
    BLIND,
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
    session_of,
    take_challenge,
    take_hello,
    welcome,
)
from te_ring import make_rings

import te
from te.connect.greeting import (
    CALL_BODY_MAX,
    CHALLENGE_BODY,
    CLAIM,
    GREETING,
    HELLO_BODY_MAX,
    MAGIC,
    NONCE_BYTES,
    Greeting,
    GreetingKind,
    Hello,
    Proven,
    Turn,
    called_keys,
    encode_call,
    encode_greeting,
    open_answer,
    open_challenge,
    open_hello,
    seal_answer,
    seal_challenge,
    seal_hello,
)
from te.errors import ProtocolViolation
from te.handshake import PROTOCOL_VERSION, decode_card
from te.proof import NO_KEY, PROOF_BYTES, Key, hello_proof

NOTHING = Greeting(PROTOCOL_VERSION, GreetingKind.REFUSE, b"")
"""All that a stranger is told."""


@pytest.fixture(scope="module")
def target() -> Iterator[te.Engine]:
    with te.Engine(te.Config(connect_timeout_s=TIMEOUT_S)) as engine:
        yield engine


def answered(card: bytes, data: bytes) -> Greeting | None:
    """What an engine says to these bytes, whatever its challenge was."""
    with dial(card) as sock:
        take_challenge(sock, card)
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
PROOFS = st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES)
TURNS = st.builds(Turn, st.sampled_from([NO_KEY, Key(b"k" * 32)]), PROOFS)
CALL = Greeting(PROTOCOL_VERSION, GreetingKind.CALL, encode_call(bytes(NONCE_BYTES), (NO_KEY,)))


@pytest.mark.pure
@given(HELLOS, TURNS)
def test_a_hello_is_read_as_it_was_written(said: Hello, turn: Turn) -> None:
    body, proof = seal_hello(said, turn)
    assert open_hello(body, turn) == Proven(said, turn.key, proof)


@pytest.mark.pure
@given(HELLOS, TURNS, st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_of_a_hello_can_be_changed(said: Hello, turn: Turn, at: int, by: int) -> None:
    body = bytearray(seal_hello(said, turn)[0])
    body[at % len(body)] ^= by
    assert open_hello(bytes(body), turn) is None
    assert open_hello(bytes(body) + b"x", turn) is None


@pytest.mark.pure
@given(HELLOS, TURNS, TURNS)
def test_a_hello_answers_one_challenge(said: Hello, turn: Turn, other: Turn) -> None:
    body, _ = seal_hello(said, turn)
    assert (open_hello(body, other) is None) == (other != turn)


@pytest.mark.pure
@given(st.binary(max_size=HELLO_BODY_MAX))
def test_any_bytes_are_no_hello(data: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        assert open_hello(data, BLIND) is None


@pytest.mark.pure
@given(
    st.binary(max_size=CALL_BODY_MAX + 9),
    st.sampled_from([GreetingKind.CALL, GreetingKind.CALL_LINK]),
)
def test_any_bytes_are_a_call_or_a_violation(data: bytes, kind: GreetingKind) -> None:
    with contextlib.suppress(ProtocolViolation):
        found = called_keys(Greeting(PROTOCOL_VERSION, kind, data))
        assert b"".join(found) == data[NONCE_BYTES:]
        assert 0 < len(found) <= (4 if kind == GreetingKind.CALL else 1)


@pytest.mark.pure
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_challenge_answers_one_call_and_is_one_engine_s(at: int, by: int) -> None:
    one, other, id_ = Key(b"1" * 32), Key(b"2" * 32), HELLO.peer_id
    body, turn = seal_challenge(CALL, CHALLENGE, one, id_, 2)
    assert open_challenge(body, CALL, (other, one), id_, 2) == turn
    assert open_challenge(body, CALL, (other,), id_, 2) is None
    assert open_challenge(body, CALL, (one,), HELLO.id, 2) is None
    assert open_challenge(body, CALL, (one,), id_, 3) is None
    link = dataclasses.replace(CALL, kind=GreetingKind.CALL_LINK)
    assert open_challenge(body, link, (one,), id_, 2) is None
    asked = bytearray(CALL.body)
    asked[at % len(asked)] ^= by
    call = dataclasses.replace(CALL, body=bytes(asked))
    assert open_challenge(body, call, (one,), id_, 2) is None
    changed = bytearray(body)
    changed[at % len(changed)] ^= by
    assert open_challenge(bytes(changed), CALL, (one, other), id_, 2) is None


@pytest.mark.pure
def test_a_name_that_is_no_text_is_a_violation() -> None:
    claim = bytearray(seal_hello(HELLO, BLIND)[0][: CLAIM.size])
    claim[-1] = 0xFF
    body = bytes(claim) + hello_proof(NO_KEY, BLIND.proof, bytes(claim), b"")
    with pytest.raises(ProtocolViolation, match="is no text"):
        open_hello(body, BLIND)


@pytest.mark.pure
def test_an_answer_is_to_one_hello_and_of_one_kind() -> None:
    one = Proven(HELLO, NO_KEY, os.urandom(PROOF_BYTES))
    body, _ = seal_answer(GreetingKind.WELCOME, b"said", one)
    answer = Greeting(PROTOCOL_VERSION, GreetingKind.WELCOME, body)
    assert open_answer(answer, one.proof, NO_KEY) == b"said"
    assert open_answer(answer, os.urandom(PROOF_BYTES), NO_KEY) is None
    assert open_answer(answer, one.proof, Key(b"k" * 32)) is None
    refuse = dataclasses.replace(answer, kind=GreetingKind.REFUSE)
    assert open_answer(refuse, one.proof, NO_KEY) is None
    assert open_answer(dataclasses.replace(answer, body=body + b"x"), one.proof, NO_KEY) is None
    assert open_answer(dataclasses.replace(answer, body=b""), one.proof, NO_KEY) is None


@pytest.mark.pure
def test_the_codes_are_those_of_the_rfcs() -> None:
    # RFC 4231 has no case with an empty key; this is one that is often published.
    expected = "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad"
    assert NO_KEY.code(b"").hex() == expected
    # RFC 5869, A.1: the first 32 bytes.
    prk = "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    okm = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    info = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")
    assert Key(bytes.fromhex(prk)).expand(info).hex() == okm


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
@pytest.mark.usefixtures("every_line")
def test_a_proof_is_of_what_it_was_made_for(
    target: te.Engine, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """The hello says something else than what was proven, to the right challenge."""
    card = target.card()
    decoded = decode_card(card)
    said = dataclasses.replace(HELLO, peer_id=decoded.id, peer_epoch=decoded.epoch)
    with caplog.at_level(logging.WARNING), dial(card) as sock:
        turn = take_challenge(sock, card)
        _, proof = seal_hello(said, turn)
        other = dataclasses.replace(said, **changes)  # type: ignore[arg-type]
        body, _ = seal_hello(other, turn)
        body = body[: CLAIM.size] + proof + body[CLAIM.size + PROOF_BYTES :]
        sock.sendall(encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, body))
        assert read_greeting(sock) == NOTHING
    assert "its hello does not answer the challenge" in caplog.text


def test_later_rails_and_memory_and_queue_pairs_prove_the_same_way(target: te.Engine) -> None:
    """A stranger who knows all of a link but no challenge joins it in no way."""
    card = target.card()
    source = RawSource(card, "samehost", link=11)
    with source.sock:
        session = session_of(card, 11)
        fd = make_rings()
        for data in (host_hello(BLIND, card, link=11), rdma_hello(BLIND, card, link=11)):
            with dial_unix(card) as sock:
                take_challenge(sock, card, session)
                socket.send_fds(sock, [data], [fd])
                assert read_greeting(sock) == NOTHING
        os.close(fd)
        assert target.stats().rails == 1
    assert answered(card, rdma_hello(BLIND, card, link=11)) == NOTHING
    assert answered(card, hello(BLIND, card, link=11)) == NOTHING


def test_a_challenge_of_one_engine_is_not_answered_for_another(target: te.Engine) -> None:
    """Who is dialled hands the call on to another engine, and its challenge back, to be taken for
    the dialler: that one says nothing of itself to it."""
    with contextlib.ExitStack() as undo:
        listener, card = undo.enter_context(raw_destination())
        source = undo.enter_context(te.Engine())
        far = undo.enter_context(dial(target.card()))
        peer = undo.enter_context(_connecting(source, card))
        sock = undo.enter_context(listener.accept()[0])
        call = read_greeting(sock)
        assert call is not None
        far.sendall(encode_greeting(GreetingKind.CALL, PROTOCOL_VERSION, call.body))
        challenge = read_greeting(far)
        assert challenge is not None
        sock.sendall(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, challenge.body))
        with pytest.raises(te.ConnectError, match="does not prove to be the engine abab"):
            peer.result(TIMEOUT_S)
        assert sock.recv(1) == b""


@contextlib.contextmanager
def _connecting(source: te.Engine, card: bytes) -> Iterator[Future[te.Peer]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(source.connect, card, TIMEOUT_S)


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
        wait_until(lambda: source.stats().rails == 0, "the first one is closed")


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
@pytest.mark.usefixtures("every_line")
def test_greetings_of_another_size_or_kind_are_closed_without_a_word(
    target: te.Engine, data: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert answered(target.card(), data) is None
    assert says in caplog.text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 5, CALL_BODY_MAX + 1), "at most 64"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 5, 0), "a call of 0 bytes"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 5, 32) + bytes(32), "a call of 32 bytes"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 5, 41) + bytes(41), "a call of 41 bytes"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 6, 48) + bytes(48), "a call of 48 bytes"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 1, 40) + bytes(40), "kind 1 instead of a call"),
        (GREETING.pack(MAGIC, PROTOCOL_VERSION, 4, 40) + bytes(40), "kind 4 instead of a call"),
    ],
)
@pytest.mark.usefixtures("every_line")
def test_calls_of_another_size_or_kind_are_closed_without_a_word(
    data: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with te.Engine() as target, caplog.at_level(logging.WARNING), dial(target.card()) as sock:
        sock.sendall(data)
        assert read_greeting(sock) is None
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
        with te.Engine(te.Config(transports=("tcp",), connect_timeout_s=TIMEOUT_S)) as friend:
            assert friend.connect(card).alive
    wait_until(lambda: not target._acceptor._greeting, "no greeting is left")
    assert not any(one.key.engine_id == RAW_ID for one in target._acceptor._links)


def test_strangers_read_nothing_of_an_engine(target: te.Engine) -> None:
    """Neither its id nor its epoch, nor a sentence."""
    card = target.card()
    heard = bytearray()
    call = encode_greeting(GreetingKind.CALL, PROTOCOL_VERSION, CALL.body)
    other = encode_call(bytes(NONCE_BYTES), (Key(b"k" * 32),))
    strange = [
        b"",
        bytes(500),
        encode_greeting(GreetingKind.CALL, PROTOCOL_VERSION, other),
        encode_greeting(GreetingKind.CALL_LINK, PROTOCOL_VERSION, other),
        call + hello(BLIND, card),
        call + hello(BLIND, card, version=7),
    ]
    for data in strange:
        with dial(card) as sock:
            sock.sendall(data)
            with contextlib.suppress(OSError):  # The engine may have closed it by now.
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while more := sock.recv(1 << 16):
                    heard += more
    said, refusals = heard.count(MAGIC), heard.count(GREETING.pack(*_refuse()))
    assert (said, refusals) == (6, 4)
    assert len(heard) == said * GREETING.size + 2 * CHALLENGE_BODY.size
    assert bytes.fromhex(target.id) not in heard


def _refuse() -> tuple[bytes, int, int, int]:
    return MAGIC, PROTOCOL_VERSION, GreetingKind.REFUSE, 0
