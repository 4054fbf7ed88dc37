# SPDX-License-Identifier: Apache-2.0
"""What a closed store leaves behind: nothing."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from store_makers import SIG, Room, config, keys, until

from kvstore.outcomes import Got, Put
from kvstore.store import Store

MIB = 1 << 20


def descriptors() -> set[str]:
    """Those that this process has open, but for the one that lists them."""
    return {path.name for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)}


def put_and_get(directory: Path) -> None:
    with Store(config(directory, 8 * MIB)), Store(config(directory)) as guest:
        room = Room(guest, 4, 5000)
        until(lambda: guest.put(keys(4), SIG, room.pieces) == [Put.STORED] * 4)
        until(lambda: guest.get(keys(4), SIG, room.pieces) == [Got.RIGHT] * 4)


def test_closed_stores_give_back_their_descriptors_at_once(directory: Path) -> None:
    """Not when Python next looks for garbage, which in a big process may be never."""
    put_and_get(directory)  # zmq makes some that it keeps
    gc.collect()
    before = descriptors()
    gc.disable()
    try:
        put_and_get(directory)
        until(lambda: descriptors() <= before)
    finally:
        gc.enable()
