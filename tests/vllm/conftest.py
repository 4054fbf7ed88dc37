# SPDX-License-Identifier: Apache-2.0
"""Where servers of vLLM come from, a directory for sockets that is short enough, and memory as vLLM
has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_serving.nursery import Nursery
from cpu_serving.servers import RESTING
from cpu_serving.vllm_servers import nursery_of_vllm
from store_host import store_directory
from vllm_makers import Rank

from sglang_mooncake.rooms import prefill_room


@pytest.fixture(scope="session", autouse=True)
def resting() -> Iterator[None]:
    """All servers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RESTING.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where servers are forked that the nursery fits."""
    with nursery_of_vllm(tmp_path_factory.mktemp("nursery") / "nursery.log") as made:
        yield made


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill room ends soon after an abort whose request never comes."""
    monkeypatch.setattr(prefill_room, "ABORT_GRACE_S", 0.1)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of this test alone; pytest's own are too long for the address of a socket."""
    with store_directory() as path:
        yield path


@pytest.fixture
def rank(directory: Path) -> Iterator[Rank]:
    """Lends 8 MiB."""
    with Rank(directory, 8 << 20) as one:
        yield one


@pytest.fixture
def other(rank: Rank, directory: Path) -> Iterator[Rank]:
    """Of another server, beside ``rank``. Lends nothing."""
    with Rank(directory, 0) as one:
        yield one
