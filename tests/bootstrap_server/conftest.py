# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from bootstrap_waits import NEVER_S, WAIT_S
from te_ports import held_port

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    Topology,
)

MakeRecord = Callable[..., RankRecord]


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """Records with short spelling: `make_record(topology, coords, epoch, page_size=…)`."""

    def make(
        topology: Topology,
        coords: RankCoords,
        epoch: int = 1,
        page_size: int = 16,
        protocol: int = 1,
        port: int | None = None,
        **config: object,
    ) -> RankRecord:
        port = 10_000 + topology.index(coords) if port is None else port
        rank = Rank(coords, "127.0.0.1", port, epoch, 30_000)
        form = KVFormat(page_size, "bfloat16")
        return RankRecord(InstanceConfig(topology, form, protocol=protocol, **config), rank)

    return make


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine stops any thread for seconds: no server or lease is given up for that."""
    for deadline in (
        "server.START_DEADLINE_S",
        "server.CLOSE_DEADLINE_S",
        "client.lease._CLOSE_DEADLINE_S",
        "http.succession.ASK_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"bootstrap_server.{deadline}", WAIT_S)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a registry that comes, or comes back."""
    with held_port() as held:
        yield held


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    """Nobody has to renew a lease of its."""
    with BootstrapServer(host="127.0.0.1", port=0, lease_s=NEVER_S) as running:
        yield running


@pytest.fixture
def client(server: BootstrapServer) -> Iterator[BootstrapClient]:
    with BootstrapClient(f"127.0.0.1:{server.port}", timeout_s=WAIT_S) as connected:
        yield connected
