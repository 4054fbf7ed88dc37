# SPDX-License-Identifier: Apache-2.0
"""The command ``kvstore``: lending memory without an engine, and what can be seen of it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from store_host import shared
from store_makers import SIG, TIMEOUT_S, Room, config, contents, keys, until

import te
from bootstrap_server.admission.secret import Keys
from kvstore.cli import main
from kvstore.client.load_times import AdmissionCounts
from kvstore.client.status import OwnerSeen, StoreStatus, lines
from kvstore.config import Config
from kvstore.host.directory import Directory
from kvstore.networking import engine_of
from kvstore.objects.outcomes import Got, Put
from kvstore.owner.card import OwnerStats
from kvstore.owning import OwningStore
from kvstore.store import Store
from te import checkout

N, NBYTES = 4, 5000


@pytest.fixture
def environment(directory: Path) -> dict[str, str]:
    """Status sockets of this test alone."""
    runtime = directory / "run"
    runtime.mkdir(mode=0o700)
    return os.environ | {"XDG_RUNTIME_DIR": str(runtime)}


@pytest.fixture
def lender(directory: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "kvstore",
        "serve",
        "--memory=4MiB",
        f"--directory={directory}/s",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"kvstore: lends 4194304 bytes, in {directory}/s\n"
        yield process
        process.kill()


def top(environment: dict[str, str], *arguments: str) -> str:
    place = f"--dir={environment['XDG_RUNTIME_DIR']}/te"  # Others of this user may have stores.
    command = [sys.executable, "-m", "kvstore", "top", "--once", place, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.slow
def test_lent_memory_outlives_the_engines(
    directory: Path, environment: dict[str, str], lender: subprocess.Popen[str]
) -> None:
    line = [str(lender.pid), "4", "MiB", "0", "0", "0", "-", "-", "-", "0/0"]
    until(lambda: top(environment).split("\n")[1].split()[:10] == line, "it answers in time")
    with Store(shared(directory / "s", 0)) as store:
        room = Room(store, N, NBYTES)
        room.bytes[:] = contents(N, NBYTES)
        until(lambda: store.put(keys(N), SIG, room.pieces) == [Put.STORED] * N)
    with Store(shared(directory / "s", 0)) as store:
        room = Room(store, N, NBYTES)
        until(lambda: store.get(keys(N), SIG, room.pieces) == [Got.RIGHT] * N)
        assert (room.bytes == contents(N, NBYTES)).all()
    seen: list[dict[str, Any]] = []
    until(lambda: seen.extend(json.loads(top(environment, "--json"))) or seen, "it answers in time")
    assert [one["pid"] for one in seen] == [lender.pid]
    assert seen[0]["own"]["objects"] == seen[0]["own"]["published"] == N
    lender.send_signal(signal.SIGTERM)
    assert lender.wait(TIMEOUT_S) == 0
    place = f"{environment['XDG_RUNTIME_DIR']}/te"
    assert top(environment) == f"no process of this user has a store (looked in {place})\n"


def test_that_there_is_no_store_is_said_once(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def look_thrice(interval_s: float) -> None:
        looks.append(interval_s)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.cli.time", SimpleNamespace(sleep=look_thrice))
    assert main(["top", "--interval=7", f"--dir={directory}"]) == 130
    assert capsys.readouterr().out == (
        f"no process of this user has a store (looked in {directory})\n"
    )
    assert looks == [7, 7, 7]


def test_a_process_is_a_line() -> None:
    own = OwnerStats(
        objects=12,
        evicted=3,
        pinned=2,
        lower_tier=40,
        lower_tier_capacity=1 << 30,
        promoted=5,
        dropped=6,
    )
    one = StoreStatus(
        pid=7,
        process="sglang serve",
        memory=3 << 29,
        own=own,
        owners=(OwnerSeen("a", 1, usable=True), OwnerSeen("b", 0, usable=False)),
        gets={"right": 5, "moved": 2},
        puts={},
        lookups={"found": 3, "missing": 1, "rejected": 0},
        bytes_got=0,
        bytes_put=0,
        table_bytes=0,
        admission=AdmissionCounts(admitted=9, declined=4, loads=3, unpaid=1),
    )
    more = ["1/3", "sglang", "serve"]
    idle = StoreStatus(8, "x", 0, None, (), {}, {}, {}, 0, 0, 0)
    assert [line.split() for line in lines([one, idle])[1:]] == [
        ["7", "1.5", "GiB", "12", "3", "2", "40", "5", "6", "1/2", "75%", "0", "2", "4", *more],
        ["8", "-", "-", "-", "-", "-", "-", "-", "0/0", "-", "0", "0", "0", "0/0", "x"],
    ]


def test_an_application_names_its_process_and_commands_no_terminal() -> None:
    one = StoreStatus(8, "python", 0, None, (), {}, {}, {}, 0, 0, 0, label="store of m\x1b[2J")
    assert lines([one])[1].endswith("  store of m?[2J")
    assert lines([replace(one, label="", process="x\ny")])[1].endswith("  x?y")


def test_the_busiest_of_many_processes_are_shown() -> None:
    idle = StoreStatus(0, "x", 0, None, (), {}, {}, {}, 0, 0, 0)
    many = [replace(idle, pid=i, bytes_got=i % 3, bytes_put=i) for i in range(7)]
    head, *rest, last = lines(many, 3)
    assert head.split()[0] == "PID"
    assert [line.split()[0] for line in rest] == ["5", "6", "4"]
    assert last == "… 4 more processes; --all shows them"
    assert len(lines(many, 7)) == len(lines(many)) == 1 + 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--memory", "much"], "'much' is no size: write it like 16GiB"),
        (["serve"], "the following arguments are required: --memory"),
        (["serve", "--memory", "1MiB", "--directory", "/proc/version"], "exists"),
        (["serve", "--memory", "1MiB", "--directory", "/tmp"], "must be this user's"),
        (["serve", "--memory", "1KiB"], "are too few for one chunk"),
        (["serve", "--memory", "1MiB", "--disk", "d"], "give both, or neither"),
    ],
)
def test_bad_usage_is_a_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    if arguments[-1:] == ["1KiB"]:
        arguments = [*arguments, "--directory", str(directory)]
    try:
        status = main(arguments)
    except SystemExit as exc:
        status = exc.code  # type: ignore[assignment]
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("tool", ["bench", "replay"])
def test_a_wheel_says_that_it_has_no_tools(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "CHECKOUT", tmp_path)
    assert main([tool, "--json"]) == 2
    assert f"kvstore {tool} is not part of the wheel" in capsys.readouterr().err
    assert main([]) == 0
    assert capsys.readouterr().out.count("(not part of the wheel)") == 2


def test_a_directory_that_is_too_deep_is_refused(directory: Path) -> None:
    deep = directory / ("d" * 90)
    with pytest.raises(ValueError, match=r"is too long by .* bytes for the address of a Unix"):
        Store(config(deep))


def test_a_cleaner_leaves_the_directory_alone(directory: Path) -> None:
    """systemd-tmpfiles(8) does that where it gets no lock; without the key, processes that come
    later would not be let in."""
    fd = os.open(directory, os.O_RDONLY)
    with closing(Directory(directory)), pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_the_place_does_not_depend_on_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service has no $XDG_RUNTIME_DIR, and that of a login goes with its last session."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert Config().directory == Path(f"/tmp/kvstore-{os.geteuid()}")


def test_strangers_on_the_host_cannot_read(directory: Path) -> None:
    """Other users can reach the engines' ports, and have not the key."""
    with (
        OwningStore(config(directory, 4 << 20)) as store,
        te.Engine(te.Config(status_dir=None)) as other,
    ):
        own = store._owners.own
        assert own is not None
        with pytest.raises(te.ConnectError):
            other.connect(own.card.engine)
    assert (directory / "key").stat().st_mode & 0o777 == 0o600
    assert [one.name for one in directory.iterdir() if one.name.startswith("key")] == ["key"]


def test_all_who_come_at_once_have_the_same_key(directory: Path) -> None:
    at_once = threading.Barrier(8)
    found: list[bytes] = []

    def get() -> None:
        place = Directory(directory)
        at_once.wait(TIMEOUT_S)
        found.append(place.key())

    threads = [threading.Thread(target=get) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(TIMEOUT_S)
    assert len(found) == 8
    assert len(set(found)) == 1
    (directory / "key").write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes, not 32: remove it"):
        Directory(directory).key()


def test_how_others_reach_the_memory() -> None:
    assert "rdma" not in engine_of({}, "").transports, "on one host nothing has to be pinned"
    assert engine_of({}, "redis://x").transports == te.Config().transports
    values = {"transports": "rdma, tcp", "nics": "mlx5_*,!mlx5_1", "ports": "20000-20010"}
    given = engine_of(values, "")
    assert given.transports == ("rdma", "tcp")
    assert given.nics == ("mlx5_*", "!mlx5_1")
    assert (given.port, given.port_last) == (20000, 20010)
    assert not given.encrypt
    secret = Keys.from_secrets([b"0123456789abcdef of this test alone"])
    hidden = engine_of({"encrypt": True}, "redis://x", secret)
    assert (hidden.encrypt, hidden.keys) == (True, secret.data)
    assert not engine_of({"encrypt": True}, "", secret).encrypt, "nothing goes over a network"


@pytest.mark.parametrize("ports", ["20000", "20010-20000", "0-10", "7-7", "1-65536", "a-b"])
def test_a_range_of_ports_that_is_none_is_refused(
    ports: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--memory=4MiB", f"--ports={ports}"]) == 2
    assert f"ports='{ports}' is no range of two ports and more" in capsys.readouterr().err


def test_encryption_needs_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--memory=4MiB", "--encrypt"]) == 2
    assert "encrypt needs a secret: give all processes" in capsys.readouterr().err


def test_a_transport_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--memory=4MiB", "--transports=rmda"]) == 2
    assert "rmda" in capsys.readouterr().err
