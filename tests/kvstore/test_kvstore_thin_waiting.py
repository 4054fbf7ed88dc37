# SPDX-License-Identifier: Apache-2.0
"""What a thin client does not wait for, and how long it waits at most; what a process has whose
address space is limited."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_host import end_all, owner_here, shared
from store_makers import SIG, TIMEOUT_S, until
from store_objects import KEYS, NBYTES, N, put_all

from kvstore.client.deadline import Deadline
from kvstore.host.pool import HostPool
from kvstore.objects.outcomes import Got
from kvstore.owner import answering
from kvstore.protocol import calling
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller, Line
from kvstore.protocol.messages import (
    TRAY_BYTES,
    VERSION,
    Greet,
    Hello,
    InMemory,
    Promote,
    Touch,
)
from kvstore.rules.tiered_table import PromotionState
from kvstore.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def host(directory: Path) -> Iterator[Store]:
    """Uses the owner of its host, which is another process."""
    try:
        with Store(shared(directory)) as store:
            yield store
    finally:
        end_all(directory)


def pool_of(store: Store) -> HostPool:
    pool = store._owners
    assert isinstance(pool, HostPool)
    assert pool._link is not None
    return pool


def asks_nothing(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool._link is not None

    def fail(*_: object) -> None:
        raise AssertionError("the owner was asked, and waited for")

    monkeypatch.setattr(pool._link.caller, "ask", fail)


def test_a_get_that_finds_corrupted_objects_does_not_wait_until_they_are_removed(
    host: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(host)
    asks_nothing(pool_of(host), monkeypatch)
    outcomes = [Got.CORRUPTED] * 3 + [Got.RIGHT] * (N - 3)
    host.conclude_gets(KEYS, SIG, outcomes, NBYTES)
    until(lambda: host.exists(KEYS, SIG, NBYTES).tolist() == [False] * 3 + [True] * (N - 3))


def test_copies_are_not_waited_for_behind_a_put_s_deadline(
    host: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_all(host)
    pool, times = pool_of(host), list[float]()
    assert pool._link is not None
    former = Line.ask

    def ask(line: Line, question: Any, timeout_s: float) -> Any:
        times.append(timeout_s)
        return former(line, question, timeout_s)

    monkeypatch.setattr(Line, "ask", ask)
    pool.copy(KEYS, SIG, NBYTES, 2, Deadline(TIMEOUT_S / 2))
    assert 0.0 < times[0] <= TIMEOUT_S / 2
    over = Deadline(TIMEOUT_S)
    over.end()
    with caplog.at_level(logging.WARNING):
        pool.copy(KEYS, SIG, NBYTES, 2, over)
    assert f"{N} objects may have fewer copies than wanted" in caplog.text


def test_a_new_line_has_the_time_that_is_left(host: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    link = pool_of(host)._link
    assert link is not None
    now_s, given = 100.0, list[float]()

    class Made:
        def __init__(self, _: str, __: str, timeout_s: float, *___: object) -> None:
            given.append(timeout_s)
            raise NoAnswer("made")

    def take(_: Caller, timeout_s: float, is_slow: bool) -> None:
        nonlocal now_s
        link.caller._slow += is_slow
        now_s += timeout_s / 4
        link.caller._lines += 1

    monkeypatch.setattr(calling.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(Caller, "_take", take)
    monkeypatch.setattr(calling, "Line", Made)
    with pytest.raises(NoAnswer, match="made"), link.caller.line(8.0):
        pass
    assert given == [6.0]


def test_an_owner_waits_no_longer_than_is_left_behind_the_wait_for_a_line(
    host: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, now_s, asked = pool_of(host).handle(0), 100.0, list[tuple[int, float]]()
    assert handle is not None
    former, waits_s = Caller._take, iter([0.0, 7.5, 11.0])

    def take(caller: Caller, timeout_s: float, is_slow: bool) -> Line | None:
        nonlocal now_s
        now_s += next(waits_s)
        return former(caller, timeout_s, is_slow)

    def ask(_: Line, question: Promote, timeout_s: float) -> InMemory:
        asked.append((question.timeout_ms, timeout_s))
        return InMemory([], b"", b"")

    monkeypatch.setattr(handle, "_timeout_s", 10.0)
    monkeypatch.setattr(calling.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(Caller, "_take", take)
    monkeypatch.setattr(Line, "ask", ask)
    for _ in range(3):
        handle.promote(KEYS[:0], SIG, NBYTES, 60.0)
    monkeypatch.undo()
    assert asked == [(8000, 10.0), (2000, 2.5), (0, -1.0)]


def test_who_has_waited_longest_for_a_line_has_the_next(host: Store, directory: Path) -> None:
    """Of four threads that asked again and again, and as many others, one was never served."""
    path = str(directory / "owner.calls")
    caller = Caller(path, "abc", TIMEOUT_S, lambda _: None)
    held = [contextlib.ExitStack() for _ in range(calling.LINES_MAX)]
    lines = [one.enter_context(caller.line(TIMEOUT_S)) for one in held]
    came, over = list[str](), threading.Event()

    def ask(name: str) -> None:
        with contextlib.suppress(NoAnswer), caller.line(TIMEOUT_S):
            came.append(name)
            over.wait(TIMEOUT_S)

    threads = [threading.Thread(target=ask, args=[name]) for name in "abcd"]
    for count, thread in enumerate(threads):
        thread.start()
        until(lambda count=count: len(caller._turns) == count + 1, "it waits")
    held[0].close()
    with pytest.raises(NoAnswer, match="others ask it all the time"), caller.line(0.0):
        pass
    until(lambda: came == ["a"], "the first one has it")
    held[1].close()
    until(lambda: came == ["a", "b"], "then the second")
    lines[2].asked += 1
    assert not held[2].__exit__(OSError, OSError("its line has ended"), None)
    until(lambda: came == ["a", "b", "c"], "the third one has made one")
    caller.close()
    threads[3].join(TIMEOUT_S)
    assert not threads[3].is_alive(), "it is not waited for lines that were ended"
    over.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    held[3].close()
    assert came == ["a", "b", "c"]
    assert (caller._lines, caller._idle) == (calling.LINES_MAX, [])


def test_a_put_does_not_wait_for_what_comes_from_other_hosts(host: Store) -> None:
    """One line stays for questions that the host's owner answers by itself."""
    pool = pool_of(host)
    assert pool._link is not None
    caller, handle = pool._link.caller, pool.handle(0)
    assert handle is not None
    promoted = list[object]()

    def promote() -> None:
        promoted.append(handle.promote(KEYS, SIG, NBYTES, TIMEOUT_S)[0].state)

    with contextlib.ExitStack() as held:
        for _ in range(calling.SLOW_MAX):
            slow = held.enter_context(contextlib.ExitStack())
            slow.enter_context(caller.line(TIMEOUT_S, is_slow=True))
        thread = threading.Thread(target=promote)
        thread.start()
        until(lambda: caller._turns, "it waits")
        put_all(host)
        assert not promoted
        slow.close()
        thread.join(TIMEOUT_S)
        assert promoted == [PromotionState.HERE]
    assert (caller._slow, caller._lines) == (0, calling.LINES_MAX)


def test_of_lines_that_nobody_uses_one_keeps_a_large_tray(host: Store) -> None:
    """Four of a large object each would be a quarter of a GiB, for as long as the process lives."""
    link = pool_of(host)._link
    assert link is not None
    caller = link.caller
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(caller.line(TIMEOUT_S, 2 * TRAY_BYTES)) for _ in range(3)]
        small = stack.enter_context(caller.line(TIMEOUT_S))
    assert small in caller._idle
    assert sum(one in caller._idle for one in lines) == 1
    assert caller._lines == len(caller._idle) == 2
    assert isinstance(caller.ask(Greet(VERSION), TIMEOUT_S), Hello)


def test_what_is_told_has_its_turn_and_does_not_wait_long_for_it(
    host: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load all lines are handed on, and none is idle."""
    caller = Caller(str(directory / "owner.calls"), "abc", TIMEOUT_S, lambda _: None)
    held = [contextlib.ExitStack() for _ in range(calling.LINES_MAX)]
    for one in held:
        one.enter_context(caller.line(TIMEOUT_S))
    told, touch = list[Any](), Touch(KEYS.tobytes(), SIG)
    monkeypatch.setattr(Line, "tell", lambda _, question: told.append(question))
    monkeypatch.setattr(calling, "TELL_TIMEOUT_S", 0.01)
    caller.tell([touch])
    assert told == []
    monkeypatch.setattr(calling, "TELL_TIMEOUT_S", TIMEOUT_S)
    thread = threading.Thread(target=caller.tell, args=[[touch]])
    thread.start()
    until(lambda: caller._turns, "it waits")
    held[0].close()
    thread.join(TIMEOUT_S)
    assert told == [touch]
    for one in held:
        one.close()
    caller.close()


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_line_that_comes_while_its_thread_is_interrupted_is_not_lost(
    host: Store, directory: Path, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    caller = Caller(str(directory / "owner.calls"), "abc", TIMEOUT_S, lambda _: None)
    held = [contextlib.ExitStack() for _ in range(calling.LINES_MAX)]
    (line, *_) = [one.enter_context(caller.line(TIMEOUT_S)) for one in held]

    class Interrupted(threading.Event):
        def wait(self, _: float | None = None) -> bool:
            if is_ended:
                line.asked += 1
                held[0].__exit__(OSError, OSError("its line has ended"), None)
            held[0].close()
            assert self.is_set(), "the turn has come"
            raise KeyboardInterrupt

    monkeypatch.setattr(calling.threading, "Event", Interrupted)
    with pytest.raises(KeyboardInterrupt), caller.line(TIMEOUT_S):
        pass
    left = calling.LINES_MAX - is_ended
    assert (caller._idle, caller._lines) == ([] if is_ended else [line], left)
    for one in held[1:]:
        one.close()
    caller.close()


def test_an_owner_that_does_not_read_is_told_nothing_and_not_waited_for() -> None:
    line = Line.__new__(Line)
    line.asked = 0
    line._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line._socket.settimeout(TIMEOUT_S)
    with line._socket, far:
        for _ in range(10_000):
            line.tell(Touch(KEYS.tobytes(), SIG))
        line.close()
        assert 0 < sum(1 for _ in iter(partial(far.recv, 1 << 16), b"")) < 10_000


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (1, "it cannot be called by more: 1 connections of this host are open"),
        (0, "it is tried again"),
    ],
)
def test_whoever_comes_when_all_lines_are_in_use_is_told_so(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    told: int,
    why: str,
) -> None:
    """It serves without the store, and has it as soon as another process has gone."""
    monkeypatch.setattr(answering, "LINES_MAX", 1)
    monkeypatch.setattr(answering, "REFUSED_MAX", told)
    settings = shared(directory)
    with owner_here(settings), contextlib.ExitStack() as stack:
        first = stack.enter_context(Store(settings))
        put_all(first)
        with Store(settings) as second:
            assert why in caplog.text
            assert not second.exists(KEYS, SIG, NBYTES).any()
            stack.close()
            until(lambda: second.exists(KEYS, SIG, NBYTES).all(), "it is let in")


def test_te_connects_when_memory_is_registered_and_else_in_the_lease_s_thread(
    host: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = put_all(host)
    host.deregister(room.region)
    pool, threads = pool_of(host), list[str]()
    link, former = pool._link, pool.connect_by_te
    assert link is not None

    def connect() -> None:
        threads.append(threading.current_thread().name)
        former()

    monkeypatch.setattr(pool, "connect_by_te", connect)
    room.region = host.register(room.bytes.ctypes.data, room.bytes.nbytes)
    assert threads == ["MainThread"]
    assert link.live_peer is not None
    assert host.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
    link.peer.close()  # type: ignore[union-attr]
    until(lambda: link.live_peer is None)
    del threads[:]
    assert host.get(KEYS, SIG, room.pieces) == [Got.UNREACHABLE] * N
    until(lambda: link.live_peer is not None, "it is connected to again")
    assert set(threads) == {"kvstore-host"}
    assert host.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N


LIMITED = """
import logging, resource, sys
from pathlib import Path
logging.basicConfig()
resource.setrlimit(resource.{limit}, ({nbytes}, {nbytes}))
from store_host import shared
from store_makers import SIG, Room, config
from store_objects import KEYS, N, NBYTES, put_all
from kvstore.objects.outcomes import Got
from kvstore.owner import answering
from kvstore.store import Store
with Store({make}(Path(sys.argv[1]), 16 << 20)) as store:
    {then}
"""
WORKS = """
    room = put_all(store)
    back = Room(store, N, NBYTES)
    assert store.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
""".strip()


def limited(directory: Path, **words: Any) -> subprocess.CompletedProcess[str]:
    program = LIMITED.format(**words)
    path = ":".join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        env={"PYTHONPATH": path, "HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("make", ["config", "shared"])
@pytest.mark.parametrize(("limit", "nbytes"), [("RLIMIT_AS", 8 << 30), ("RLIMIT_FSIZE", 64 << 20)])
def test_limits_of_a_process_do_not_keep_the_store_from_starting(
    directory: Path, limit: str, nbytes: int, make: str
) -> None:
    try:
        ended = limited(directory, limit=limit, nbytes=nbytes, make=make, then=WORKS)
        assert ended.returncode == 0, ended.stderr
    finally:
        end_all(directory)


def test_a_table_that_a_limited_process_cannot_map_is_said(host: Store, directory: Path) -> None:
    put_all(host)
    ended = limited(
        directory,
        limit="RLIMIT_AS",
        nbytes=8 << 30,
        make="shared",
        then="assert not store.exists(KEYS, SIG, NBYTES).any()",
    )
    assert ended.returncode == 0, ended.stderr
    assert "cannot be mapped; raise this process's limit of address space" in ended.stderr
