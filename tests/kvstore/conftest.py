# SPDX-License-Identifier: Apache-2.0
"""A directory for sockets that is short enough, and processes that end with their test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_far import Far
from store_makers import config

import te
from kvstore.store import Store

MIB = 1 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of this test alone; pytest's own are too long for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


@pytest.fixture
def owner(directory: Path) -> Iterator[Store]:
    """A store that lends 8 MiB."""
    with Store(config(directory, 8 * MIB)) as store:
        yield store


@pytest.fixture
def guest(owner: Store, directory: Path) -> Iterator[Store]:
    """A store that lends nothing, beside ``owner``."""
    with Store(config(directory)) as store:
        yield store


@pytest.fixture
def tcp_guest(owner: Store, directory: Path) -> Iterator[Store]:
    """As ``guest``, as if it were on another host: what it reads and writes goes over TCP."""
    engine = te.Config(transports=("tcp",), status_dir=None)
    with Store(config(directory, engine=engine)) as store:
        yield store


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
