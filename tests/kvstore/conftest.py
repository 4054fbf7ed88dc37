# SPDX-License-Identifier: Apache-2.0
"""A directory for sockets that is short enough, and processes that end with their test."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_etcd import ALL_INDEXES, INDEXES, EtcdServer, any_index, index_server
from store_far import Far
from store_host import end_all
from store_lower_tier import MEMORY
from store_makers import TIMEOUT_S, config, engine
from store_meeting import owning
from store_redis import RedisServer, meeting
from store_registry import RegistryServer

from kvstore.host import far_puts, lease
from kvstore.membership import members
from kvstore.owner import answering, claims, fencing, service, storing, ticking
from kvstore.owner import owner as owner_module
from kvstore.owning import OwningStore
from kvstore.protocol import loop
from kvstore.store import Store
from te import engine as te_engine
from te import status
from te.transports.samehost import reach

MIB = 1 << 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any thread may stop for a while: no deadline is missed that a test does not
    set itself."""
    for call in (Store.get, Store.put):
        monkeypatch.setattr(call, "__defaults__", (TIMEOUT_S,))
    for module in (answering, fencing, loop, lease, te_engine, ticking):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(answering, "GREETING_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(status.ask, "__defaults__", (None, TIMEOUT_S))
    monkeypatch.setattr(status, "CONNECTION_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(reach, "LOOK_TIMEOUT_S", TIMEOUT_S)
    for waiting in (claims, service, storing):
        monkeypatch.setattr(waiting, "FENCE_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(owner_module, "DRAIN_S", TIMEOUT_S)
    monkeypatch.setattr(lease, "JOIN_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(members, "TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(members, "FORGOTTEN_S", 600)
    for name in ("SETTLE_S", "NEXT_S"):
        monkeypatch.setattr(far_puts, name, TIMEOUT_S)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of this test alone; pytest's own are too long for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


@pytest.fixture
def owners_end(directory: Path) -> Iterator[None]:
    """Those that the test's clients have started."""
    yield
    end_all(directory)


@pytest.fixture
def owner(directory: Path) -> Iterator[OwningStore]:
    """A store that lends 8 MiB."""
    with owning(config(directory, 8 * MIB)) as store:
        yield store


@pytest.fixture
def guest(owner: Store, directory: Path) -> Iterator[Store]:
    """A store that lends nothing, beside ``owner``."""
    with owning(config(directory)) as store:
        yield store


@pytest.fixture
def tcp_guest(owner: Store, directory: Path) -> Iterator[Store]:
    """As ``guest``, as if it were on another host: what it reads and writes goes over TCP."""
    with owning(config(directory, engine=engine(transports=("tcp",)))) as store:
        yield store


@pytest.fixture
def calls(owner: OwningStore, directory: Path) -> Iterator[str]:
    """Where ``owner`` answers processes of its host."""
    path = directory / "owner.calls"
    with owner.answering(path):
        yield str(path)


@pytest.fixture
def start_far(directory: Path) -> Iterator[Callable[..., Far]]:
    """Starts processes that lend memory."""
    started: list[Far] = []

    def start(memory: int, count: int, nbytes: int, seed: int = 0) -> Far:
        started.append(Far(directory, memory, count, nbytes, seed))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def start_lending(directory: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``kvstore serve`` with a disk, or with what is given instead."""
    started: list[subprocess.Popen[str]] = []

    def start(*tier: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvstore", "serve", f"--memory={MEMORY}"]
        command += [f"--directory={directory}"]
        command += tier or [f"--disk={directory}/disk", "--disk-size=16MiB"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env=os.environ | {"XDG_RUNTIME_DIR": str(directory)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvstore: lends")
        return process

    yield start
    for one in started:
        one.kill()
        one.communicate()
    end_all(directory)  # Of servers that had to start one behind that.


@pytest.fixture
def meet() -> Iterator[dict[str, Any]]:
    """Settings of hosts that find each other."""
    with meeting() as settings:
        yield settings


@pytest.fixture(params=INDEXES)
def index(request: pytest.FixtureRequest) -> Iterator[RedisServer | EtcdServer]:
    """Where owners meet, of each kind that anybody can write to."""
    with index_server(request.param) as server:
        yield server


@pytest.fixture(params=ALL_INDEXES)
def anywhere(
    request: pytest.FixtureRequest,
) -> Iterator[RedisServer | EtcdServer | RegistryServer]:
    """Where owners meet, of each kind."""
    with any_index(request.param) as server:
        yield server
