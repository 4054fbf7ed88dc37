# SPDX-License-Identifier: Apache-2.0
"""Tests on RDMA devices. They run inside the testbed: scripts/rdma-testbed --nics 4 -- …"""

from __future__ import annotations

import pytest
from testbed_nics import Nic, nics


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the other driver: they run when its testbed is up."""
    present = {nic.driver for nic in nics()}
    if not present:
        return
    kept, left_out = [], []
    for item in items:
        marker = item.get_closest_marker("driver")
        (kept if marker is None or marker.args[0] in present else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def rdma_nics() -> tuple[Nic, ...]:
    """All devices, at least two; without them the test fails, since it asks for them."""
    found = nics()
    assert len(found) >= 2, "no two RDMA devices; run: scripts/rdma-testbed --nics 4 -- pytest …"
    return found
