# SPDX-License-Identifier: Apache-2.0
"""Large puts to the owner of the host: it reads the objects in the client's memory, and stores them
once the client says that they have not changed meanwhile."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_host import end_all, shared
from store_makers import SIG, TIMEOUT_S, Room, config, contents, keys, until
from store_meeting import owning
from store_objects import KEYS, MIB

from kvstore.client.deadline import Deadline
from kvstore.host.pool import HostPool
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Got, Put
from kvstore.owner.answering import Answerer
from kvstore.owner.owner import Owner
from kvstore.owning import OwningStore
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Line
from kvstore.protocol.mapped import Mapped
from kvstore.protocol.messages import (
    TRAY_BYTES,
    Answer,
    Done,
    Fetch,
    Fetched,
    Greet,
    Keep,
    Question,
    Refused,
    Take,
    Unread,
)
from kvstore.protocol.reach import NONCE_NBYTES
from kvstore.store import Store

pytestmark = pytest.mark.slow

NAMES = keys(3, 41)
F_SEAL_FUTURE_WRITE = 0x10  # Python 3.13 has it.


@pytest.fixture
def host(directory: Path) -> Iterator[Store]:
    """Uses the owner of its host, which is another process and can read this one's memory."""
    try:
        with Store(shared(directory, 64 * MIB)) as store:
            pool = store._owners
            assert isinstance(pool, HostPool)
            assert pool._link is not None
            assert pool._link.caller.hello.reads
            yield store
    finally:
        end_all(directory)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[type[Question]]:
    """The kinds of questions to the owner."""
    kinds, former = list[type[Question]](), Line.ask

    def ask(line: Line, question: Question, timeout_s: float) -> Answer:
        kinds.append(type(question))
        return former(line, question, timeout_s)

    monkeypatch.setattr(Line, "ask", ask)
    return kinds


def large(store: Store) -> Room:
    room = Room(store, 3, MIB)
    room.bytes[:] = contents(3, MIB)
    return room


def is_stored(store: Store, room: Room) -> bool:
    back = Room(store, 3, MIB)
    return store.get(NAMES, SIG, back.pieces) == [Got.RIGHT] * 3 and bool(
        (back.bytes == room.bytes).all()
    )


def test_the_owner_reads_what_is_large(host: Store, asked: list[type[Question]]) -> None:
    room = large(host)
    pieces = room.split(9, 300_000, MIB - 300_009)
    assert host.put(NAMES, SIG, pieces) == [Put.STORED] * 3
    assert asked == [Fetch, Keep]
    assert is_stored(host, room)
    del asked[:]
    assert host.put(NAMES, SIG, pieces) == [Put.EXISTS] * 3
    assert asked == [], "the table says so"
    assert host.put(keys(2, 42), SIG, pieces.between(0, 2)) == [Put.STORED] * 2
    assert asked == [Take], "they fit the tray"


def test_many_are_read_for_several_questions(
    host: Store, asked: list[type[Question]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.host.handle.FETCH_BYTES", 2 * MIB)
    room = large(host)
    assert host.put(NAMES, SIG, room.pieces) == [Put.STORED] * 3
    assert asked == [Fetch, Keep] * 2
    assert is_stored(host, room)


def test_small_pieces_come_through_the_tray(host: Store, asked: list[type[Question]]) -> None:
    room = large(host)
    sizes = [1024] * (MIB // 1024)
    assert host.put(NAMES, SIG, room.split(*sizes)) == [Put.STORED] * 3
    assert asked == [Take] * 2
    assert is_stored(host, room)


def test_an_object_with_more_pieces_than_the_tray_names_comes_through_it(
    host: Store, asked: list[type[Question]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.host.handle.TRAY_BYTES", 4096)
    room = large(host)
    for count, kinds in ((255, [Fetch, Keep] * 3), (256, [Fetch, Keep] * 3), (512, [Take] * 3)):
        sizes = [MIB // count] * (count - 1)
        pieces = room.split(*sizes, MIB - sum(sizes))
        assert host.put(keys(3, count), SIG, pieces) == [Put.STORED] * 3
        assert asked == kinds
        del asked[:]


def test_memory_that_cannot_be_read_comes_through_the_tray(
    host: Store, asked: list[type[Question]]
) -> None:
    """As if another program had taken the process's number."""
    room = large(host)
    change_nonce(host._owners._link.caller._idle[-1])  # type: ignore[attr-defined]
    assert host.put(NAMES, SIG, room.pieces) == [Put.STORED] * 3
    assert asked == [Fetch, Take, Take]
    assert is_stored(host, room)


def test_a_later_line_that_cannot_be_read_has_a_tray(
    host: Store, asked: list[type[Question]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Yama, or the process itself, had forbidden it meanwhile."""
    room, caller = large(host), host._owners._link.caller  # type: ignore[attr-defined]
    monkeypatch.setattr("kvstore.protocol.calling.Greet", lambda version, _: Greet(version, 4096))
    with caller.line(TIMEOUT_S):
        assert host.put(NAMES, SIG, room.pieces) == [Put.STORED] * 3
    assert asked == [Fetch, Take, Take]
    assert is_stored(host, room)


def test_a_source_that_was_used_again_meanwhile_is_not_stored(
    host: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, deadline, former = large(host), Deadline(TIMEOUT_S), Line.ask

    def ask(line: Line, question: Question, timeout_s: float) -> Answer:
        answer = former(line, question, timeout_s)
        assert isinstance(question, Fetch)
        assert isinstance(answer, Fetched)
        deadline.end()
        return answer

    monkeypatch.setattr(Line, "ask", ask)
    assert host.put(NAMES, SIG, room.pieces, deadline=deadline) == [Put.TIMED_OUT] * 3
    monkeypatch.undo()
    assert not host.exists(NAMES, SIG, MIB).any()
    until(lambda: host.put(NAMES, SIG, room.pieces) == [Put.STORED] * 3, "the slots are free")
    assert is_stored(host, room)


Fork = Callable[[], int]


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["Python", "C"])
@pytest.mark.parametrize("nbytes", [MIB, 4096])
def test_a_child_stores_nothing_over_its_parent_s_lines(
    fork: Fork, nbytes: int, host: Store
) -> None:
    """The owner would read the parent's memory where the child means its own."""
    room = large(host)
    pieces = room.pieces.cut(0, nbytes)
    pid = fork()
    if not pid:
        try:
            room.bytes[:] = 2
            is_refused = host.put(NAMES, SIG, pieces) == [Put.UNREACHABLE] * 3
            os._exit(0 if is_refused else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert not host.exists(NAMES, SIG, nbytes).any()
    assert host.put(NAMES, SIG, room.pieces) == [Put.STORED] * 3, "the parent's lines work"
    assert is_stored(host, room)


def test_a_child_that_stays_keeps_no_line_open(host: Store) -> None:
    caller = host._owners._link.caller  # type: ignore[attr-defined]
    with caller.line(TIMEOUT_S) as line:  # As if another thread had it.
        assert line is not None
        pid = os.fork()
        if not pid:
            closed = line._socket.fileno() == -1 and not caller.alive
            os._exit(0 if closed else 1)
        assert os.waitpid(pid, 0) == (pid, 0)
    assert caller._idle == [line]


# -- what the owner answers


@pytest.fixture
def lender(directory: Path) -> Iterator[OwningStore]:
    with owning(config(directory, 64 * MIB, claim_timeout_s=TIMEOUT_S)) as store:
        yield store


Connect = Callable[..., Line]


@pytest.fixture
def connect(lender: OwningStore, directory: Path) -> Iterator[Connect]:
    """Makes lines to an owner in this process, which reads its own memory."""
    path, lines = directory / "owner.calls", list[Line]()

    def made() -> Line:
        line = Line(str(path), "abc", TIMEOUT_S, lambda _: None)
        lines.append(line)
        return line

    with lender.answering(path) as answerer:
        assert isinstance(answerer, Answerer)
        yield made
        for line in lines:
            line.close()


def fetch(line: Line, room: Room, sizes: list[int], **other: Any) -> Answer:
    """Asks for all of a room."""
    told = np.frombuffer(line.tray.memory, "<u8", (len(room.bytes) + 1) * len(sizes))
    starts = room.pieces.addresses + np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    told[:] = [*starts.reshape(-1).tolist(), *sizes]
    words = {"keys": NAMES.tobytes(), "nbytes": MIB, "pieces": len(sizes)} | other
    question = Fetch(words["keys"], SIG, words["nbytes"], words["pieces"])
    return line.ask(question, TIMEOUT_S)


def change_nonce(line: Line) -> None:
    """As if another program lay at the tray's address."""
    line.tray.memory[line.tray.nbytes - NONCE_NBYTES :] = bytes(NONCE_NBYTES)


def used(store: Store) -> int:
    own = store.status().own
    assert own is not None
    return own.bytes_used


def test_what_is_fetched_is_stored_with_the_client_s_word(
    lender: OwningStore, connect: Connect
) -> None:
    room, line = large(lender), connect()
    assert line.hello.reads
    assert fetch(line, room, [MIB]) == Fetched(["granted"] * 3)
    assert not lender.exists(NAMES, SIG, MIB).any()
    assert line.ask(Keep(), TIMEOUT_S) == Done()
    assert is_stored(lender, room)
    assert fetch(line, room, [MIB]) == Fetched(["exists"] * 3)
    assert line.ask(Keep(), TIMEOUT_S) == Refused("nothing was fetched")


def test_a_client_that_ends_costs_no_slots(lender: OwningStore, connect: Connect) -> None:
    room, line = large(lender), connect()
    before = used(lender)
    assert isinstance(fetch(line, room, [MIB]), Fetched)
    assert used(lender) > before
    line.close()
    until(lambda: used(lender) == before, "the slots are free")
    assert not lender.exists(NAMES, SIG, MIB).any()


def test_a_client_that_says_nothing_more_costs_slots_until_the_claim_s_deadline(
    lender: OwningStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Owner, "claim_timeout_s", 0.2)
    room, line = large(lender), connect()
    before = used(lender)
    assert isinstance(fetch(line, room, [MIB]), Fetched)
    until(lambda: used(lender) == before, "the slots are free")
    with pytest.raises(NoAnswer):
        line.ask(Keep(), TIMEOUT_S)
    assert not lender.exists(NAMES, SIG, MIB).any()


def test_a_client_that_was_granted_nothing_may_be_silent(
    directory: Path, asked: list[type[Question]]
) -> None:
    """It has nothing to keep, and no claim that could be overdue."""
    try:
        with Store(shared(directory, 64 * MIB, claim_timeout_s=0.2)) as store:
            chunk = Room(store, 1, 8 * MIB)
            assert store.put(NAMES[:1], SIG, chunk.pieces) == [Put.TOO_LARGE]
            assert asked == [Fetch]
            time.sleep(0.5)
            assert store.put(NAMES, SIG, large(store).pieces.cut(0, 4096)) == [Put.STORED] * 3
    finally:
        end_all(directory)


def asking_in_vain(line: Line, room: Room) -> threading.Thread:
    """A thread that asks for one object to be fetched, and gets no answer."""

    def ask() -> None:
        with pytest.raises(NoAnswer):
            fetch(line, room, [MIB])

    asking = threading.Thread(target=ask)
    asking.start()
    return asking


def test_memory_that_never_answers_does_not_keep_an_owner_from_ending(
    lender: OwningStore, connect: Connect, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a file system whose server has died: no signal ends such a read."""
    del connect
    reads, answers = threading.Event(), threading.Event()

    def fetch_never(*_: object) -> None:
        reads.set()
        assert answers.wait(TIMEOUT_S)

    monkeypatch.setattr("kvstore.owner.answering.CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(Copier, "fetch", fetch_never)
    path = directory / "hung.calls"
    with lender.answering(path):
        room, line = large(lender), Line(str(path), "abc", TIMEOUT_S, lambda _: None)
        asking = asking_in_vain(line, room)
        assert reads.wait(TIMEOUT_S)
    assert not path.exists()
    answers.set()
    asking.join(TIMEOUT_S)
    assert not asking.is_alive()
    line.close()
    until(lambda: used(lender) == 0, "the slots are free")


def test_a_file_stays_the_owner_s_while_memory_that_never_answers_is_read_into_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the read, if it ends, writes over what the next owner has there."""
    reads, answers, former = threading.Event(), threading.Event(), Copier.fetch

    def fetch_late(copier: Copier, *what: Any) -> Any:
        reads.set()
        assert answers.wait(TIMEOUT_S)
        return former(copier, *what)

    monkeypatch.setattr("kvstore.owner.answering.CLOSE_TIMEOUT_S", 0.05)
    # With a helper, which has ended.
    monkeypatch.setattr("kvstore.objects.copying.SHARED_BYTES", 1)
    monkeypatch.setattr(Copier, "fetch", fetch_late)
    caplog.set_level(logging.INFO)
    path, settings = directory / "owner.calls", config(directory, 8 * MIB, file=directory / "slab")
    with owning(settings) as store, store.answering(path) as answerer:
        room, line = large(store), Line(str(path), "abc", TIMEOUT_S, lambda _: None)
        asking = asking_in_vain(line, room)
        assert reads.wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="in use by another process of the store"):
        owning(settings)
    answers.set()
    asking.join(TIMEOUT_S)
    until(lambda: not answerer._lines, "the line has ended")
    line.close()
    assert "behind the owner's end: these threads were ended" in caplog.text
    assert "a bug in the store" not in caplog.text


def test_another_question_gives_up_what_was_fetched(lender: OwningStore, connect: Connect) -> None:
    room, line = large(lender), connect()
    before = used(lender)
    assert isinstance(fetch(line, room, [MIB]), Fetched)
    assert isinstance(fetch(line, room, [MIB], keys=KEYS[:3].tobytes()), Fetched)
    assert line.ask(Keep(), TIMEOUT_S) == Done()
    assert not lender.exists(NAMES, SIG, MIB).any()
    assert lender.exists(KEYS[:3], SIG, MIB).all()
    assert line.ask(Keep(), TIMEOUT_S) == Refused("nothing was fetched")
    assert lender.remove(KEYS[:3], SIG)
    assert used(lender) == before


def test_what_makes_no_sense_is_refused(lender: OwningStore, connect: Connect) -> None:
    room, line = large(lender), connect()
    before = used(lender)
    for sizes, other in (
        ([MIB], {"pieces": 2}),
        ([MIB], {"nbytes": MIB + 1}),
        ([MIB - 1, 1], {"pieces": 1}),
        ([MIB - 1, 1], {"nbytes": MIB - 1}),
        ([MIB], {"keys": b""}),
        ([MIB], {"keys": NAMES.tobytes()[:-1]}),
        ([MIB], {"pieces": line.tray.nbytes // 8}),
        ([MIB, 0], {}),
    ):
        assert isinstance(fetch(line, room, sizes, **other), Refused), (sizes, other)
    # One object's addresses and sizes, as many as lie in the tray and the nonce behind it.
    beyond = line.ask(Fetch(NAMES[:1].tobytes(), SIG, MIB, line.tray.nbytes // 16), TIMEOUT_S)
    assert isinstance(beyond, Refused)
    assert beyond.why.endswith(f"do not fit a tray of {TRAY_BYTES}")
    assert isinstance(fetch(line, room, [MIB], nbytes=MIB), Fetched), "the line works"
    line.close()
    until(lambda: used(lender) == before)


def test_what_is_not_there_is_not_stored(lender: OwningStore, connect: Connect) -> None:
    room, line = large(lender), connect()
    before = used(lender)
    assert isinstance(fetch(line, room, [MIB]), Fetched)
    told = np.frombuffer(line.tray.memory, "<u8", 4)
    told[1] = 4096  # Of three objects one lies where no memory is.
    unread = line.ask(Fetch(NAMES.tobytes(), SIG, MIB, 1), TIMEOUT_S)
    assert isinstance(unread, Unread)
    assert "Bad address" in unread.why
    assert used(lender) == before


@pytest.mark.parametrize("address", [0, 4096])
def test_who_does_not_say_where_its_tray_lies_is_not_read(
    lender: OwningStore, connect: Connect, monkeypatch: pytest.MonkeyPatch, address: int
) -> None:
    monkeypatch.setattr(
        "kvstore.protocol.calling.Greet", lambda version, _: Greet(version, address)
    )
    room, line = large(lender), connect()
    assert not line.hello.reads
    assert isinstance(fetch(line, room, [MIB]), Unread)
    assert used(lender) == 0


def test_who_lets_nobody_write_its_tray_is_not_read(
    lender: OwningStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = Mapped.make

    def sealed(nbytes: int) -> tuple[Mapped, int]:
        tray, fd = former(nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        return tray, fd

    monkeypatch.setattr(Mapped, "make", sealed)
    room, line = large(lender), connect()
    assert not line.hello.reads
    assert isinstance(fetch(line, room, [MIB]), Unread)
    line.tray.memory[:MIB] = room.bytes[0].tobytes()
    taken = line.ask(Take(NAMES[:1].tobytes(), SIG, MIB, 1000), TIMEOUT_S)
    assert not isinstance(taken, Refused), "its objects come through the tray"
    assert lender.exists(NAMES, SIG, MIB).tolist() == [True, False, False]


def test_a_tray_without_the_owner_s_nonce_is_not_read(
    lender: OwningStore, connect: Connect
) -> None:
    room, line = large(lender), connect()
    change_nonce(line)
    unread = fetch(line, room, [MIB])
    assert isinstance(unread, Unread)
    assert "No such process" in unread.why
    assert used(lender) == 0


def test_a_program_that_its_user_may_not_look_into_is_not_read(
    lender: OwningStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner with CAP_SYS_PTRACE could read set-user-ID programs."""
    room, line = large(lender), connect()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 4711)
        unread = fetch(line, room, [MIB])
    assert isinstance(unread, Unread)
    assert "another process" in unread.why
    assert used(lender) == 0
    again = fetch(line, room, [MIB])
    assert isinstance(again, Unread)
    assert "at this line cannot be read" in again.why, "nothing is copied for nothing again"


def test_a_client_that_has_become_another_program_is_not_read(
    lender: OwningStore, connect: Connect, directory: Path
) -> None:
    del connect  # The owner answers.
    client = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("store_becoming.py")),
            str(directory / "owner.calls"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "True\n"
        assert client.stdout.readline() == "Unread\n"
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.communicate()
    assert used(lender) == 0
