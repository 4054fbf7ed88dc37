# SPDX-License-Identifier: Apache-2.0
"""The port of a session: its questions and answers, strangers, and those who never answer."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_far import wait_until

import te
from sglang_mooncake.faces.mooncake_engine.answering import CONNECTIONS_OF_SOURCE_MAX, Answerer
from sglang_mooncake.faces.mooncake_engine.exchange import (
    ANSWER_HEAD_BYTES,
    BODY_BYTES_MAX,
    PROOF_BYTES,
    QUESTION_HEAD_BYTES,
    NoCard,
    Told,
    answer,
    answer_nbytes,
    place_of,
    proofs_nbytes,
    question,
    read_answer,
    refusal,
)
from sglang_mooncake.faces.mooncake_engine.sessions import ask

HOST = "127.0.0.1"
TOLD = Told(b"a card", 77)
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
NONCE = bytes(32)
WHOM = place_of(("10.0.0.1", 15000))


def test_a_port_that_cannot_be_served_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    async def refused(*_: object, sock: socket.socket, **__: object) -> None:
        made.append(sock)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncio.start_server", refused)
    with pytest.raises(OSError, match="Too many open files"):
        Answerer(HOST, None, [KEY], lambda: TOLD)
    assert made[0].fileno() == -1


@pytest.fixture
def port() -> Iterator[Answerer]:
    answerer = Answerer(HOST, None, [KEY], lambda: TOLD)
    yield answerer
    answerer.close()


def asked(answerer: Answerer, keys=(KEY,), timeout_s: float = 60.0) -> Told:
    return ask(f"{HOST}:{answerer.port}", keys, timeout_s)


def answered(
    keys_of_asker, keys_of_teller, told: Told = TOLD, teller: bytes = b"10.0.0.1 15000"
) -> tuple[bytes, bytes]:
    """Head and rest of an answer to a question."""
    text = question(NONCE, keys_of_asker, WHOM)
    head, proofs = text[:QUESTION_HEAD_BYTES], text[QUESTION_HEAD_BYTES:]
    assert proofs_nbytes(head) == len(proofs)
    said = answer(head, proofs, keys_of_teller, told, teller)
    head, rest = said[:ANSWER_HEAD_BYTES], said[ANSWER_HEAD_BYTES:]
    assert answer_nbytes(head) == len(rest)
    return head, rest


@pytest.mark.parametrize("keys", [[], [KEY], [KEY, OTHER]])
def test_what_is_told_is_read(keys) -> None:
    head, rest = answered(keys, keys[::-1])
    assert read_answer(head, rest, NONCE, keys, WHOM) == TOLD


def test_an_answer_is_of_its_question_and_of_a_holder_of_the_secret() -> None:
    head, rest = answered([KEY], [KEY])
    for one, nonce, keys in [
        (rest, bytes([1]) * 32, [KEY]),
        (rest, NONCE, [OTHER]),
        (b"\1" + rest[1:], NONCE, [KEY]),
        (answered([], [])[1], NONCE, [KEY]),
    ]:
        with pytest.raises(NoCard, match="proves none"):
            read_answer(head, one, nonce, keys, WHOM)


@pytest.mark.parametrize(("asks", "tells"), [([], [KEY]), ([KEY], []), ([OTHER], [KEY])])
def test_nothing_is_told_without_a_secret_in_common(asks, tells) -> None:
    with pytest.raises(NoCard, match="secrets of the two processes differ"):
        answered(asks, tells)


def test_another_holder_of_the_secret_does_not_answer_for_who_was_asked() -> None:
    """Somebody on the way brings a question to him, and his answer back."""
    other = place_of(("10.0.0.2", 15000))
    with pytest.raises(NoCard, match=r"to another address than 10\.0\.0\.2 15000"):
        answered([KEY], [KEY], teller=other)
    head, rest = answered([KEY], [KEY])
    with pytest.raises(NoCard, match="proves none"):
        read_answer(head, rest, NONCE, [KEY], other)


def test_one_on_the_way_cannot_turn_a_question_to_another_engine(port) -> None:
    with socket.create_server((HOST, 0)) as listener:

        def relay() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection((HOST, port.port)) as far:
                far.sendall(near.recv(4096))
                while data := far.recv(4096):
                    near.sendall(data)

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        with pytest.raises(NoCard, match="put to another address"):
            ask(f"{HOST}:{listener.getsockname()[1]}", [KEY], 60.0)
        thread.join()


def test_zones_are_each_hosts_own() -> None:
    assert place_of(("fe80::1%eth0", 1)) == place_of(("fe80::1%eth1", 1)) == b"fe80::1 1"


def test_a_refusal_says_why_and_nothing_that_changes_a_terminal() -> None:
    said = refusal("no\x1b[31m" + "x" * 1000)
    head, rest = said[:ANSWER_HEAD_BYTES], said[ANSWER_HEAD_BYTES:]
    assert answer_nbytes(head) == len(rest)
    with pytest.raises(NoCard, match=r"^it refuses: no\?\[31mx+$"):
        read_answer(head, rest, NONCE, [KEY], WHOM)


def test_a_short_body_is_no_answer() -> None:
    with pytest.raises(NoCard, match="too short"):
        read_answer(answered([], [])[0], b"1234567" + bytes(PROOF_BYTES), NONCE, [], WHOM)


@given(st.binary(min_size=QUESTION_HEAD_BYTES, max_size=QUESTION_HEAD_BYTES))
def test_bytes_that_are_no_question_are_refused(head: bytes) -> None:
    with pytest.raises(NoCard, match="no question of this version"):
        proofs_nbytes(head)


@given(st.binary(min_size=ANSWER_HEAD_BYTES, max_size=ANSWER_HEAD_BYTES))
def test_bytes_that_are_no_answer_are_refused(head: bytes) -> None:
    with pytest.raises(NoCard, match="no transfer engine"):
        answer_nbytes(head)


def test_sizes_have_a_bound() -> None:
    text = question(NONCE, [], WHOM)
    with pytest.raises(NoCard):
        proofs_nbytes(text[: QUESTION_HEAD_BYTES - 1] + b"\5")
    head = answered([], [])[0]
    most = head[:-4] + BODY_BYTES_MAX.to_bytes(4, "big")
    assert answer_nbytes(most) == BODY_BYTES_MAX + PROOF_BYTES
    with pytest.raises(NoCard):
        answer_nbytes(head[:-4] + (BODY_BYTES_MAX + 1).to_bytes(4, "big"))


def test_an_engine_that_was_closed_refuses() -> None:
    def gone() -> Told:
        raise te.ClosedError("the engine was closed")

    refused = pytest.raises(NoCard, match="it refuses: the engine was closed")
    with contextlib.closing(Answerer(HOST, None, [], gone)) as answerer, refused:
        asked(answerer, [])


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: some.example.com\r\n\r\n", bytes(999)])
def test_noise_is_refused_and_the_port_goes_on(port, noise) -> None:
    with socket.create_connection((HOST, port.port), 60) as stranger:
        stranger.sendall(noise)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert asked(port) == TOLD


def test_silent_strangers_lose_their_own_connections(port) -> None:
    """One more than a source may have closes that source's oldest."""
    with contextlib.ExitStack() as undo:
        silent = [
            undo.enter_context(socket.create_connection((HOST, port.port), 60))
            for _ in range(CONNECTIONS_OF_SOURCE_MAX)
        ]
        wait_until(lambda: len(port._crowd) == CONNECTIONS_OF_SOURCE_MAX, "all have come")
        assert asked(port) == TOLD
        assert silent[0].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # The newer ones may stay.
            silent[-1].recv(1)


def test_who_does_not_ask_in_time_is_closed(port, monkeypatch) -> None:
    monkeypatch.setattr("sglang_mooncake.faces.mooncake_engine.answering.ANSWER_TIMEOUT_S", 0.1)
    with socket.create_connection((HOST, port.port), 60) as silent:
        assert silent.recv(1) == b""


def test_close_ends_connections_and_thread(port) -> None:
    with socket.create_connection((HOST, port.port), 60) as silent:
        wait_until(lambda: len(port._crowd) == 1, "it has come")
        port.close()
        assert silent.recv(1) == b""
    assert not port._thread.is_alive()
    port.close()
    with pytest.raises(NoCard, match="refused"):
        asked(port)


def listener(says: bytes | None) -> tuple[socket.socket, threading.Thread]:
    """Somebody else's port: says something to the first who connects, and hangs up; None: by a
    reset, as Mooncake's engine."""
    server = socket.create_server((HOST, 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            if says is None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                connection.sendall(says)

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread


@pytest.mark.parametrize(
    ("says", "match"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no transfer engine of sglang-mooncake"),
        (None, "both sides need sglang-mooncake's mooncake.engine, or both Mooncake's"),
        (b"", "closed the connection after 0 of 13 bytes"),
        (answered([], [])[0] + b"a", "closed the connection after 1 of"),
    ],
)
def test_what_is_no_engine_is_told(says, match) -> None:
    server, thread = listener(says)
    with server, pytest.raises(NoCard, match=f"session {HOST}:.*{match}"):
        ask(f"{HOST}:{server.getsockname()[1]}", [], 60.0)
    thread.join()


def test_a_port_that_never_answers_has_a_deadline() -> None:
    late = pytest.raises(NoCard, match=r"no answer within 0.2 s: timed out")
    with socket.create_server((HOST, 0)) as server, late:
        ask(f"{HOST}:{server.getsockname()[1]}", [], 0.2)
