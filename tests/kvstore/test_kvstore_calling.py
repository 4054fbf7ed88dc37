# SPDX-License-Identifier: Apache-2.0
"""Owners of the same host: their memory is read where it is, and a Unix socket leads to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_far import Far
from store_makers import SIG, TIMEOUT_S, Room, config, contents, deaf, keys, until
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, filled, handle_of, put_all, sees

from kvstore import _bytes
from kvstore.objects.outcomes import Got, Put
from kvstore.owner import answering
from kvstore.owner.answering import Answerer
from kvstore.protocol import calling
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller, Line, Window
from kvstore.protocol.mapped import Mapped
from kvstore.protocol.messages import (
    CALL_BYTES_MAX,
    TRAY_BYTES,
    VERSION,
    Done,
    Greet,
    Hello,
    Publish,
    Published,
    Refused,
    Snapshot,
    Stored,
    Take,
    decode_answer,
    encode,
)
from kvstore.protocol.reach import NONCE_NBYTES
from kvstore.rate_limited_log import RateLimitedLog
from kvstore.store import Store


def path_of(directory: Path) -> str:
    (path,) = directory.glob("*.near")
    return str(path)


def caller_of(store: Store, number: int = 1) -> Caller:
    known = store._owners._connections.get(number)
    assert known is not None
    assert known.caller is not None
    return known.caller


@pytest.fixture
def line(owner: Store, directory: Path) -> Iterator[Line]:
    one = Line(path_of(directory), "abc", TIMEOUT_S)
    yield one
    one.close()


def test_only_processes_of_one_host_share_memory(
    owner: Store, guest: Store, tcp_guest: Store
) -> None:
    for one in (guest, tcp_guest):
        until(one._owners.usable, "the owner is known")
    assert guest._owners.source(1).window is not None  # type: ignore[union-attr]
    assert tcp_guest._owners.source(1).window is None  # type: ignore[union-attr]
    assert handle_of(guest, 1).take_bytes_max > handle_of(tcp_guest, 1).take_bytes_max
    assert owner._owners.source(0).window is not None  # type: ignore[union-attr]


def test_what_is_mapped_cannot_be_written_or_made_shorter(line: Line) -> None:
    window = line.window
    assert window is not None
    assert window.mapped is not None
    view = np.frombuffer(window.mapped.memory, np.uint8)
    assert not view.flags.writeable
    assert view.ctypes.data == window.headers_address


@pytest.mark.slow
def test_a_get_asks_nobody_and_needs_no_living_owner(
    directory: Path, start_far: Callable[..., Far]
) -> None:
    far = start_far(8 * MIB, N, NBYTES)
    with owning(config(directory)) as guest:
        back = Room(guest, N, NBYTES)
        sees(guest)
        assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
        far.signal(signal.SIGSTOP)
        back.bytes[:] = 0
        assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
        assert (back.bytes == contents(N, NBYTES)).all()
        caller = caller_of(guest)
        with pytest.raises(NoAnswer, match="does not answer in time"):
            caller.ask(Publish(1), 0.05)
        far.kill()
        with pytest.raises(NoAnswer, match=r"cannot be called|has ended the connection|were ended"):
            caller.ask(Publish(1), TIMEOUT_S)
        assert caller._lines == 0
        assert guest.put(keys(1, 9), SIG, back.pieces.of([0])) == [Put.UNREACHABLE]


def test_a_slot_that_cannot_be_is_not_looked_for(owner: Store, guest: Store) -> None:
    put_all(owner)
    sees(guest)
    source = guest._owners.source(1)
    assert source is not None
    assert source.window is not None
    back = Room(guest, N, NBYTES)
    with deaf(guest):
        _, groups = guest.gets.locate(KEYS, SIG, back.pieces)
        units = source.window.slots_nbytes // 4096
        for slot in (units, 1 << 31):
            groups[0].slots[3] = slot
            came = groups[0].bring(back.pieces, source.window, guest.gets._copier, True)
            assert came.tolist() == [_bytes.MOVED] * N
    assert Window(0, 64, 4096).has(0, 4096)
    assert not Window(0, 64, 4096).has(0, 4097)
    assert not Window(0, 64, 8192).has(1, 4096), "it has one header"


def test_more_threads_than_lines_ask_over_zeromq(
    owner: Store, guest: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(guest._owners.usable, "the owner is known")
    caller = caller_of(guest)
    held = [caller.line(TIMEOUT_S) for _ in range(calling.LINES_MAX)]
    lines = [one.__enter__() for one in held]
    assert None not in lines
    assert caller.ask(Publish(1), TIMEOUT_S) is None
    small, large = filled(guest, 1, 5000), filled(guest, 1, MIB // 2)
    assert guest.put(keys(1, 1), SIG, small.pieces) == [Put.STORED], "as from another host"
    assert guest.put(keys(1, 2), SIG, large.pieces) == [Put.STORED], "claimed and written"
    for one in held:
        one.__exit__(None, None, None)
    assert isinstance(caller.ask(Publish(1), TIMEOUT_S), Published)
    assert len(caller._idle) == calling.LINES_MAX
    caller.close()
    with pytest.raises(NoAnswer, match="were ended"):
        caller.ask(Publish(1), TIMEOUT_S)


def test_a_line_in_use_when_its_caller_is_closed_ends_behind_that(
    owner: Store, guest: Store
) -> None:
    until(guest._owners.usable, "the owner is known")
    caller = caller_of(guest)
    with caller.line(TIMEOUT_S) as line:
        assert line is not None
        caller.close()
        assert isinstance(line.ask(Publish(1), TIMEOUT_S), Published)
    assert line._socket.fileno() == -1


def test_a_line_that_came_too_late_to_ask_is_kept(owner: Store, guest: Store) -> None:
    until(guest._owners.usable, "the owner is known")
    caller = caller_of(guest)
    (line,) = caller._idle
    with pytest.raises(NoAnswer, match="does not answer in time"), caller.line(TIMEOUT_S):
        line.ask(Publish(1), 0.0)
    assert (caller._idle, caller._lines) == ([line], 1)
    assert isinstance(caller.ask(Publish(1), TIMEOUT_S), Published)


def test_an_owner_with_too_many_lines_is_read_and_written_by_te(
    owner: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "LINES_MAX", 0)
    put_all(owner)
    with owning(config(directory)) as guest:
        sees(guest)
        back = filled(guest)
        assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
        assert guest._owners.source(1).window is None  # type: ignore[union-attr]
        assert guest.put(keys(N, 5), SIG, back.pieces) == [Put.STORED] * N


def test_a_caller_wants_the_start_of_the_owner_that_it_knows(owner: Store, directory: Path) -> None:
    with pytest.raises(NoAnswer, match="started anew"):
        Caller(path_of(directory), "abc", b"another card", TIMEOUT_S)


def test_what_a_line_refuses(line: Line, owner: Store) -> None:
    assert isinstance(line.ask(Greet(VERSION), TIMEOUT_S), Hello)
    assert isinstance(line.ask(Take(KEYS.tobytes(), SIG, 1000), TIMEOUT_S), Stored)
    for question, why in (
        (Take(keys(2).tobytes(), SIG, TRAY_BYTES // 2 + 1), "do not fit a tray"),
        (Done(), "the question cannot be read"),
        (Snapshot(-1, 2), "the question cannot be read"),
    ):
        found = line.ask(question, TIMEOUT_S)  # type: ignore[arg-type]
        assert isinstance(found, Refused)
        assert why in found.why
    assert len(owner) == N


def greeted(directory: Path, raw: bytes, fds: list[int]) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(TIMEOUT_S)
        one.connect(path_of(directory))
        socket.send_fds(one, [raw], fds)
        return one.recv(CALL_BYTES_MAX)


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the log is there; before the owner is made."""
    monkeypatch.setattr(answering, "RateLimitedLog", partial(RateLimitedLog, every_s=0.0))


def test_who_is_not_let_in(
    every_line: None, owner: Store, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    greeting = encode(Greet(VERSION))
    open_fd = os.memfd_create("open")
    os.ftruncate(open_fd, TRAY_BYTES)
    _, small_fd = Mapped.make(4096)
    _, bare_fd = Mapped.make(TRAY_BYTES)
    _, good_fd = Mapped.make(TRAY_BYTES + NONCE_NBYTES)
    assert decode_answer(greeted(directory, greeting, [])) == Refused("greet first")
    assert decode_answer(greeted(directory, encode(Publish(1)), [good_fd])) == Refused(
        "greet first"
    )
    assert "speaks version" in decode_answer(greeted(directory, encode(Greet(1)), [good_fd])).why  # type: ignore[union-attr]
    assert greeted(directory, b"\xc1", [good_fd]) == b""
    assert greeted(directory, greeting, [open_fd]) == b""
    assert "could be made shorter" in caplog.text
    assert greeted(directory, greeting, [small_fd]) == b""
    assert "a tray of 4096 bytes" in caplog.text
    assert greeted(directory, greeting, [bare_fd]) == b"", "there is no room for a nonce"
    assert f"a tray of {TRAY_BYTES} bytes" in caplog.text
    for one in (open_fd, small_fd, bare_fd, good_fd):
        os.close(one)


def test_a_client_that_says_nothing_or_reads_nothing_costs_a_thread_for_a_while(
    owner: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_SEND_TIMEOUT", struct.pack("ll", 0, 10_000))
    deaf_one = Line(path_of(directory), "abc", TIMEOUT_S)  # Which needs time to greet.
    monkeypatch.setattr(answering, "GREETING_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.connect(path_of(directory))
        assert mute.recv(1) == b"", "it is left"
    deaf_one._socket.setblocking(False)
    question = encode(Snapshot(0, 1))

    def is_left() -> bool:
        try:
            deaf_one._socket.send(question)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    until(is_left, "it is left")
    deaf_one.close()


class Liar:
    """Listens, and answers with what it was given."""

    def __init__(self, path: Path, reply: bytes, fds: list[int]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._run, args=[reply, fds])
        self._thread.start()

    def _run(self, reply: bytes, fds: list[int]) -> None:
        one, _ = self._socket.accept()
        one.recv(CALL_BYTES_MAX)
        if reply:
            socket.send_fds(one, [reply], fds)
        one.close()

    def close(self) -> None:
        self._thread.join(TIMEOUT_S)
        self._socket.close()


def hello(**more: Any) -> bytes:
    fields: dict[str, Any] = {"headers_address": 4096, "slots_address": 8192}
    fields |= {"engine": b"", "epoch": 1, "chunks": 1, "parts": 1, "object_bytes_max": 1}
    fields |= {"number": 0} | more
    return encode(Hello(**fields))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"", "has ended the connection"),
        (b"\xc1", "answers what cannot be read"),
        (encode(Done()), "greets with Done"),
        (encode(Refused("no")), "owner abc: no"),
        (hello(slots_address=4096), "its slots begin at 0"),
        (hello(slots_address=1 << 40), "its slots begin at"),
    ],
)
def test_an_owner_that_cannot_be_believed(directory: Path, reply: bytes, why: str) -> None:
    _, fd = Mapped.make(8192)
    liar = Liar(directory / "liar", reply, [fd])
    with pytest.raises(NoAnswer, match=why):
        Line(str(directory / "liar"), "abc", TIMEOUT_S)
    liar.close()
    os.close(fd)
    with pytest.raises(NoAnswer, match="cannot be called"):
        Line(str(directory / "nobody"), "abc", TIMEOUT_S)


def test_memory_of_huge_pages_is_not_mapped() -> None:
    """A hole in it ends who touches it where there are no more of them."""
    try:
        fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as exc:
        pytest.skip(f"this kernel has no memory files of huge pages: {exc.strerror}")
    os.ftruncate(fd, 2 << 20)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(ValueError, match="of huge pages"):
        Mapped(fd)
    os.close(fd)


def test_memory_in_a_file_is_not_mapped_and_its_owner_still_called(directory: Path) -> None:
    """Somebody could make the file shorter, which would end who reads it."""
    with (
        owning(config(directory, 8 * MIB, file=directory / "slab")) as owner,
        owning(config(directory)) as guest,
    ):
        put_all(owner)
        sees(guest)
        assert caller_of(guest).window is None
        back = filled(guest, seed=3)
        assert guest.put(keys(N, 3), SIG, back.pieces) == [Put.STORED] * N
        until(lambda: guest.exists(keys(N, 3), SIG, NBYTES).all())
        assert guest.get(keys(N, 3), SIG, back.pieces) == [Got.RIGHT] * N


def test_two_cannot_listen_at_one_path(owner: Store, directory: Path) -> None:
    assert owner._owners.own is not None
    with pytest.raises(OSError, match="in use"):
        Answerer(owner._owners.own, Path(path_of(directory)), lambda _: None)


def test_a_closed_owner_leaves_no_socket(directory: Path) -> None:
    with owning(config(directory, 8 * MIB)):
        assert path_of(directory)
    assert not list(directory.glob("*.near"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_closes_its_parents_store_ends_nothing_of_it(
    owner: Store, directory: Path
) -> None:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            owner.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    with contextlib.closing(Line(path_of(directory), "abc", TIMEOUT_S)) as line:
        assert line.window is not None, "it is let in, as before"


def test_a_listener_that_was_shut_down_is_given_up(
    owner: Store, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a child of fork(2) can do."""
    assert owner._owners.own is not None
    answerer = Answerer(owner._owners.own, directory / "shut", lambda _: None)
    answerer._listener.shutdown(socket.SHUT_RDWR)
    answerer._thread.join(TIMEOUT_S)
    assert not answerer._thread.is_alive()
    assert f"another process has ended {directory / 'shut'}: nobody is let in" in caplog.text
    answerer.close()
