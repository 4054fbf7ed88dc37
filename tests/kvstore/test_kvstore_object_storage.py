# SPDX-License-Identifier: Apache-2.0
"""Stores with object storage below their memory."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_host import shared
from store_lower_tier import (
    KEYS,
    MEMORY,
    MIB,
    NBYTES,
    N,
    get,
    in_lower_tier,
    owner_of,
    put_all,
    rests,
    stored,
)
from store_makers import SIG, TIMEOUT_S, config, until, without_more_threads
from store_meeting import owning
from store_objects import handle_of

from kvstore.config import Config
from kvstore.objects.outcomes import Got
from kvstore.protocol.messages import Gone
from kvstore.store import Store
from kvstore.tiers.object_tombstones import ObjectTombstones
from kvstore.tiers.objects import Objects


def with_objects(directory: Path, **more: Any) -> Config:
    more = {"objects": (directory / "bucket").as_uri(), "objects_size": 16 * MIB} | more
    return config(directory, MEMORY, **more)


@pytest.fixture
def lender(directory: Path) -> Iterator[Store]:
    """A store with all objects, most of them in object storage."""
    with owning(with_objects(directory)) as store:
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
        assert N // 2 < in_lower_tier(client).sum() < N
        assert get(client) == [Got.RIGHT] * N
    until(lambda: rests(lender), "what leaves")
    stats = owner_of(lender).stats()
    assert stats.dropped == stats.tier_failed == stats.tier_corrupted == 0
    assert stats.promoted > N
    assert stats.lower_tier_bytes == stats.lower_tier * NBYTES
    assert stats.lower_tier_capacity == 16 * MIB


@pytest.mark.slow
def test_a_restart_has_all_objects_again(directory: Path) -> None:
    with owning(with_objects(directory)) as store:
        put_all(store, store)
        store.remove(KEYS[:10], SIG)
    with owning(with_objects(directory)) as store:
        assert store.exists(KEYS, SIG, NBYTES).tolist() == [False] * 10 + [True] * (N - 10)
        assert get(store, range(10, N)) == [Got.RIGHT] * (N - 10)
        store.clear(SIG)
    with owning(with_objects(directory)) as store:
        assert not store.exists(KEYS, SIG, NBYTES).any()
        assert not list((directory / "bucket").iterdir())


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_removed_stays_removed_after_a_kill(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The bucket is copied after the answer, while its bundles do not tell it yet: what a killed
    process leaves behind."""
    go_on = threading.Event()
    remove = Objects.remove

    def later(self: Objects, names: Sequence[bytes]) -> None:
        if names:
            assert go_on.wait(TIMEOUT_S)
        remove(self, names)

    copy = tmp_path / "left behind"
    with owning(with_objects(directory)) as store:
        put_all(store, store)
        until(lambda: rests(store), "nobody writes the bucket")
        lower = in_lower_tier(store)
        with monkeypatch.context() as patch:
            patch.setattr(Objects, "remove", later)
            if whole:
                store.clear(SIG)
            else:
                store.remove(KEYS[:50], SIG)
            shutil.copytree(directory / "bucket", copy)
            go_on.set()
        until(lambda: owner_of(store)._removed.stones.is_empty, "the bundles tell it")
    copy.chmod(0o700)
    with owning(with_objects(directory, objects=copy.as_uri())) as store:
        found = in_lower_tier(store)
        assert lower[50:].any()
        assert not found[:50].any()
        assert found[50:].tolist() == ([False] * 50 if whole else lower[50:].tolist())
        assert not list(copy.glob("*.buried1"))


def test_who_has_read_wrong_bytes_does_not_wait_for_the_bucket(
    lender: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get has a deadline, and an object store may hang."""
    go_on, told = threading.Event(), list[object]()

    def slowly(_: ObjectTombstones, names: Sequence[bytes]) -> None:
        assert go_on.wait(TIMEOUT_S)
        told.append(names)

    monkeypatch.setattr(ObjectTombstones, "remove", slowly)
    future = handle_of(lender, lender._owners.usable()[0]).remove_soon(KEYS, SIG)
    assert not future.done()
    assert not lender.exists(KEYS, SIG, NBYTES).any()
    go_on.set()
    assert future.result(TIMEOUT_S) == Gone(N, b"\1" * N)
    assert len(told) == 1


def test_a_removal_is_told_where_no_more_threads_can_be_started(lender: Store) -> None:
    stones = owner_of(lender)._removed.stones
    assert stones is not None
    with without_more_threads():
        assert all(owner_of(lender).remove(KEYS[:3], SIG))
    assert not lender.exists(KEYS[:3], SIG, NBYTES).any()
    until(lambda: stones.is_empty, "the bundles tell it")


def test_a_removal_that_cannot_be_told_is_in_the_log(
    lender: Store, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Else a bundle that is being written makes the folder again.
    until(lambda: rests(lender), "nobody writes the bucket")
    shutil.rmtree(directory / "bucket")
    (directory / "bucket").touch()
    assert (directory / "bucket").is_file()
    lender.clear(SIG)
    assert "may be found again if this process is killed now" in caplog.text
    assert not lender.exists(KEYS, SIG, NBYTES).any()


@pytest.mark.slow
def test_what_does_not_fit_below_is_gone_for_all(directory: Path) -> None:
    """Bundles that are deleted are announced."""
    with (
        owning(with_objects(directory, objects_size=2 * MIB)) as store,
        owning(config(directory)) as client,
    ):
        put_all(store, store)
        until(lambda: rests(store), "what leaves")
        assert owner_of(store).stats().lower_tier_bytes <= 2 * MIB
        found = store.exists(KEYS, SIG, NBYTES)
        assert 0 < found.sum() < N
        until(lambda: (client.exists(KEYS, SIG, NBYTES) == found).all(), "announcements")
        outcomes = get(client, np.flatnonzero(found))
        assert set(outcomes) <= {Got.RIGHT, Got.MISSING, Got.MOVED}
        assert outcomes.count(Got.RIGHT) > len(outcomes) // 2


@pytest.mark.slow
def test_a_store_that_is_gone_costs_misses(
    lender: Store, reader: Store, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: rests(lender), "what leaves")
    lower = np.flatnonzero(in_lower_tier(reader)).tolist()
    shutil.rmtree(directory / "bucket")
    (directory / "bucket").touch()
    outcomes = get(reader, lower)
    assert set(outcomes) == {Got.MISSING}
    until(lambda: not in_lower_tier(reader)[lower].any(), "news")
    assert owner_of(lender).stats().tier_failed >= len(lower)
    assert caplog.text.count("cannot be used (") == 1


@pytest.mark.slow
def test_serve_has_its_keys_again(
    directory: Path, start_lending: Callable[..., subprocess.Popen[str]]
) -> None:
    """After SIGTERM all of them, and after SIGKILL those that were in object storage."""
    options = (f"--objects={(directory / 'bucket').as_uri()}", "--objects-size=16MiB")
    process = start_lending(*options)
    with Store(shared(directory, 0)) as client:
        until(client._owners.usable, "the owner")
        put_all(client, None)
        there = stored(client)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0
    for _ in range(2):
        process = start_lending(*options)
        with Store(shared(directory, 0)) as client:
            until(lambda: client.exists(KEYS[there], SIG, NBYTES).all(), "announcements")
            assert in_lower_tier(client)[there].all()
            assert get(client, np.flatnonzero(there).tolist()) == [Got.RIGHT] * int(there.sum())
        process.kill()
        process.wait(TIMEOUT_S)


@pytest.mark.slow
def test_below_a_disk(directory: Path) -> None:
    """What the disk has no room for comes from there; a host that has lost its disk has it all."""
    more = {"disk": directory / "disk", "disk_size": 2 * MIB}
    with owning(with_objects(directory, **more)) as store, owning(config(directory)) as client:
        put_all(store, store)
        owner = owner_of(store)
        until(lambda: rests(store), "what leaves")

        def is_announced() -> bool:
            return bool((client.exists(KEYS, SIG, NBYTES) == store.exists(KEYS, SIG, NBYTES)).all())

        until(is_announced, "what the disk has, and what it has dropped before it was copied")
        found = store.exists(KEYS, SIG, NBYTES)
        assert found.sum() > N // 2
        outcomes = get(client, np.flatnonzero(found))
        assert set(outcomes) <= {Got.RIGHT, Got.MISSING}
        assert outcomes.count(Got.RIGHT) > N // 2
        assert owner.stats().lower_tier_capacity > 16 * MIB
    shutil.rmtree(directory / "disk")
    with owning(with_objects(directory, **more)) as store:
        there = store.exists(KEYS, SIG, NBYTES)
        assert there.sum() > N // 2
        assert get(store, np.flatnonzero(there)) == [Got.RIGHT] * int(there.sum())


def test_an_object_store_that_cannot_be_opened_leaves_the_disk_to_others(directory: Path) -> None:
    more = {"disk": directory / "disk", "disk_size": 2 * MIB}
    with pytest.raises(ValueError, match="objects_size=4096 is too small"):
        owning(with_objects(directory, objects_size=4096, **more))
    with owning(config(directory, MEMORY, **more)) as store:
        assert store.exists(KEYS, SIG, NBYTES).sum() == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objects": "s3://b/p"}, "objects='s3://b/p' and objects_size=0: give both, or neither"),
        ({"objects_size": "1GiB"}, "objects=None and objects_size=1073741824: give both"),
        ({"objects": "s3://b/p", "objects_size": "1GiB"}, "needs memory above it"),
        ({"objects": "s3://b/p", "objects_size": -1}, "objects_size=-1 must be ≥ 0"),
        (
            {"objects": "/mnt/kv", "objects_size": 1, "memory": 1},
            "objects='/mnt/kv' is not a URL of s3://, gs://, az://, file://, memory://",
        ),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config.of(settings)
