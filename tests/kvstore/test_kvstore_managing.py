# SPDX-License-Identifier: Apache-2.0
"""How large objects are, for who knows their keys alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_lower_tier import KEYS as TIERED
from store_lower_tier import NBYTES as TIERED_BYTES
from store_lower_tier import in_lower_tier, with_disk
from store_lower_tier import put_all as put_too_many
from store_makers import SIG, keys, until
from store_meeting import owning
from store_objects import KEYS, NBYTES, N, filled, put_all

from kvstore.objects.outcomes import Put
from kvstore.store import Store


@pytest.mark.parametrize("way", ["owner", "guest", "tcp_guest"])
def test_the_size_of_a_key_is_known(request: pytest.FixtureRequest, owner: Store, way: str) -> None:
    store: Store = request.getfixturevalue(way)
    until(store._owners.usable, "the owner is known")
    put_all(store)
    small = filled(store, 1, 7)
    assert store.put(keys(1, 3), SIG, small.pieces) == [Put.STORED]
    asked = np.concatenate([KEYS, keys(1, 3), keys(1, 4)])
    assert store.sizes(asked, SIG).tolist() == [NBYTES] * N + [7, 0]
    assert not store.sizes(asked, bytes(16)).any(), "under this signature there is none"
    assert len(store.sizes(asked[:0], SIG)) == 0


def test_so_is_the_size_of_what_lies_in_the_lower_tier(directory: Path) -> None:
    with owning(with_disk(directory)) as store:
        put_too_many(store, store)
        assert in_lower_tier(store).any()
        assert (store.sizes(TIERED, SIG) == TIERED_BYTES).all()
    with owning(with_disk(directory)) as store:
        assert (store.sizes(TIERED, SIG) == TIERED_BYTES).all(), "which a restart has found there"
