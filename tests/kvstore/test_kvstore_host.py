# SPDX-License-Identifier: Apache-2.0
"""One process owns the memory of a host: it is started by the first who needs it, stays when that
one ends, and another one takes its memory over when it dies."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_host import User, dial, end_all, is_alive, kill, pid_of, pids, receive, send, shared
from store_lower_tier import MEMORY
from store_makers import SIG, TIMEOUT_S, config, contents, keys, until
from store_objects import KEYS, MIB, NBYTES, N, filled, put_all, sees

from kvstore import serving
from kvstore.host import agreement, lease, lifetime, starting
from kvstore.host.lease import Lease, Refusal
from kvstore.host.messages import Join, Refused
from kvstore.host.place import Place
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.protocol.messages import VERSION
from kvstore.serving import lock_of
from kvstore.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def start_user(directory: Path) -> Iterator[Callable[[], User]]:
    """Starts processes that use the host's owner."""
    started: list[User] = []

    def start() -> User:
        started.append(User(directory))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture(autouse=True)
def ended(directory: Path) -> Iterator[None]:
    yield
    end_all(directory)


@pytest.fixture
def patient_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are started wait until this process brings the last one's memory, which it may do
    late on a busy machine."""
    patient = f"from kvstore.host import lifetime; lifetime.ADOPTION_S = {TIMEOUT_S}"
    begin = "from kvstore.serving"
    assert starting._CODE.count(begin) == 1
    monkeypatch.setattr(starting, "_CODE", starting._CODE.replace(begin, f"{patient}\n{begin}"))


def has_all(store: Store) -> bool:
    """Whether all objects come, and are right."""
    back = filled(store, seed=9)
    return store.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N and bool(
        (back.bytes == contents(N, NBYTES)).all()
    )


# -- started, used, ended


def test_a_server_that_restarts_finds_its_cache_again(directory: Path) -> None:
    with Store(shared(directory)) as store:
        owner = pid_of(store)
        put_all(store)
    with Store(shared(directory)) as store:
        assert pid_of(store) == owner
        sees(store)
        assert has_all(store)
        assert store.status().memory == 0, "it lends nothing itself"
        assert pids(directory) == [owner]


def test_those_who_come_at_once_start_one(directory: Path) -> None:
    at_once = threading.Barrier(6)

    def use(_: int) -> tuple[int, Store]:
        at_once.wait(TIMEOUT_S)
        store = Store(shared(directory))
        return pid_of(store), store

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(use, range(6)))
    assert {pid for pid, _ in found} == set(pids(directory))
    assert len(pids(directory)) == 1
    stores = [store for _, store in found]
    with ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(store_all, stores))
    assert set().union(*outcomes) <= {Put.STORED, Put.EXISTS, Put.BEING_STORED}
    for store in stores:
        sees(store)
        assert has_all(store)
        assert len(store) == N, "each object lies once on the host"
        store.close()


def store_all(store: Store) -> set[Put]:
    return set(store.put(KEYS, SIG, filled(store).pieces))


def test_nothing_ties_the_owner_to_the_one_that_has_started_it(
    directory: Path, start_user: Callable[[], User]
) -> None:
    marked = os.open(directory, os.O_RDONLY)
    os.set_inheritable(marked, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        user = start_user()
    finally:
        os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.close(marked)
    owner = user.owner
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{owner}/status").read_text().splitlines()
    )
    assert int(status["SigBlk"], 16) == 0
    assert os.sched_getaffinity(owner) >= cores
    assert int(status["PPid"]) not in (user.process.pid, os.getpid())
    assert os.getsid(owner) not in (os.getsid(0), os.getsid(user.process.pid))
    assert Path(f"/proc/{owner}/cwd").readlink() == Path("/")
    links = {}
    for one in Path(f"/proc/{owner}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The owner may close others meanwhile.
            links[one.name] = str(one.readlink())
    own = list(links.values())
    assert own.count(str(directory)) == 1, "its own lock of the directory, and no more"
    (number,) = (name for name, one in links.items() if one == str(directory / "owner.lock"))
    flags = Path(f"/proc/{owner}/fdinfo/{number}").read_text().split()[3]
    assert int(flags, 8) & os.O_CLOEXEC, "what it starts does not get the lock"
    user.kill()
    with Store(shared(directory)) as store:
        assert pid_of(store) == owner


def test_an_owner_ends_some_time_after_its_last_user(directory: Path) -> None:
    with Store(shared(directory, linger_s=0.0)) as store, Store(shared(directory)) as other:
        owner = pid_of(store)
        store.close()
        put_all(other)
        assert pids(directory) == [owner]
    until(lambda: not is_alive(owner), "nobody uses it any more")
    assert not (directory / "owner").exists()
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    assert lock.memory() == "", "nobody waits for memory that is gone"
    lock.close()
    log = place.log.read_text()
    assert "owns the memory of the store" in log
    assert log.rstrip().endswith("ends")


def test_an_owner_starts_without_what_it_does_not_need() -> None:
    """aiohttp alone took as long to import as all else."""
    code = "import sys, kvstore.serving; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, env=environment)
    assert {"aiohttp", "redis", "obstore", "torch"}.isdisjoint(done.stdout.split())
    assert "kvstore.serving" in done.stdout


def test_why_an_owner_cannot_be_started_is_said(directory: Path) -> None:
    with pytest.raises(Refusal, match="is more memory than this process can have"):
        Store(shared(directory, 1 << 40))
    with pytest.raises(Refusal, match="too few for one chunk"):
        Store(shared(directory, 1000))
    assert pids(directory) == []


def test_settings_that_differ_are_said_and_another_pool_is_refused(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(shared(directory)) as store:
        with Store(shared(directory, 32 * MIB, policy="lru")) as other:
            assert pid_of(other) == pid_of(store)
        assert "memory=16777216 instead of 33554432" in caplog.text
        assert "policy='arc' instead of 'lru'" in caplog.text
        settings = shared(directory)
        object.__setattr__(settings, "index", "redis://127.0.0.1:1")
        with pytest.raises(Refusal, match=r"owns the store of this host, and it meets others at"):
            Lease(settings, Place(directory))


# -- it dies


@pytest.mark.usefixtures("patient_owners")
def test_the_next_owner_has_all_that_the_last_one_had(directory: Path) -> None:
    with Store(shared(directory)) as store:
        room = put_all(store)
        first = pid_of(store)
        kill(first)
        outcomes = store.put(KEYS, SIG, room.pieces)
        assert len(outcomes) == N, "an outcome, and no exception"
        assert has_all(store), "its memory is read on meanwhile"
        until(lambda: pid_of(store) != first, "another one is started")
        until(store._owners.usable, "and connected to")
        assert store.exists(KEYS, SIG, NBYTES).all(), "it has all keys"
        assert has_all(store)
        second = pid_of(store)
        put = filled(store, seed=3)
        until(lambda: has_all(store))
        kill(second)
        until(lambda: pid_of(store) not in (first, second), "and a third one")
        until(lambda: has_all(store))
        del put


@pytest.mark.usefixtures("patient_owners")
def test_an_owner_that_is_to_stay_for_ever_is_not_an_operator_s(directory: Path) -> None:
    with Store(shared(directory, linger_s=math.inf)) as store:
        put_all(store)
        first = pid_of(store)
        kill(first)
        until(lambda: pid_of(store) != first, "another one is started")
        until(lambda: has_all(store), "with its memory")


@pytest.mark.usefixtures("patient_owners")
def test_a_next_owner_that_starts_late_gets_the_memory_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one may have kept the lock while it wrote to a disk."""
    with Store(shared(directory)) as store:
        put_all(store)
        first = pid_of(store)
        monkeypatch.setattr(lifetime, "RUSH_S", 0.0)
        monkeypatch.setattr(lifetime, "PAUSE_S", 1000.0)
        kill(first)
        until(lambda: pid_of(store) != first, "another one is started")
        until(lambda: has_all(store), "with its memory")


def test_two_servers_go_on_while_owners_are_killed(directory: Path) -> None:
    """Under load: nothing raises, what comes is right, and hits go on."""
    over = threading.Event()
    hits: Counter[int] = Counter()

    def use(seed: int) -> None:
        names, right = keys(N, seed), contents(N, NBYTES, seed)
        with Store(shared(directory)) as store:
            room, back = filled(store, seed=seed), filled(store, seed=99)
            while not over.is_set():
                store.put(names, SIG, room.pieces)
                back.bytes[:] = 0
                came = [one is Got.RIGHT for one in store.get(names, SIG, back.pieces)]
                assert (back.bytes[came] == right[came]).all()
                hits[seed] += sum(came)

    with ThreadPoolExecutor(2) as threads:
        used = [threads.submit(use, seed) for seed in (1, 2)]
        try:
            for _ in range(4):
                before = dict(hits)
                until(
                    lambda before=before: all(hits[one] > before.get(one, 0) + N for one in (1, 2))
                )
                found: list[int] = []
                until(lambda found=found: found.extend(pids(directory)) or found)
                kill(found[0])
        finally:
            over.set()
        for one in used:
            one.result(TIMEOUT_S)


def test_who_is_of_another_release_or_talks_nonsense_is_not_let_in(directory: Path) -> None:
    with Store(shared(directory)) as store:
        place = Place(directory)
        old = Join(VERSION + 1, {}, agreement.pool(config(directory)))
        with dial(place) as line:
            send(line, old, [])
            answer, fds = receive(line)
            assert isinstance(answer, Refused)
            assert "another release" in answer.why
            assert answer.pid == pid_of(store)
            assert fds == []
        with dial(place) as line:
            line.send(b"\xc1")
            assert line.recv(1) == b""
        with dial(place) as line:
            send(line, answer, [])
            assert line.recv(1) == b""
        put_all(store)


def test_a_server_that_cannot_reach_the_owner_serves_and_joins_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(directory)
    lock = place.lock()  # One that is being started, and stands still.
    assert lock is not None
    monkeypatch.setattr(lease, "JOIN_TIMEOUT_S", 0.1)
    with Store(shared(directory)) as store:
        assert "does not answer within 0.1 s" in caplog.text
        room = filled(store)
        monkeypatch.setattr(lease, "JOIN_TIMEOUT_S", TIMEOUT_S)
        assert not store.exists(KEYS, SIG, NBYTES).any()
        assert store.get(KEYS, SIG, room.pieces) == [Got.MISSING] * N
        assert len(store.put(KEYS, SIG, room.pieces)) == N
        lock.close()  # It dies.
        until(lambda: store._lease.is_joined, "it has one")  # type: ignore[union-attr]
        until(store._owners.usable)
        put_all(store)


# -- an operator's


def test_an_operator_s_owner_is_used_and_waited_for(
    directory: Path,
    start_lending: Callable[..., subprocess.Popen[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    file = f"--file={directory}/slab"
    lender = start_lending(file)
    with Store(shared(directory)) as store:
        assert pid_of(store) == lender.pid
        put_all(store)
        lender.send_signal(signal.SIGTERM)
        assert lender.wait(TIMEOUT_S) == 0
        until(lambda: "was ended" in caplog.text)
        assert pids(directory) == [], "its operator starts the next one"
        again = start_lending(file)
        until(lambda: store._lease.pid == again.pid)  # type: ignore[union-attr]
        sees(store)
        assert has_all(store)


def test_an_operator_s_owner_takes_over_from_a_server_s(
    directory: Path, start_lending: Callable[..., subprocess.Popen[str]]
) -> None:
    """With its pages, and again behind its own death, as servers hold them."""
    with Store(shared(directory, MEMORY)) as store:
        first = pid_of(store)
        put_all(store)
        for _ in range(2):
            lender = start_lending("--policy=arc")
            until(lambda lender=lender: pid_of(store) == lender.pid, "it uses the operator's")
            until(lambda: not is_alive(first), "the first one has ended")
            until(lambda: has_all(store), "it has all pages")
            lender.kill()
            lender.wait()


@pytest.mark.parametrize("kept", ["--policy=arc", "--file={}/slab"])
def test_an_operator_s_settings_count(
    directory: Path, start_lending: Callable[..., subprocess.Popen[str]], kept: str
) -> None:
    """Other memory, or a file, begins without the pages; so does what behind its regular end."""
    with Store(shared(directory, 16 * MIB)) as store:
        put_all(store)
        lender = start_lending(kept.format(directory))
        until(lambda: pid_of(store) == lender.pid, "it uses the operator's")
        until(store._owners.usable, "and is connected to it")
        assert not store.exists(KEYS, SIG, NBYTES).any()
        put_all(store)
        lender.terminate()
        assert lender.wait(TIMEOUT_S) == 0
        lock = Place(directory).lock()
        assert lock is not None
        assert lock.memory() == "", "nobody is to take it over"
        lock.close()


def test_a_second_operator_s_owner_is_refused(
    directory: Path, start_lending: Callable[..., subprocess.Popen[str]]
) -> None:
    lender = start_lending()
    with pytest.raises(ValueError, match=f"the process {lender.pid} owns .* an operator has st"):
        lock_of(config(directory, MEMORY), Place(directory))
    wanted = config(directory, MEMORY)
    object.__setattr__(wanted, "index", "redis://127.0.0.1:1")
    with pytest.raises(ValueError, match=f"the process {lender.pid} owns .* at another index"):
        lock_of(wanted, Place(directory))


@pytest.mark.parametrize("listens", [False, True])
def test_an_owner_that_does_not_end_is_not_waited_for_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr(serving, "GIVEN_WAY_S", 0.1)
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    who = f"the process {os.getpid()}" if listens else "another process"
    with (
        contextlib.closing(lock),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        if listens:
            listener.bind(str(place.socket))
            listener.listen()
        with pytest.raises(ValueError, match=rf"^{who} owns .* within 0\.1 s: end it first"):
            lock_of(config(directory, MEMORY), place)


def test_the_report_of_a_process_that_ends_without_a_word(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_CODE", "")
    with pytest.raises(Refusal, match="ended without a word"):
        Store(shared(directory))


def test_a_server_that_cannot_start_a_process_serves(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "JOIN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(starting.sys, "executable", "/nobody/python")
    with Store(shared(directory)) as store:
        why = "No such file or directory: '/nobody/python'"
        until(lambda: why in caplog.text, "it has tried, and says why not")
        assert not store.exists(KEYS, SIG, NBYTES).any()
        removed = store.remove(KEYS, SIG)
        assert removed == [Removed.UNREACHABLE] * N, "whoever holds them brings them back"
        monkeypatch.undo()
        until(lambda: store._lease.is_joined)  # type: ignore[union-attr]
        until(store._owners.usable)
        put_all(store)
