# SPDX-License-Identifier: Apache-2.0
"""The socket over which programs of the same user ask a live process how it is."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from te_far import wait_until, wait_until_stopped

import te
from te import status
from te.status import StatusSocket, running

pytestmark = pytest.mark.pure

#: Whatever thread stands still for seconds.
TIMEOUT_S = 60.0
ask = functools.partial(status.ask, timeout_s=TIMEOUT_S)

#: A process that listens, says so, and does what follows.
LISTENS = """
import os, sys, time
from pathlib import Path
from te.status import StatusSocket
one = StatusSocket(Path(sys.argv[1]), "far", {"pid": lambda _: os.getpid()})
"""


#: In the log.
LET_GO = "a connection ended without an answer: "


def raises(_: Any) -> Any:
    raise RuntimeError("no reason")


def refuses(_: Any) -> Any:
    raise te.StatusSocketError("there is no room 17")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CONNECTION_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a" / "status"


@pytest.fixture
def listening(directory: Path) -> Iterator[StatusSocket]:
    answers = {
        "echo": lambda arguments: arguments,
        "raises": raises,
        "refuses": refuses,
        "object": lambda _: object(),
        "large": lambda arguments: bytes(arguments["nbytes"]),
    }
    one = StatusSocket(directory, "x1", answers)
    yield one
    assert one.close(TIMEOUT_S)


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(str(path))
        yield sock


@contextlib.contextmanager
def process(directory: Path, then: str) -> Iterator[subprocess.Popen[bytes]]:
    """One that listens there, and goes on with ``then``; its socket is there."""
    command = [sys.executable, "-W", "ignore", "-c", LISTENS + then, str(directory)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline() == b"listens\n"
            yield one
        finally:
            one.kill()


def age(path: Path) -> None:
    past_s = time.time() - status.STALE_AGE_S - 1
    os.utime(path, (past_s, past_s))


# -- questions


def test_a_question_is_answered_with_its_arguments(listening: StatusSocket) -> None:
    assert ask(listening.path, "echo", {"room": 7, "deep": [1, {"a": None}]}) == {
        "room": 7,
        "deep": [1, {"a": None}],
    }
    assert ask(listening.path, "echo") == {}


def test_the_directory_is_made_for_its_user_alone(listening: StatusSocket) -> None:
    assert listening.path.parent.stat().st_mode & 0o777 == 0o700
    assert listening.path.name == f"{os.getpid()}-x1.sock"


def test_an_unknown_question_names_those_that_are_known(listening: StatusSocket) -> None:
    with pytest.raises(te.StatusSocketError, match="no question 'who'; known are: echo, large"):
        ask(listening.path, "who")


def test_an_answer_that_fails_is_logged_and_the_next_is_given(
    listening: StatusSocket, caplog: pytest.LogCaptureFixture
) -> None:
    for question in ("raises", "object"):
        caplog.clear()
        with pytest.raises(
            te.StatusSocketError, match=f"the answer to {question!r} failed: .*Error"
        ):
            ask(listening.path, question)
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert record.exc_info is not None
    assert ask(listening.path, "echo", {"a": 1}) == {"a": 1}


def test_an_answer_that_refuses_says_why_without_a_line_in_the_log(
    listening: StatusSocket, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(te.StatusSocketError, match=r"^there is no room 17$"):
        ask(listening.path, "refuses")
    assert not caplog.records


def test_an_answer_has_a_largest_size(listening: StatusSocket) -> None:
    room = status.ANSWER_BYTES_MAX - 1024
    nbytes = room - 5  # MessagePack's head of bytes
    assert len(ask(listening.path, "large", {"nbytes": nbytes})) == nbytes
    with pytest.raises(te.StatusSocketError, match=f"has {room + 1} bytes, and may have {room}"):
        ask(listening.path, "large", {"nbytes": nbytes + 1})


# -- what no program of ours says


def deep() -> bytes:
    arguments: Any = 1
    for _ in range(20):
        arguments = [arguments]
    return msgspec.msgpack.encode({"question": "echo", "arguments": {"a": arguments}})


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (struct.pack("!I", (64 << 10) + 1), "a message of 65537 bytes; 65536 are allowed"),
        (struct.pack("!I", 3) + b"\x81\xa1", "the message is not whole"),
        (struct.pack("!I", 4)[:2], "the message is not whole"),
        (struct.pack("!I", 1) + b"\xc1", "this is no message of te's status"),
        (struct.pack("!I", len(deep())) + deep(), "nested more than 16 levels"),
    ],
)
def test_what_is_no_question_ends_its_connection_alone(
    listening: StatusSocket, caplog: pytest.LogCaptureFixture, body: bytes, complaint: str
) -> None:
    caplog.set_level(logging.INFO)
    with connected(listening.path) as sock:
        sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # It has not read all.
            assert sock.recv(1) == b""
    assert ask(listening.path, "echo", {"a": 1}) == {"a": 1}
    assert complaint in caplog.text


@pytest.mark.parametrize("begun", [b"", b"\0\0"])
def test_who_says_nothing_is_let_go(
    listening: StatusSocket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    begun: bytes,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(status, "CONNECTION_TIMEOUT_S", 0.05)
    with connected(listening.path) as sock:
        with contextlib.suppress(BrokenPipeError):  # It was let go before this.
            sock.sendall(begun)
        wait_until(lambda: LET_GO in caplog.text, "it is let go")
        monkeypatch.setattr(status, "CONNECTION_TIMEOUT_S", TIMEOUT_S)
        assert ask(listening.path, "echo", {"a": 1}) == {"a": 1}
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@pytest.mark.parametrize("answer", [b"\x91" * (1 << 17) + b"\xc0", b"\xa1\xff"])
def test_what_is_no_answer_is_an_error(directory: Path, answer: bytes) -> None:
    """As another user's process may give to root."""
    directory.mkdir(parents=True, mode=0o700)
    reply = b"\x81\xa6answer" + answer
    path = directory / "7-liar.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def lie() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1 << 12)
                sock.sendall(struct.pack("!I", len(reply)) + reply)

        liar = threading.Thread(target=lie)
        liar.start()
        with pytest.raises(te.StatusSocketError, match="no message of te's status"):
            ask(path, "engine", timeout_s=TIMEOUT_S)
        liar.join()


def test_who_does_not_take_the_answer_is_let_go(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def large(_: Any) -> bytes:
        monkeypatch.setattr(status, "CONNECTION_TIMEOUT_S", 0.05)  # The question has come.
        return bytes(8 << 20)

    caplog.set_level(logging.INFO)
    one = StatusSocket(directory, "x1", {"large": large, "echo": lambda arguments: arguments})
    request = msgspec.msgpack.encode({"question": "large", "arguments": {}})
    with connected(one.path) as sock:
        sock.sendall(struct.pack("!I", len(request)) + request)
        wait_until(lambda: LET_GO in caplog.text, "it is let go")
        monkeypatch.setattr(status, "CONNECTION_TIMEOUT_S", TIMEOUT_S)
        assert ask(one.path, "echo", {"a": 1}) == {"a": 1}
    assert one.close(TIMEOUT_S)


def ask_as(uid: int, path: Path) -> None:
    """From a process of that user, to which nothing must be said."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setuid(uid)
            with connected(path) as sock:
                os._exit(sock.recv(1) != b"")
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_other_users_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if they get at the socket."""
    caplog.set_level(logging.INFO)
    own = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        listening = StatusSocket(Path(name), "a", {})
        if own == 0:
            Path(name).chmod(0o777)
            listening.path.chmod(0o777)
            ask_as(65534, listening.path)
            refused = "user 65534 asks"
        else:
            monkeypatch.setattr(os, "geteuid", lambda: own + 1)
            ask_as(own, listening.path)
            refused = f"user {own} asks"
        wait_until(lambda: refused in caplog.text, "it is logged")
        assert listening.close(TIMEOUT_S)


# -- directories


def test_a_directory_that_others_may_enter_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o750)
    for use in (lambda: StatusSocket(directory, "a", {}), lambda: running(directory)):
        with pytest.raises(te.StatusSocketError, match=r"mode 0750, .* run 'chmod 700"):
            use()
    assert not list(directory.iterdir())


def test_a_directory_of_another_user_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(parents=True, mode=0o700)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    for use in (lambda: StatusSocket(directory, "a", {}), lambda: running(directory)):
        with pytest.raises(
            te.StatusSocketError, match=f"belongs to user {own}, not to user {own + 1}"
        ):
            use()


def test_root_looks_into_directories_of_others_but_does_not_listen_there(
    listening: StatusSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = listening.path.parent
    if os.geteuid() == 0:
        os.chown(directory, 1234, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert [one.path for one in running(directory)] == [listening.path]
    with pytest.raises(
        te.StatusSocketError, match=f"belongs to user {directory.stat().st_uid}, not"
    ):
        StatusSocket(directory, "a", {})


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(te.StatusSocketError, match=f"{name}"):
            StatusSocket(tmp_path / name, "a", {})


def test_a_long_directory_does(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100) / ("e" * 100)
    one = StatusSocket(directory, "a", {"pid": lambda _: os.getpid()})
    assert ask(one.path, "pid") == os.getpid()
    assert [found.path for found in running(directory)] == [one.path]
    assert one.close(TIMEOUT_S)


@pytest.mark.parametrize("name", ["", "a/b", "a" * 65])
def test_a_name_that_is_no_file_name_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(te.StatusSocketError, match="cannot be the name"):
        StatusSocket(directory, name, {})


def test_where_sockets_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path(f"/tmp/te-{os.geteuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert status.default_directories() == (tmp_path / "te", shared)
    assert te.Config().status_dir == status.default_directory() == tmp_path / "te"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert status.default_directories() == (shared,)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert status.default_directory() == shared
    own = os.geteuid()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert status.default_directory() == Path(f"/tmp/te-{own + 1}")


def test_all_directories_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = (tmp_path / "a", tmp_path / "b", tmp_path / "missing")
    monkeypatch.setattr(status, "default_directories", lambda: places)
    both = [StatusSocket(place, "x", {}) for place in places[:2]]
    assert [one.path for one in running()] == [one.path for one in both]
    assert all(one.close(TIMEOUT_S) for one in both)


# -- lives


def test_live_processes_are_found(listening: StatusSocket) -> None:
    directory = listening.path.parent
    with process(directory, "print('listens', flush=True); sys.stdin.read()") as far:
        mine = status.Live(listening.path, os.getpid(), "x1")
        other = status.Live(directory / f"{far.pid}-far.sock", far.pid, "far")
        assert set(running(directory)) == {mine, other}
        assert ask(other.path, "pid") == far.pid


def test_what_a_dead_process_has_left_is_removed(listening: StatusSocket) -> None:
    directory = listening.path.parent
    with process(directory, "print('listens', flush=True); sys.stdin.read()") as far:
        far.kill()
        far.wait(60)
        left = directory / f"{far.pid}-far.sock"
        with pytest.raises(te.StatusSocketError, match="cannot be asked: Connection refused"):
            ask(left, "pid")
        now_s = time.time() + TIMEOUT_S
        os.utime(left, (now_s, now_s))  # It stays young, however long this takes.
        assert [one.pid for one in running(directory)] == [os.getpid()]
        assert left.exists()  # As it may be about to listen.
        age(left)
        age(listening.path)
        other = StatusSocket(directory, "other", {})
        assert other.close(TIMEOUT_S)
        assert not left.exists()
        assert [one.pid for one in running(directory)] == [os.getpid()]


def test_a_child_does_not_answer_for_its_parent(directory: Path) -> None:
    """A child of fork(2) has the parent's descriptors."""
    then = """
if os.fork() == 0:
    one.close()  # It is not the child's to remove.
    print("listens", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    with process(directory, then) as far:
        (found,) = running(directory)
        assert ask(found.path, "pid") == far.pid
        far.kill()
        far.wait(60)
        assert running(directory) == []


def test_a_process_that_was_stopped_lives(directory: Path) -> None:
    with process(directory, "print('listens', flush=True); sys.stdin.read()") as far:
        os.kill(far.pid, signal.SIGSTOP)
        wait_until_stopped(far.pid)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2 * status.BACKLOG)]
        (found,) = running(directory)
        with contextlib.suppress(BlockingIOError):
            for one in waiting:
                one.setblocking(False)
                one.connect(str(found.path))
        assert [one.pid for one in running(directory)] == [far.pid]
        with pytest.raises(te.StatusSocketError, match=r"did not answer 'pid' within 0.1 s"):
            ask(found.path, "pid", timeout_s=0.1)
        for one in waiting:
            one.close()


def test_after_close_nobody_answers(directory: Path) -> None:
    one = StatusSocket(directory, "a", {"close": lambda _: one.close()})
    assert ask(one.path, "close") is False  # It did not wait for itself.
    wait_until(one.close, "the thread has ended")
    assert not one.path.exists()
    with pytest.raises(te.StatusSocketError, match="No such file"):
        ask(one.path, "close")


# -- engines


def test_every_engine_answers(directory: Path) -> None:
    with te.Engine(te.Config(status_dir=directory)) as engine:
        assert engine.status_path == directory / f"{os.getpid()}-{engine.id}.sock"
        answer = ask(engine.status_path, "engine")
        assert (answer["id"], answer["pid"]) == (engine.id, os.getpid())
        assert answer["stats"]["bytes_sent"] == 0
        engine.add_answers({"rooms": lambda arguments: [arguments["n"]]})
        assert ask(engine.status_path, "rooms", {"n": 3}) == [3]
    assert running(directory) == []
    assert not list(directory.iterdir())


def test_an_engine_that_nobody_may_ask(tmp_path: Path) -> None:
    with te.Engine(te.Config(status_dir=None)) as engine:
        assert engine.status_path is None


def test_an_engine_works_where_it_cannot_be_asked(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with te.Engine(te.Config(status_dir=directory)) as engine:
        assert engine.status_path is None
        assert engine.card()
    assert "cannot ask this engine how it is: the status directory" in caplog.text
    assert "run 'chmod 700" in caplog.text
