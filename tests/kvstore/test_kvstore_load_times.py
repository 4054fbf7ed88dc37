# SPDX-License-Identifier: Apache-2.0
"""What a process measures of its reads, and judges by it, on owners that are real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_makers import SIG, TIMEOUT_S, Room, config, contents, keys, until
from store_meeting import owning

from kvstore.client.admission import MEASURED_MIN, Admitted
from kvstore.client.load_times import LoadTimes
from kvstore.client.owners import OWN
from kvstore.loading import Load
from kvstore.objects.outcomes import Got, Put
from kvstore.store import Store

N, NBYTES = 6, 40_000


@pytest.fixture
def stored(owner: Store, guest: Store) -> Room:
    """Objects of ``owner`` that ``guest`` knows of, and memory of ``guest`` for them."""
    return stored_for(guest, owner)


def stored_for(guest: Store, owner: Store) -> Room:
    room = Room(owner, N, NBYTES)
    room.bytes[:] = contents(N, NBYTES)
    assert owner.put(keys(N), SIG, room.pieces) == [Put.STORED] * N
    until(lambda: guest.exists(keys(N), SIG, NBYTES).all(), "the guest knows of them")
    return Room(guest, N, NBYTES)


def speed(store: Store) -> float:
    """Of its only other owner."""
    (seen,) = store.status().owners
    return seen.bytes_per_s


@pytest.mark.parametrize("way", ["get", "load"])
def test_reads_are_measured(guest: Store, stored: Room, way: str) -> None:
    assert guest.expected_s(keys(N), SIG, NBYTES) is None
    assert guest.admit(keys(N), SIG, NBYTES, 1e-12) == Admitted(N, N, 0.0, N * 1e-12)
    for _ in range(MEASURED_MIN):
        if way == "get":
            assert guest.get(keys(N), SIG, stored.pieces) == [Got.RIGHT] * N
        else:
            load = Load(guest, keys(N), SIG, stored.pieces, TIMEOUT_S)
            load.begin(0, 1)
            assert load.wait(0)
            assert load.finish() == [Got.RIGHT] * N
    rate = speed(guest)
    assert rate > 0
    assert guest.expected_s(keys(N), SIG, NBYTES) == pytest.approx(N * NBYTES / rate)
    assert guest.admit(keys(N), SIG, NBYTES, 1e-12).offered == 0
    assert guest.admit(keys(N), SIG, NBYTES, 1e-12, probe=True).offered == 1
    assert guest.admit(keys(N), SIG, NBYTES, 1e3).offered == N
    assert guest.admit(keys(N), SIG, NBYTES, None).offered == N


def test_only_what_is_stored_from_the_first_on_is_judged(guest: Store, stored: Room) -> None:
    wanted = np.concatenate([keys(2), keys(1, 9), keys(N)[2:]])
    before = guest.status().lookups
    assert guest.admit(wanted, SIG, NBYTES, None) == Admitted(2, 2)
    after = guest.status().lookups
    assert after["found"] == before["found"] + N, "look-ups are counted as ever"
    assert after["missing"] == before.get("missing", 0) + 1
    assert guest.admit(keys(1, 9), SIG, NBYTES, 1.0) == Admitted(0, 0)
    assert guest.admit(wanted[:0], SIG, NBYTES, 1.0) == Admitted(0, 0)
    assert guest.expected_s(wanted[:0], SIG, NBYTES) is None


def test_a_read_that_times_out_counts_as_a_slow_one(
    tcp_guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.client import reading

    stored = stored_for(tcp_guest, owner)
    monkeypatch.setattr(
        reading.Group, "wait_for", lambda self, *_: self.fail(Got.TIMED_OUT, "a test says so")
    )
    for _ in range(MEASURED_MIN):
        assert tcp_guest.get(keys(N), SIG, stored.pieces, 0.0) == [Got.TIMED_OUT] * N
    assert speed(tcp_guest) > 0


def test_an_owner_that_is_reached_anew_is_measured_anew(guest: Store, stored: Room) -> None:
    for _ in range(MEASURED_MIN):
        guest.get(keys(N), SIG, stored.pieces)
    assert speed(guest) > 0
    guest._owners._connections.drop(1)
    until(lambda: guest.get(keys(N), SIG, stored.pieces) == [Got.RIGHT] * N, "it is connected to")
    assert speed(guest) == 0.0


def test_the_own_memory_is_a_source_like_others(directory: Path) -> None:
    with owning(config(directory, 8 << 20)) as store:
        room = Room(store, N, NBYTES)
        assert store.put(keys(N), SIG, room.pieces) == [Put.STORED] * N
        for _ in range(MEASURED_MIN):
            assert store.get(keys(N), SIG, room.pieces) == [Got.RIGHT] * N
        assert store.load_times.bytes_per_s(OWN) > 0


def test_what_came_of_it_is_counted() -> None:
    load_times = LoadTimes()
    load_times.count(Admitted(5, 3, 1.0, 2.0))
    load_times.count(Admitted(5, 1, 9.0, 2.0, probe=True))
    load_times.loaded(expected_s=1.0, took_s=1.5, compute_s=2.0)
    load_times.loaded(expected_s=1.0, took_s=2.5, compute_s=2.0)
    counts = load_times.counts
    assert (counts.admitted, counts.declined, counts.probes) == (4, 6, 1)
    assert (counts.loads, counts.expected_s, counts.took_s, counts.unpaid) == (2, 2.0, 4.0, 1)
