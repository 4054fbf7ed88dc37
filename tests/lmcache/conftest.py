# SPDX-License-Identifier: Apache-2.0
"""A directory for sockets that is short enough, and an adapter as LMCache has it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_host import store_directory

with warnings.catch_warnings():  # OpenTelemetry's and others', as LMCache is imported
    warnings.simplefilter("ignore")
    import lmcache.cli.commands
    import lmcache.v1.distributed.storage_manager  # noqa: F401
    from lmcache_makers import Level1, config

    from kvstore.lmcache.adapter import StoreL2Adapter


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of this test alone; pytest's own are too long for the address of a socket."""
    with store_directory() as path:
        yield path


@pytest.fixture
def level1() -> Level1:
    return Level1()


@pytest.fixture
def adapter(directory: Path, level1: Level1) -> Iterator[StoreL2Adapter]:
    """Lends 8 MiB, and has LMCache's memory ``level1``."""
    one = StoreL2Adapter(config(directory), l1_memory_desc=level1.desc)
    yield one
    one.close()
