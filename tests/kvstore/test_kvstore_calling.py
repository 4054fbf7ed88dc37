# SPDX-License-Identifier: Apache-2.0
"""The owner of the host: its memory is read where it is, and a Unix socket leads to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_host import end_all, freeze, pid_of, shared
from store_makers import SIG, TIMEOUT_S, Room, config, contents, keys, until
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, put_all

from kvstore import _bytes
from kvstore.objects.outcomes import Got
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


def no_table(_: int) -> None:
    """Of an owner whose table is not looked into."""


def line_to(path: str) -> Line:
    return Line(path, "abc", TIMEOUT_S, no_table)


@pytest.fixture
def line(calls: str) -> Iterator[Line]:
    with contextlib.closing(line_to(calls)) as one:
        yield one


@pytest.fixture
def caller(calls: str) -> Iterator[Caller]:
    with contextlib.closing(Caller(calls, "abc", TIMEOUT_S, no_table)) as one:
        yield one


def test_what_is_mapped_cannot_be_written_or_made_shorter(line: Line) -> None:
    window = line.window
    assert window is not None
    assert window.mapped is not None
    view = np.frombuffer(window.mapped.memory, np.uint8)
    assert not view.flags.writeable
    assert view.ctypes.data == window.headers_address


@pytest.mark.slow
def test_a_get_asks_nobody_and_needs_no_living_owner(directory: Path) -> None:
    try:
        with Store(shared(directory)) as store:
            put_all(store)
            back, pid = Room(store, N, NBYTES), pid_of(store)
            caller = store._owners._link.caller  # type: ignore[attr-defined]
            freeze(pid)
            assert store.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
            assert (back.bytes == contents(N, NBYTES)).all()
            with pytest.raises(NoAnswer, match="does not answer in time"):
                caller.ask(Publish(1), 0.05)
            os.kill(pid, signal.SIGKILL)
            gone = r"cannot be called|has ended the connection|were ended"
            with pytest.raises(NoAnswer, match=gone):
                caller.ask(Publish(1), TIMEOUT_S)
            until(lambda: caller._lines == 0, "what was read may be told meanwhile")
    finally:
        end_all(directory)


def test_a_slot_that_cannot_be_is_not_looked_for(owner: Store) -> None:
    put_all(owner)
    source = owner._owners.source(0)
    assert source is not None
    assert source.window is not None
    back = Room(owner, N, NBYTES)
    _, groups = owner.gets.locate(KEYS, SIG, back.pieces)
    units = source.window.slots_nbytes // 4096
    for slot in (units, 1 << 31):
        groups[0].slots[3] = slot
        came = groups[0].bring(back.pieces, source.window, owner.gets._copier, True)
        assert came.tolist() == [_bytes.MOVED] * N
    assert Window(0, 64, 4096).has(0, 4096)
    assert not Window(0, 64, 4096).has(0, 4097)
    assert not Window(0, 64, 8192).has(1, 4096), "it has one header"


def test_more_threads_than_lines_wait_for_one(caller: Caller) -> None:
    held = [caller.line(TIMEOUT_S) for _ in range(calling.LINES_MAX)]
    for one in held:
        one.__enter__()
    with pytest.raises(NoAnswer, match="others ask it all the time"):
        caller.ask(Publish(1), 0.01)
    for one in held:
        one.__exit__(None, None, None)
    assert isinstance(caller.ask(Publish(1), TIMEOUT_S), Published)
    assert len(caller._idle) == calling.LINES_MAX
    caller.close()
    with pytest.raises(NoAnswer, match="were ended"):
        caller.ask(Publish(1), TIMEOUT_S)


def test_a_line_in_use_when_its_caller_is_closed_ends_behind_that(caller: Caller) -> None:
    with caller.line(TIMEOUT_S) as line:
        caller.close()
        assert isinstance(line.ask(Publish(1), TIMEOUT_S), Published)
    assert line._socket.fileno() == -1


def test_a_line_that_came_too_late_to_ask_is_kept(caller: Caller) -> None:
    (line,) = caller._idle
    with pytest.raises(NoAnswer, match="does not answer in time"), caller.line(TIMEOUT_S):
        line.ask(Publish(1), 0.0)
    assert (caller._idle, caller._lines) == ([line], 1)
    assert isinstance(caller.ask(Publish(1), TIMEOUT_S), Published)


def test_what_a_line_refuses(line: Line, owner: Store) -> None:
    assert isinstance(line.ask(Greet(VERSION), TIMEOUT_S), Hello)
    assert isinstance(line.ask(Take(KEYS.tobytes(), SIG, 1000, 1000), TIMEOUT_S), Stored)
    for question, why in (
        (Take(keys(2).tobytes(), SIG, TRAY_BYTES // 2 + 1, 1000), "do not fit a tray"),
        (Done(), "the question cannot be read"),
        (Snapshot(-1, 2), "the question cannot be read"),
    ):
        found = line.ask(question, TIMEOUT_S)  # type: ignore[arg-type]
        assert isinstance(found, Refused)
        assert why in found.why
    assert len(owner) == N


def greeted(path: str, raw: bytes, fds: list[int]) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(TIMEOUT_S)
        one.connect(path)
        socket.send_fds(one, [raw], fds)
        return one.recv(CALL_BYTES_MAX)


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the log is there; before the owner is made."""
    monkeypatch.setattr(answering, "RateLimitedLog", partial(RateLimitedLog, every_s=0.0))


def test_who_is_not_let_in(every_line: None, calls: str, caplog: pytest.LogCaptureFixture) -> None:
    greeting = encode(Greet(VERSION))
    open_fd = os.memfd_create("open")
    os.ftruncate(open_fd, TRAY_BYTES)
    _, small_fd = Mapped.make(4096)
    _, bare_fd = Mapped.make(TRAY_BYTES)
    _, good_fd = Mapped.make(TRAY_BYTES + NONCE_NBYTES)
    assert decode_answer(greeted(calls, greeting, [])) == Refused("greet first")
    assert decode_answer(greeted(calls, encode(Publish(1)), [good_fd])) == Refused("greet first")
    assert "speaks version" in decode_answer(greeted(calls, encode(Greet(1)), [good_fd])).why  # type: ignore[union-attr]
    assert greeted(calls, b"\xc1", [good_fd]) == b""
    assert greeted(calls, greeting, [open_fd]) == b""
    assert "could be made shorter" in caplog.text
    assert greeted(calls, greeting, [small_fd]) == b""
    assert "a tray of 4096 bytes" in caplog.text
    assert greeted(calls, greeting, [bare_fd]) == b"", "there is no room for a nonce"
    assert f"a tray of {TRAY_BYTES} bytes" in caplog.text
    for one in (open_fd, small_fd, bare_fd, good_fd):
        os.close(one)


def test_a_client_that_says_nothing_or_reads_nothing_costs_a_thread_for_a_while(
    calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_SEND_TIMEOUT", struct.pack("ll", 0, 10_000))
    deaf_one = line_to(calls)  # Which needs time to greet.
    monkeypatch.setattr(answering, "GREETING_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.connect(calls)
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
    liar = Liar(directory / "liar", reply, [fd, fd])
    with pytest.raises(NoAnswer, match=why):
        line_to(str(directory / "liar"))
    liar.close()
    os.close(fd)
    with pytest.raises(NoAnswer, match="cannot be called"):
        line_to(str(directory / "nobody"))


def test_an_owner_that_sends_no_table(directory: Path) -> None:
    liar = Liar(directory / "liar", hello(), [])
    with pytest.raises(NoAnswer, match="it has sent no table"):
        line_to(str(directory / "liar"))
    liar.close()


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
    path = directory / "owner.calls"
    with (
        owning(config(directory, 8 * MIB, file=directory / "slab")) as owner,
        owner.answering(path),
        contextlib.closing(line_to(str(path))) as line,
    ):
        assert line.window is None
        assert isinstance(line.ask(Greet(VERSION), TIMEOUT_S), Hello)


def answerer_at(owner: Store, path: Path) -> Answerer:
    own = owner._owners.own
    assert own is not None
    return Answerer(own, path, lambda _: None, -1, lambda *_: Done())


def test_two_cannot_listen_at_one_path(owner: Store, calls: str) -> None:
    with pytest.raises(OSError, match="in use"):
        answerer_at(owner, Path(calls))


def test_an_owner_that_has_ended_leaves_no_socket(directory: Path) -> None:
    path = directory / "owner.calls"
    with owning(config(directory, 8 * MIB)) as owner, owner.answering(path):
        assert path.exists()
    assert not path.exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_closes_its_parents_store_ends_nothing_of_it(owner: Store, calls: str) -> None:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            owner.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    with contextlib.closing(line_to(calls)) as line:
        assert line.window is not None, "it is let in, as before"


def test_a_listener_that_was_shut_down_is_given_up(
    owner: Store, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a child of fork(2) can do."""
    answerer = answerer_at(owner, directory / "shut")
    answerer._listener.shutdown(socket.SHUT_RDWR)
    answerer._thread.join(TIMEOUT_S)
    assert not answerer._thread.is_alive()
    assert f"another process has ended {directory / 'shut'}: nobody is let in" in caplog.text
    answerer.close()
