# SPDX-License-Identifier: Apache-2.0
"""Stores with a disk below their memory: real files, real processes, real kills."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_host import shared
from store_lower_tier import (
    KEYS,
    NBYTES,
    OBJECTS,
    N,
    get,
    in_lower_tier,
    owner_of,
    put_all,
    rests,
    stored,
    with_disk,
)
from store_makers import SIG, TIMEOUT_S, Room, config, deaf, until, without_more_threads
from store_meeting import owning

from kvstore.client import promoting
from kvstore.client.admission import MEASURED_MIN, Admitted
from kvstore.client.load_times import source_of
from kvstore.config import Config
from kvstore.loading import Load
from kvstore.objects.changes import LOWER_TIER, PLACE, Found, fingerprint_of
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.owner.tiering import READS_MAX
from kvstore.protocol.asking import NoAnswer
from kvstore.rules.tiered_table import Promoted, PromotionState
from kvstore.store import Store
from kvstore.tiers.disk import Disk

ROUNDS = 4


@pytest.fixture
def lender(directory: Path) -> Iterator[Store]:
    """A store with all objects, most of them in the lower tier."""
    with owning(with_disk(directory)) as store:
        put_all(store, store)
        yield store


@pytest.fixture
def reader(lender: Store, directory: Path) -> Iterator[Store]:
    """One beside it that lends nothing, and knows what there is."""
    with owning(config(directory)) as store:
        until(lambda: store.exists(KEYS, SIG, NBYTES).all(), "announcements")
        yield store


@pytest.mark.slow
def test_more_than_the_memory_holds_is_there(lender: Store, reader: Store) -> None:
    for client in (reader, lender):
        assert client.exists(KEYS, SIG, NBYTES).all()
        assert N // 2 < in_lower_tier(client).sum() < N
        assert get(client) == [Got.RIGHT] * N
    until(lambda: rests(lender), "what leaves")
    stats = owner_of(lender).stats()
    assert stats.dropped == stats.tier_failed == stats.tier_corrupted == 0
    assert stats.promoted > N
    assert stats.demoted == stats.lower_tier <= N
    assert stats.lower_tier_bytes == stats.lower_tier * NBYTES


def test_who_hears_late_that_an_object_was_put_below_gets_it(lender: Store, reader: Store) -> None:
    until(lambda: rests(lender), "what leaves")
    with deaf(reader):
        upper = np.flatnonzero(~in_lower_tier(reader)).tolist()
        until(lambda: get(lender) == [Got.RIGHT] * N, "each object pushes out another")
        until(lambda: in_lower_tier(lender)[upper].any(), "some are demoted")
        assert get(reader, upper) == [Got.RIGHT] * len(upper)


def test_what_lies_below_is_a_source_of_its_own(lender: Store, reader: Store) -> None:
    """Whose time has the owner's promote in it."""

    def is_measured() -> bool:
        """What the owner has promoted by the time of a get is not read from the lower tier."""
        assert get(reader, np.flatnonzero(in_lower_tier(reader))[:5]) == [Got.RIGHT] * 5
        some = [
            np.flatnonzero(in_lower_tier(reader))[:1],
            np.flatnonzero(~in_lower_tier(reader))[:1],
        ]
        return all(reader.expected_s(KEYS[one], SIG, NBYTES) is not None for one in some)

    lower = np.flatnonzero(in_lower_tier(reader))
    assert reader.expected_s(KEYS[lower[:1]], SIG, NBYTES) is None
    until(is_measured, "measurements of both sources")
    lower = np.flatnonzero(in_lower_tier(reader))
    places = reader._owners.look_up(KEYS, fingerprint_of(SIG, NBYTES))
    owner = int(places["owner"][0])
    reader.load_times.forget(owner)
    assert reader.expected_s(KEYS[lower[:1]], SIG, NBYTES) is None
    for _ in range(MEASURED_MIN):
        reader.load_times.measured(owner, 0.001, NBYTES)
        reader.load_times.measured(int(source_of(np.uint16(owner), np.True_)), 5.0, NBYTES)
    with deaf(reader):  # The owner goes on making room.
        lower, upper = np.flatnonzero(in_lower_tier(reader)), np.flatnonzero(~in_lower_tier(reader))
        wanted = KEYS[[*upper[:4], *lower[:4]]]
        assert reader.admit(wanted, SIG, NBYTES, compute_s=1.0) == Admitted(8, 4, 20.0, 8.0)
        assert reader.admit(wanted, SIG, NBYTES, compute_s=6.0).offered == 8


def test_what_lies_below_is_not_stored_again(lender: Store, reader: Store) -> None:
    row = int(np.flatnonzero(in_lower_tier(reader))[0])
    room = Room(reader, 1, NBYTES)
    assert reader.put(KEYS[[row]], SIG, room.pieces) == [Put.EXISTS]
    other = Pieces.whole(np.array([room.bytes.ctypes.data], np.uint64), 5)
    assert owner_of(lender).storing.take(KEYS[[row]], SIG, other)[0].value == "exists"
    assert get(reader, [row]) == [Got.RIGHT]


@pytest.mark.slow
def test_a_restart_has_all_objects_again(directory: Path) -> None:
    """Also those that lay in memory alone: a store that is closed demotes them."""
    with owning(with_disk(directory)) as store:
        put_all(store, store)
    with owning(with_disk(directory)) as store, owning(config(directory)) as client:
        assert store.exists(KEYS, SIG, NBYTES).all()
        until(lambda: client.exists(KEYS, SIG, NBYTES).all(), "announcements")
        assert in_lower_tier(client).all()
        assert get(client) == [Got.RIGHT] * N


def test_a_file_and_a_disk_have_all_objects_together(directory: Path) -> None:
    more = {"file": directory / "slab"}
    with owning(with_disk(directory, **more)) as store:
        put_all(store, store)
        lower = in_lower_tier(store)  # At least: the owner goes on making room.
    with owning(with_disk(directory, **more)) as store:
        assert in_lower_tier(store)[lower].all()
        assert not in_lower_tier(store).all(), "the file keeps what is in memory"
        assert get(store) == [Got.RIGHT] * N


def test_what_was_removed_stays_removed(directory: Path) -> None:
    with owning(with_disk(directory)) as store:
        put_all(store, store)
        store.remove(KEYS[:50], SIG)
        assert store.exists(KEYS, SIG, NBYTES).sum() == 50
        assert get(store, range(50)) == [Got.MISSING] * 50
    with owning(with_disk(directory)) as store:
        assert store.exists(KEYS, SIG, NBYTES).tolist() == [False] * 50 + [True] * 50
        store.clear(SIG)
    with owning(with_disk(directory)) as store:
        assert not store.exists(KEYS, SIG, NBYTES).any()


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_removed_stays_removed_after_a_kill(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The disk is copied after the answer, while nothing is wiped yet: what a killed process
    leaves behind."""
    go_on = threading.Event()
    wipe = Disk.remove

    def later(self: Disk, names: Sequence[bytes]) -> None:
        if names:
            assert go_on.wait(TIMEOUT_S)
        wipe(self, names)

    copy = tmp_path / "left behind"
    with owning(with_disk(directory)) as store:
        put_all(store, store)
        until(lambda: rests(store), "nobody writes the disk")
        lower = in_lower_tier(store)
        monkeypatch.setattr(Disk, "remove", later)
        if whole:
            store.clear(SIG)
        else:
            store.remove(KEYS[:50], SIG)
        shutil.copytree(directory / "disk", copy)
        go_on.set()
        until(lambda: owner_of(store)._removed.stones.is_empty, "all is wiped")
    with owning(with_disk(directory, disk=copy)) as store:
        found = in_lower_tier(store)
        assert not found[:50].any()
        assert found[50:].tolist() == ([False] * 50 if whole else lower[50:].tolist())
        assert not (copy / "removed").read_bytes()


@pytest.mark.slow
def test_another_byte_on_the_disk_is_a_miss(lender: Store, reader: Store, directory: Path) -> None:
    until(lambda: rests(lender), "nobody writes these files")
    for path in (directory / "disk").glob("segment-*"):
        raw = bytearray(path.read_bytes())
        raw[4096 + 5000 :: 53_248] = bytes(b ^ 1 for b in raw[4096 + 5000 :: 53_248])
        path.write_bytes(raw)
    lower = np.flatnonzero(in_lower_tier(reader)).tolist()
    outcomes = get(reader, lower)
    assert set(outcomes) <= {Got.RIGHT, Got.MISSING}
    wrong = outcomes.count(Got.MISSING)
    assert wrong > 0
    assert owner_of(lender).stats().tier_corrupted == wrong
    until(lambda: reader.exists(KEYS[lower], SIG, NBYTES).sum() == len(lower) - wrong, "news")


def test_loads_by_layers_bring_what_lies_below(lender: Store, reader: Store) -> None:
    rows = [
        *np.flatnonzero(in_lower_tier(reader))[:10].tolist(),
        *np.flatnonzero(~in_lower_tier(reader))[:5].tolist(),
    ]
    room = Room(reader, len(rows), NBYTES)
    pieces = room.split(20_000, 30_000)
    load = Load(reader, KEYS[rows], SIG, pieces, TIMEOUT_S)
    load.begin(0, 1)
    load.begin(1, 2)
    assert load.wait(0)
    assert load.wait(1)
    assert load.finish() == [Got.RIGHT] * len(rows)
    load.cancel()
    assert (room.bytes == OBJECTS[rows]).all()


@pytest.mark.slow
def test_one_part_is_promoted_while_another_is_read(
    lender: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoting, "PART_BYTES", 3 * NBYTES)
    assert get(reader) == [Got.RIGHT] * N
    lower = np.flatnonzero(in_lower_tier(reader))[:10].tolist()
    lender.remove(KEYS[lower[4:6]], SIG)
    outcomes = get(reader, lower)
    missing = [row for row, one in zip(lower, outcomes, strict=True) if one is Got.MISSING]
    assert missing == lower[4:6]
    assert outcomes.count(Got.RIGHT) == 8


def test_what_lies_below_comes_where_no_more_threads_can_be_started(
    lender: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoting, "PART_BYTES", 3 * NBYTES)
    lower = np.flatnonzero(in_lower_tier(reader))[:5].tolist()
    with without_more_threads():
        assert get(reader, lower) == [Got.RIGHT] * 5


def test_a_reader_asks_for_what_has_gone(lender: Store, reader: Store) -> None:
    lower = np.flatnonzero(in_lower_tier(reader))[:3].tolist()
    with deaf(reader):
        lender.remove(KEYS[lower], SIG)
        assert in_lower_tier(reader)[lower].all(), "it has not heard of it"
        assert get(reader, lower) == [Got.MISSING] * 3
    handle = reader._owners.handle(reader._owners.usable()[0])
    assert handle is not None
    assert (
        handle.promote(KEYS[lower], SIG, NBYTES, TIMEOUT_S) == [Promoted(PromotionState.GONE)] * 3
    )


@pytest.mark.slow
def test_an_owner_that_is_killed_while_it_is_asked(
    directory: Path, start_lending: Callable[[], subprocess.Popen[str]]
) -> None:
    process = start_lending()
    with Store(shared(directory, 0)) as client:
        until(client._owners.usable, "the owner")
        put_all(client, None)
        until(lambda: in_lower_tier(client).sum() > 10, "what leaves")
        lower = np.flatnonzero(in_lower_tier(client)).tolist()
        os.kill(process.pid, signal.SIGSTOP)  # It cannot answer any more.
        outcomes: list[Got] = []
        asking = threading.Thread(target=lambda: outcomes.extend(get(client, lower, TIMEOUT_S)))
        asking.start()
        process.kill()
        asking.join(TIMEOUT_S / 2)
        assert not asking.is_alive(), "its death is noticed long before the deadline"
        assert set(outcomes) <= {Got.UNREACHABLE, Got.MISSING}, "the disk is not the cause"
        assert len(outcomes) == len(lower)


@pytest.mark.slow
def test_what_lay_below_an_owner_that_was_killed_is_not_left_below(
    directory: Path, start_lending: Callable[[], subprocess.Popen[str]]
) -> None:
    """Nobody shall look at a disk for it."""
    process = start_lending()
    with Store(shared(directory, 0)) as client:
        until(client._owners.usable, "the owner")
        put_all(client, None)
        until(lambda: in_lower_tier(client).sum() > 10, "what leaves")
        lower = np.flatnonzero(in_lower_tier(client)).tolist()
        process.kill()
        process.wait()
        assert set(get(client, lower)) <= {Got.UNREACHABLE, Got.MISSING}


class _Silent:
    """An owner that does not answer."""

    def promote(self, *_: Any) -> Sequence[Promoted]:
        raise NoAnswer("it does not answer")


@pytest.mark.parametrize(
    ("handles", "left_s", "found"),
    [
        ([None], 60.0, Found.SILENT),
        ([_Silent()], 60.0, Found.SILENT),
        ([_Silent(), None], 0.0, Found.SILENT),
        ([_Silent(), _Silent()], 0.0, Found.HERE),
    ],
    ids=["no connection", "no answer in time", "ended meanwhile", "no time"],
)
def test_an_owner_that_cannot_be_asked_is_told_apart_from_a_slow_disk(
    handles: list[Any], left_s: float, found: int
) -> None:
    places = np.zeros(2, PLACE)
    places["found"], places["slot"], places["owner"] = Found.HERE, [LOWER_TIER, 7], 3
    asked = iter(handles)
    promoting.promote(
        lambda _: next(asked), KEYS[:2], SIG, NBYTES, places, time.monotonic() + left_s
    )
    assert places["found"].tolist() == [found, Found.HERE]
    assert places["slot"].tolist() == [LOWER_TIER, 7]


@pytest.mark.slow
def test_no_time_to_promotion_is_an_outcome(lender: Store, reader: Store) -> None:
    lower = np.flatnonzero(in_lower_tier(reader))[:2].tolist()
    tiering = owner_of(lender)._tiering
    assert tiering is not None
    read, begun, end = tiering._tier.read, threading.Event(), threading.Event()

    def slow(objects: Any) -> Any:
        begun.set()
        assert end.wait(TIMEOUT_S)
        return read(objects)

    tiering._tier.read = slow  # type: ignore[method-assign]  # A disk that hangs.

    def is_asked() -> bool:
        assert get(reader, lower, 0.2) == [Got.NOT_PROMOTED] * 2
        return begun.is_set()

    until(is_asked, "the disk is asked")
    assert get(lender, lower, 0.2) == [Got.NOT_PROMOTED] * 2, (
        "nor does the owner itself wait longer"
    )
    # A second one waits for the first, until its own deadline.
    assert get(reader, lower[:1], 0.2) == [Got.NOT_PROMOTED]
    others = np.flatnonzero(in_lower_tier(reader))[2:9].tolist()
    for row in others:  # More than may read at once: they take no slots.
        assert get(reader, [row], 0.05) == [Got.NOT_PROMOTED]
    assert len(owner_of(lender)._table.ledger.promoting) <= READS_MAX + 1
    end.set()
    until(lambda: not owner_of(lender)._table.ledger.promoting, "what has come late")
    assert get(reader, lower + others) == [Got.RIGHT] * 9


def test_readers_of_a_disk_that_is_slow_to_write_lose_no_object(
    lender: Store, reader: Store
) -> None:
    """One wants what is in the lower tier, while others read what is to leave for it."""
    owner = owner_of(lender)
    until(lambda: rests(lender), "what leaves")
    ledger, tiering = owner._table.ledger, owner._tiering
    assert tiering is not None
    write, go_on = tiering._tier.write, threading.Event()

    def slow(objects: Any) -> Any:
        assert go_on.wait(TIMEOUT_S)
        return write(objects)

    tiering._tier.write = slow  # type: ignore[method-assign]
    lower, outcomes = np.flatnonzero(in_lower_tier(reader)).tolist(), list[Got]()
    promoting = threading.Thread(target=lambda: outcomes.extend(get(reader, lower)))
    promoting.start()

    def is_demoting(count: int) -> bool:
        owner.touch(KEYS, SIG)  # What is read stays; so others have to leave instead.
        return len(ledger.demoting) >= count or ledger.counts.dropped > 0

    try:
        until(lambda: is_demoting(8), "more than may wait without a reader")
        assert ledger.counts.dropped == 0
    finally:
        go_on.set()
        promoting.join(TIMEOUT_S)
    assert outcomes == [Got.RIGHT] * len(lower)
    assert get(lender) == [Got.RIGHT] * N
    assert owner.stats().dropped == 0


@pytest.mark.slow
def test_readers_who_push_out_each_others_objects_all_get_them(
    lender: Store, directory: Path
) -> None:
    """Together they want three times what the memory holds, again and again."""
    owner, wrong = owner_of(lender), list[Any]()
    with owning(config(directory)) as client:
        until(lambda: client.exists(KEYS, SIG, NBYTES).all(), "announcements")
        # What has no copy in the lower tier yet may be dropped in a hurry.
        while len(owner._table.ledger) < N:
            for row in range(N):
                assert get(client, [row]) == [Got.RIGHT]

    def read(seed: int) -> None:
        with owning(config(directory)) as client:
            until(lambda: client.exists(KEYS, SIG, NBYTES).all(), "announcements")
            chosen = np.random.default_rng(seed)
            for _ in range(ROUNDS):
                rows = chosen.permutation(N)[:60].tolist()
                outcomes = get(client, rows)
                wrong.extend(one for one in outcomes if one is not Got.RIGHT)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(TIMEOUT_S)
        assert not one.is_alive()
    # One that is pushed out between promote and read again and again is told as moved.
    assert set(wrong) <= {Got.MOVED, Got.NOT_PROMOTED}
    assert len(wrong) < ROUNDS * 60 * 3 // 4
    stats = owner.stats()
    assert stats.tier_corrupted == stats.dropped == 0
    until(lambda: not owner._table.ledger.promoting, "what has come late")


@contextmanager
def putting(client: Store) -> Iterator[None]:
    """All the time, in another thread, whatever becomes of it."""
    end = threading.Event()

    def put() -> None:
        room = Room(client, N, NBYTES)
        room.bytes[:] = OBJECTS
        order = np.random.default_rng(5)
        while not end.is_set():
            rows = order.permutation(N)[:4].tolist()
            client.put(KEYS[rows], SIG, room.pieces.of(rows), 1.0)
        client.deregister(room.region)

    thread = threading.Thread(target=put)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(TIMEOUT_S)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_writes_costs_what_was_being_written(
    directory: Path, start_lending: Callable[[], subprocess.Popen[str]]
) -> None:
    for round_number in range(2):
        process = start_lending()
        with Store(shared(directory, 0)) as client:
            until(client._owners.usable, "the owner")
            with putting(client):
                wanted = 15 * (round_number + 1)
                until(lambda: in_lower_tier(client).sum() >= wanted, "what leaves")  # noqa: B023
                known = in_lower_tier(client)
                process.kill()
                process.wait(TIMEOUT_S)
        process = start_lending()
        with Store(shared(directory, 0)) as client:
            until(lambda: client.exists(KEYS[known], SIG, NBYTES).all(), "announcements")  # noqa: B023
            found = client.exists(KEYS, SIG, NBYTES)
            outcomes = get(client, np.flatnonzero(found).tolist())
            assert outcomes == [Got.RIGHT] * len(outcomes)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_serve_has_its_keys_again(
    directory: Path, start_lending: Callable[[], subprocess.Popen[str]]
) -> None:
    process = start_lending()
    with Store(shared(directory, 0)) as client:
        until(client._owners.usable, "the owner")
        put_all(client, None)
        there = stored(client)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0
    start_lending()
    with Store(shared(directory, 0)) as client:
        until(lambda: client.exists(KEYS[there], SIG, NBYTES).all(), "announcements")
        assert get(client, np.flatnonzero(there).tolist()) == [Got.RIGHT] * int(there.sum())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"disk": "d"}, "give both, or neither"),
        ({"disk_size": "1GiB"}, "give both, or neither"),
        ({"disk": "d", "disk_size": "1GiB"}, "needs memory above it"),
        ({"disk": "d", "disk_size": -1}, "disk_size=-1 must be ≥ 0"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config.of(settings)
