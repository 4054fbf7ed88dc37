# SPDX-License-Identifier: Apache-2.0
"""Tests on RDMA devices. They run inside the testbed: scripts/rdma-testbed --nics 8 -- …"""

from __future__ import annotations

import pytest
from testbed_nics import Nic, nics

from te.transports.rdma import cm, direct, link, transport

#: Tests that this machine has too few devices for.
_too_large = pytest.StashKey[list[pytest.Item]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out those that need more devices than there are."""
    found = nics()
    if not found:
        return
    too_large = [item for item in items if _devices(item) > len(found)]
    config.stash[_too_large] = too_large
    items[:] = [item for item in items if item not in too_large]
    config.hook.pytest_deselected(items=too_large)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    too_large = config.stash.get(_too_large, [])
    if not too_large:
        return []
    wanted = max(_devices(item) for item in too_large)
    line = (
        f"{len(too_large)} tests need more than the {len(nics())} devices of this machine and are"
        f" left out; run: scripts/rdma-testbed --nics {wanted} -- pytest …"
    )
    return [line]


def _devices(item: pytest.Item) -> int:
    found = item.get_closest_marker("devices")
    return 0 if found is None else int(found.args[0])


@pytest.fixture
def patient_rails(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests without faults: no attempt to make a rail is given up because its other end stands
    still for some seconds. A peer cannot be connected when all ways have been tried once."""
    for module in (cm, direct, link, transport):
        monkeypatch.setattr(module, "BUILD_TIMEOUT_S", 30.0)
    monkeypatch.setattr(link, "PROBE_TIMEOUT_S", 30.0)


@pytest.fixture(scope="session")
def rdma_nics() -> tuple[Nic, ...]:
    """All devices, at least four; without them the test fails, since it asks for them."""
    found = nics()
    assert len(found) >= 4, "no four RDMA devices; run: scripts/rdma-testbed --nics 8 -- pytest …"
    return found
