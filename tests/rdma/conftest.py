# SPDX-License-Identifier: Apache-2.0
"""Tests on RDMA devices. They run inside the testbed: scripts/rdma-testbed --nics 8 -- …"""

from __future__ import annotations

from typing import TypeVar

import pytest
from testbed_nics import Nic, nics

T = TypeVar("T")


#: Tests that this machine has too few devices for.
_too_large = pytest.StashKey[list[pytest.Item]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the other driver, which run when its testbed is up, and those that
    need more devices than there are."""
    found = nics()
    if not found:
        return
    drivers = {nic.driver for nic in found}
    other = [item for item in items if _value(item, "driver", "") not in {"", *drivers}]
    too_large = [item for item in items if _value(item, "devices", 0) > len(found)]
    config.stash[_too_large] = too_large
    left_out = {*other, *too_large}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    too_large = config.stash.get(_too_large, [])
    if not too_large:
        return []
    wanted = max(_value(item, "devices", 0) for item in too_large)
    line = (
        f"{len(too_large)} tests need more than the {len(nics())} devices of this machine and are"
        f" left out; run: scripts/rdma-testbed --nics {wanted} -- pytest …"
    )
    return [line]


def _value(item: pytest.Item, marker: str, default: T) -> T:
    found = item.get_closest_marker(marker)
    return default if found is None else found.args[0]


@pytest.fixture(scope="session")
def rdma_nics() -> tuple[Nic, ...]:
    """All devices, at least four; without them the test fails, since it asks for them."""
    found = nics()
    assert len(found) >= 4, "no four RDMA devices; run: scripts/rdma-testbed --nics 8 -- pytest …"
    return found
