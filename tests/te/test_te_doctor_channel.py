# SPDX-License-Identifier: Apache-2.0
"""Two doctors talk: only with a key in common, and with no byte changed on the way."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from te.doctor import channel as module
from te.doctor.channel import (
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Channel,
    ChannelError,
    answer,
    call,
)
from te.doctor.keys import read_keys
from te.doctor.messages import REPLIES, REQUESTS, Digest, Digested, Look, OpenEngine
from te.errors import UsageError
from te.proof import NO_KEY, Key

pytestmark = pytest.mark.pure

TIMEOUT_S = 60.0
SHORT_S = 0.05
ONE, OTHER = Key(b"1" * 32), Key(b"2" * 32)

Pair = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def both(
    ends: tuple[socket.socket, socket.socket],
    near: tuple[Key, ...] = (NO_KEY,),
    far: tuple[Key, ...] = (NO_KEY,),
) -> Pair:
    """Both greet; raises what the near side raises, and then the far side."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer, ends[1], far, TIMEOUT_S)
        try:
            called = call(ends[0], near, TIMEOUT_S)
        finally:
            answered.exception(TIMEOUT_S)
        return called, answered.result()


@pytest.mark.parametrize(
    ("near", "far"),
    [((NO_KEY,), (NO_KEY,)), ((ONE,), (ONE,)), ((OTHER, ONE), (ONE,)), ((ONE,), (OTHER, ONE))],
)
def test_messages_go_both_ways(
    ends: tuple[socket.socket, socket.socket], near: tuple[Key, ...], far: tuple[Key, ...]
) -> None:
    one, other = both(ends, near, far)
    for request in (Look(), OpenEngine(transport="tcp", address="::1"), Digest()):
        one.send(request, TIMEOUT_S)
        assert other.receive(REQUESTS, REQUEST_BYTES_MAX, TIMEOUT_S) == request
        other.send(Digested(b"x" * 32), TIMEOUT_S)
        assert one.receive(REPLIES, REPLY_BYTES_MAX, TIMEOUT_S) == Digested(b"x" * 32)
    assert one.engine_key == other.engine_key
    assert len(one.engine_key) == 32


@pytest.mark.parametrize(
    ("near", "far"), [((ONE,), (OTHER,)), ((NO_KEY,), (ONE,)), ((ONE,), (NO_KEY,))]
)
def test_without_a_key_in_common_both_say_so(
    ends: tuple[socket.socket, socket.socket], near: tuple[Key, ...], far: tuple[Key, ...]
) -> None:
    with pytest.raises(ChannelError, match="another secret, or none: give both the same"):
        both(ends, near, far)
    assert ends[0].fileno() == ends[1].fileno() == -1, "closed"


def test_two_sessions_have_different_keys() -> None:
    found = set()
    for _ in range(2):
        near, far = socket.socketpair()
        with near, far:
            found.add(both((near, far), (ONE,), (ONE,))[0].engine_key)
    assert len(found) == 2


def test_a_name_of_a_key_that_is_not_had_proves_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    class Named(Key):
        """Another key that goes by the name of the first."""

        def __init__(self) -> None:
            super().__init__(b"3" * 32)
            object.__setattr__(self, "id", ONE.id)

    one, other = both(ends, (Named(),), (ONE,))
    one.send(Look(), TIMEOUT_S)
    with pytest.raises(ChannelError, match="does not prove that it has this key"):
        other.receive(REQUESTS, REQUEST_BYTES_MAX, TIMEOUT_S)


def _raw(ends: tuple[socket.socket, socket.socket], channel: Channel) -> bytes:
    """The bytes of a message, taken off the wire."""
    channel.send(Look(), TIMEOUT_S)
    return ends[1].recv(4096)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "does not prove"),
        (lambda raw: raw[:4] + bytes(32) + raw[36:], "does not prove"),
        (lambda raw: struct.pack("<I", 4097) + raw[4:], "a message of 4097 bytes; at most 4096"),
        (lambda raw: raw[:20], "no word from the other doctor"),
        (lambda raw: b"", "no word from the other doctor"),
    ],
)
def test_what_was_changed_on_the_way_is_refused(
    ends: tuple[socket.socket, socket.socket], change: Callable[[bytes], bytes], says: str
) -> None:
    one, other = both(ends)
    raw = _raw(ends, one)
    ends[0].sendall(change(raw))
    with pytest.raises(ChannelError, match=says):
        other.receive(REQUESTS, REQUEST_BYTES_MAX, SHORT_S if "word" in says else TIMEOUT_S)


def test_what_is_repeated_or_turned_round_is_refused(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = both(ends)
    raw = _raw(ends, one)
    ends[0].sendall(raw + raw)
    other.receive(REQUESTS, REQUEST_BYTES_MAX, TIMEOUT_S)
    with pytest.raises(ChannelError, match="does not prove"):
        other.receive(REQUESTS, REQUEST_BYTES_MAX, TIMEOUT_S)
    ends[1].sendall(raw)
    with pytest.raises(ChannelError, match="does not prove"):
        one.receive(REQUESTS, REQUEST_BYTES_MAX, TIMEOUT_S)


class Other(msgspec.Struct, tag=True):
    """Nothing that a doctor asks."""

    deep: list[object] = []


@pytest.mark.parametrize(
    ("message", "says"), [(Other(), "Invalid value 'Other'"), (Other([[]]), "nested more than")]
)
def test_what_is_no_request_is_refused(
    ends: tuple[socket.socket, socket.socket], message: Other, says: str
) -> None:
    if message.deep:
        deep: list[object] = []
        for _ in range(40):
            deep = [deep]
        message = Other(deep)
    one, other = both(ends)
    one.send(message, TIMEOUT_S)
    with pytest.raises(ChannelError, match=says):
        other.receive(REQUESTS, REQUEST_BYTES_MAX, TIMEOUT_S)


def test_one_that_has_gone_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = both(ends)
    one.close()
    with pytest.raises(ChannelError, match="closed the connection"):
        other.receive(REQUESTS, REQUEST_BYTES_MAX, TIMEOUT_S)
    with pytest.raises(ChannelError, match="the other doctor has gone"):
        other.send(Digested(b""), TIMEOUT_S)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(76), "something else than te doctor"),
        (b"", "no word from the other doctor"),
    ],
)
def test_a_caller_that_is_no_doctor(
    ends: tuple[socket.socket, socket.socket], said: bytes, says: str
) -> None:
    ends[0].sendall(said)
    with pytest.raises(ChannelError, match=says):
        answer(ends[1], (NO_KEY,), TIMEOUT_S if said else SHORT_S)
    assert ends[1].fileno() == -1, "closed"


def test_one_that_answers_and_is_no_doctor(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(b"SSH-2.0-OpenSSH_9.2p1".ljust(64))
    with pytest.raises(ChannelError, match="no te doctor that listens there"):
        call(ends[0], (NO_KEY,), TIMEOUT_S)


def test_another_version_is_told_to_both(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        data = module._CALL.pack(b"te doctor\0", 8, os.urandom(32), NO_KEY.id.ljust(32, b"\0"))
        ends[0].sendall(data)
        answered = pool.submit(answer, ends[1], (NO_KEY,), TIMEOUT_S)
        assert f"speaks version 8, this one {module.VERSION}" in str(answered.exception(TIMEOUT_S))
    near, far = socket.socketpair()
    with near, far:
        far.sendall(module._ANSWER.pack(b"te doctor\0", 9, 0, os.urandom(32)))
        with pytest.raises(ChannelError, match=f"speaks version 9, this one {module.VERSION}"):
            call(near, (NO_KEY,), TIMEOUT_S)


def test_a_socket_that_is_dead_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(ChannelError, match="the other doctor does not answer"):
        call(ends[0], (NO_KEY,), TIMEOUT_S)


def test_an_answer_to_nobody_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    names = NO_KEY.id.ljust(32, b"\0")
    ends[0].sendall(module._CALL.pack(b"te doctor\0", 1, os.urandom(32), names))
    ends[0].close()
    with pytest.raises(ChannelError, match="ended before it said anything"):
        answer(ends[1], (NO_KEY,), TIMEOUT_S)


# -- the file of secrets


def secret(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_are_those_of_the_secrets_in_their_order(tmp_path: Path) -> None:
    one = read_keys(secret(tmp_path / "one", "first secret 1234\n\nsecond secret 123\n"))
    other = read_keys(secret(tmp_path / "other", "second secret 123\n"))
    assert [key.id for key in one][1:] == [key.id for key in other]
    assert len(one) == 2
    assert read_keys(None) == (NO_KEY,)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("first secret 1234", 0o644, "chmod 600"),
        ("short", 0o600, "of 16 characters or more"),
        ("", 0o600, "1 to 4 secrets"),
        ("a secret of enough characters\n" * 5, 0o600, "1 to 4 secrets"),
    ],
)
def test_a_bad_file_is_said(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_keys(secret(tmp_path / "bad", text, mode))


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_keys(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(UsageError, match="1 to 4 secrets"):
        read_keys(tmp_path / "fifo")
