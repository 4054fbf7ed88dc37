# SPDX-License-Identifier: Apache-2.0
"""Bundles in real object stores: a directory, this process's memory, and servers that fail."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from obstore.store import MemoryStore
from store_makers import contents

from kvstore.memory.policies import POLICIES
from kvstore.tiers.base import Laid, Wanted, Written
from kvstore.tiers.bucket import Bucket, BucketError, open_bucket
from kvstore.tiers.bundleheads import HEAD_BYTES_MAX
from kvstore.tiers.objects import TOLD_EVERY_S, Objects

MIB = 1 << 20
N, NBYTES = 20, 20_000
OBJECTS = contents(N, NBYTES)
NAMES = [bytes([i]) * 32 for i in range(N)]
LARGEST = 256 << 10
SIZE = 2 * MIB
"""Bundles of 128 KiB: six objects each."""
TIMEOUT_S = 60.0


class Clock:
    """Stands still until it is told."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def tier_of(bucket: Bucket, size: int = SIZE, clock: Any = None) -> Iterator[Objects]:
    tier = Objects(bucket, "the store", size, LARGEST, POLICIES["lru"], clock or Clock())
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def tier_at(path: Path, size: int = SIZE, clock: Any = None) -> Iterator[Objects]:
    with tier_of(open_bucket(path.as_uri(), TIMEOUT_S), size, clock) as tier:
        yield tier


def laid(row: int, data: np.ndarray | None = None) -> Laid:
    raw = (OBJECTS[row] if data is None else data).tobytes()
    return Laid(NAMES[row], len(raw), xxhash.xxh3_64_intdigest(raw), memoryview(raw + bytes(9)))


def put(tier: Objects, rows: Any) -> Written:
    return tier.write([laid(row) for row in rows])


def read_all(tier: Objects, rows: Any, nbytes: int = NBYTES) -> list[bytes | None]:
    wanted = [Wanted(NAMES[row], nbytes, memoryview(bytearray(nbytes + 9))) for row in rows]
    found: list[bytes | None] = []
    for one, checksum in zip(wanted, tier.read(wanted), strict=True):
        raw = bytes(one.memory[:nbytes])
        assert checksum is None or checksum == xxhash.xxh3_64_intdigest(raw)
        found.append(None if checksum is None else raw)
    return found


def right(rows: Any) -> list[bytes]:
    return [OBJECTS[row].tobytes() for row in rows]


def files(path: Path, kind: str) -> list[Path]:
    return sorted(path.glob(f"*.{kind}1"), key=lambda one: one.stat().st_mtime_ns)


def file_of(path: Path, row: int) -> tuple[Path, int]:
    """The bundle of an object, and where it begins there."""
    raw = OBJECTS[row].tobytes()
    for one in files(path, "bundle"):
        at = one.read_bytes().find(raw)
        if at >= 0:
            return one, at
    raise AssertionError(f"no bundle has object {row}")


def change_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    with tier_at(tmp_path / "b") as tier:
        assert tier.found() == []
        assert put(tier, range(N)) == Written([True] * N, [])
        assert len(files(tmp_path / "b", "bundle")) == 4, "several objects in each"
        assert (tmp_path / "b").stat().st_mode & 0o777 == 0o700
        assert read_all(tier, range(N)) == right(range(N))
        assert read_all(tier, [3], NBYTES + 1) == [None], "of another size"
    with tier_at(tmp_path / "b") as tier:
        assert {one.name: one.nbytes for one in tier.found()} == dict.fromkeys(NAMES, NBYTES)
        assert read_all(tier, reversed(range(N))) == right(reversed(range(N)))
        usage = tier.usage()
        assert (usage.objects, usage.nbytes, usage.capacity) == (N, N * NBYTES, SIZE)
        assert (usage.failed, usage.corrupted) == (0, 0)


def test_in_the_memory_of_the_process() -> None:
    store = MemoryStore()
    with tier_of(Bucket(store, TIMEOUT_S)) as tier:
        assert put(tier, range(N)).stored == [True] * N
        assert read_all(tier, range(N)) == right(range(N))
    with tier_of(Bucket(store, TIMEOUT_S)) as tier:
        assert len(tier.found()) == N
        assert read_all(tier, range(N)) == right(range(N))
    with tier_of(open_bucket("memory://", TIMEOUT_S)) as tier:
        assert tier.found() == [], "of nobody else"


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, LARGEST])
def test_objects_of_all_sizes(tmp_path: Path, nbytes: int) -> None:
    data = contents(2, nbytes, seed=3)
    with tier_at(tmp_path) as tier:
        assert tier.write([laid(i, data[i]) for i in range(2)]).stored == [True, True]
    with tier_at(tmp_path) as tier:
        assert len(tier.found()) == 2
        assert read_all(tier, range(2), nbytes) == [one.tobytes() for one in data]


def test_removed_objects_stay_removed(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        tier.remove([NAMES[0], NAMES[1], b"?" * 32])
        assert read_all(tier, range(3)) == [None, None, *right([2])]
        assert len(files(tmp_path, "removed")) == 1
        tier.remove(NAMES[6:12])
        assert len(files(tmp_path, "bundle")) == 3, "a bundle without objects is deleted"
        tier.remove([NAMES[2]])
        assert len(files(tmp_path, "removed")) == 1, "one for each bundle"
    left = [3, 4, 5, *range(12, N)]
    with tier_at(tmp_path) as tier:
        assert {one.name for one in tier.found()} == {NAMES[i] for i in left}
        assert put(tier, [0]).stored == [True]
        assert read_all(tier, [0]) == right([0])
        tier.remove(NAMES[3:6])
        assert not files(tmp_path, "removed"), "goes with its bundle"
    with tier_at(tmp_path) as tier:
        assert {one.name for one in tier.found()} == {NAMES[i] for i in [0, *range(12, N)]}


def test_the_size_limits_what_is_stored(tmp_path: Path) -> None:
    """Bundles go as a whole, those first that were read longest ago."""
    size = LARGEST + HEAD_BYTES_MAX  # For 13 objects; a bundle has one each.
    with tier_at(tmp_path, size) as tier:
        assert put(tier, range(10)) == Written([True] * 10, [])
        assert read_all(tier, [0]) == right([0])
        written = put(tier, range(10, 15))
        assert written.stored == [True] * 5
        assert NAMES[0] not in written.gone
        kept = [row for row in range(15) if NAMES[row] not in written.gone]
        assert read_all(tier, kept) == right(kept)
        assert sum(one.stat().st_size for one in files(tmp_path, "bundle")) <= size
        assert tier.usage().objects == len(kept) == len(files(tmp_path, "bundle"))
    with tier_at(tmp_path, size) as tier:
        assert len(tier.found()) == len(kept)


def test_what_went_for_others_of_the_same_write_is_not_stored(tmp_path: Path) -> None:
    with tier_at(tmp_path, LARGEST + HEAD_BYTES_MAX) as tier:
        written = put(tier, range(N))
        kept = [row for row in range(N) if written.stored[row]]
        assert 8 <= len(kept) < N
        assert {NAMES[row] for row in range(N) if row not in kept} <= set(written.gone)
        assert read_all(tier, range(N)) == [
            OBJECTS[row].tobytes() if row in kept else None for row in range(N)
        ]
        large = contents(1, 2 * LARGEST, seed=4)[0]
        assert tier.write([laid(0, large)]).stored == [False], "larger than all"
        assert tier.usage().objects <= len(kept)


def test_a_smaller_size_keeps_what_fits(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
    os.utime(file_of(tmp_path, N - 1)[0], (4e9, 4e9))
    with tier_at(tmp_path, LARGEST + HEAD_BYTES_MAX) as tier:
        found = {one.name for one in tier.found()}
        assert 0 < len(found) < N
        assert NAMES[N - 1] in found, "the newest"
        assert put(tier, [0]).stored == [True]
        size = sum(one.stat().st_size for one in files(tmp_path, "bundle"))
        assert size <= LARGEST + HEAD_BYTES_MAX
    with pytest.raises(ValueError, match=r"objects_size=1000 is too small: an object of 262144"):
        tier_at(tmp_path, 1000).__enter__()


def test_another_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with tier_at(tmp_path, clock=clock) as tier:
        put(tier, range(N))
        for row in (5, 7, 8):
            path, at = file_of(tmp_path, row)
            change_byte(path, at + NBYTES - 1)
        assert read_all(tier, [4, 5, 6, 7]) == [*right([4]), None, *right([6]), None]
        assert tier.usage().corrupted == 2
        assert tier.usage().objects == N - 2
        assert caplog.text.count("cannot be read as it was written; it is dropped") == 1
        clock.now_s += TOLD_EVERY_S
        assert read_all(tier, [8]) == [None]
        assert "it is dropped (1 more such lines were left out)" in caplog.text
        assert read_all(tier, [5]) == [None]
        assert tier.usage().corrupted == 3, "it is not read again"
        assert put(tier, [5]).stored == [True]
        assert read_all(tier, [5]) == right([5])
    with tier_at(tmp_path) as tier:
        tier.found()
        assert read_all(tier, [5, 7]) == [*right([5]), None]


@pytest.mark.parametrize("kept", [0, 10, 300, 60_000])
def test_a_bundle_that_was_cut_short_is_deleted(
    tmp_path: Path, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
    path, _ = file_of(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:kept])
    with tier_at(tmp_path) as tier:
        assert {one.name for one in tier.found()} == set(NAMES[6:])
        assert "a bundle in the store is not whole, and is deleted" in caplog.text
        assert put(tier, [0]).stored == [True]
        assert not path.exists()


def test_a_bundle_that_becomes_shorter_costs_what_lay_there(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        path, _ = file_of(tmp_path, 0)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert read_all(tier, range(6)) == [*right(range(5)), None]
        path.write_bytes(whole[:100])
        assert read_all(tier, range(5)) == [None] * 5
        assert read_all(tier, range(6, N)) == right(range(6, N))
        assert tier.usage().objects == N - 6


def test_what_a_bundle_says_of_removed_objects_is_compared(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        tier.remove([NAMES[0]])
    (path,) = files(tmp_path, "removed")
    change_byte(path, 50)
    with tier_at(tmp_path) as tier:
        assert {one.name for one in tier.found()} == set(NAMES[6:]), "else it were there again"
        tier.remove([])
        assert not path.exists()


def test_what_is_not_a_bundle_is_left_alone(tmp_path: Path) -> None:
    strange = ["readme.txt", f"{'0' * 32}.bundle2", "xyz.bundle1", f"{'0' * 31}.removed1"]
    orphan = tmp_path / f"{'0' * 32}.removed1"
    for one in (*strange, orphan.name):
        (tmp_path / one).write_text("mine")
    tmp_path.chmod(0o700)
    with tier_at(tmp_path) as tier:
        assert tier.found() == []
        assert put(tier, range(N)).stored == [True] * N
        tier.remove(NAMES)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(strange)
    assert not orphan.exists()


def test_a_directory_that_vanishes_costs_what_lay_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "b", Clock()
    with tier_at(path, clock=clock) as tier:
        put(tier, range(N))
        shutil.rmtree(path)
        path.touch()  # Nothing can be made below it.
        assert read_all(tier, range(8)) == [None] * 8
        assert put(tier, [0, 1]).stored == [False, False]
        tier.remove([NAMES[9]])
        usage = tier.usage()
        assert (usage.objects, usage.corrupted) == (N - 9, 0)
        assert usage.failed >= 10
        assert caplog.text.count("the store cannot be used") == 1
        clock.now_s += TOLD_EVERY_S
        assert put(tier, [0]).stored == [False]
        assert "more such lines were left out)" in caplog.text
        path.unlink()
        path.mkdir(mode=0o700)
        assert put(tier, [0, 1]).stored == [True, True]
        assert read_all(tier, [0, 1]) == right([0, 1])
        assert tier.usage().objects == N - 9 + 2


def refuses(bucket: Bucket, *kinds: str) -> list[str]:
    """An object store that does not obey such requests; those that it got."""
    asked: list[str] = []

    def refusing(kind: str) -> Any:
        async def refuse(name: str, *_: Any) -> None:
            asked.append(name)
            raise BucketError(f"{name} cannot be {kind}: 403")

        return refuse

    for kind in kinds:
        setattr(bucket, kind, refusing(kind))
    return asked


def obeys(bucket: Bucket, *kinds: str) -> None:
    for kind in kinds:
        delattr(bucket, kind)


def test_a_store_that_deletes_nothing_gets_nothing_more(tmp_path: Path) -> None:
    """Else it would grow beyond its size."""
    size = LARGEST + HEAD_BYTES_MAX
    with tier_at(tmp_path, size) as tier:
        put(tier, range(10))
        refuses(tier._bucket, "delete")
        before = files(tmp_path, "bundle")
        written = put(tier, range(10, 15))
        assert written.stored == [False] * 5
        assert put(tier, [15]).stored == [False]
        assert files(tmp_path, "bundle") == before
        assert tier.usage().objects == 10 - len(written.gone)
        obeys(tier._bucket, "delete")
        assert put(tier, [15]).stored == [True]
        assert sum(one.stat().st_size for one in files(tmp_path, "bundle")) <= size


def test_removed_objects_are_told_once_that_is_possible(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        refuses(tier._bucket, "put")
        tier.remove([NAMES[0], NAMES[6]])
        assert not files(tmp_path, "removed")
        assert read_all(tier, [0, 1]) == [None, *right([1])]
        obeys(tier._bucket, "put")
        tier.remove(NAMES[7:12])  # With it the second bundle is empty.
        assert len(files(tmp_path, "removed")) == 1
    with tier_at(tmp_path) as tier:
        assert {one.name for one in tier.found()} == {
            NAMES[i] for i in (*range(1, 6), *range(12, N))
        }


def test_heads_that_cannot_be_read_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
    with tier_at(tmp_path) as tier:
        refuses(tier._bucket, "begin")
        assert tier.found() == []
        assert "4 bundles in the store cannot be read, and stay there" in caplog.text
        assert tier.usage().failed == 4
    with tier_at(tmp_path) as tier:
        assert len(tier.found()) == N


def removed(path: Path) -> list[Path]:
    return sorted(path.glob("*.buried1"))


def test_what_is_told_at_once_is_dropped_by_the_next(tmp_path: Path) -> None:
    """Nobody has removed it from its bundle."""
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        tier.tombstones.remove([NAMES[0], NAMES[7]])
        tier.tombstones.remove([])
        tier.tombstones.clear(NAMES[3][16:])
        assert len(removed(tmp_path)) == 2
        assert not tier.tombstones.is_empty
    with tier_at(tmp_path) as tier:
        left = set(range(N)) - {0, 3, 7}
        assert {one.name for one in tier.found()} == {NAMES[i] for i in left}
        assert not removed(tmp_path), "the bundles tell it now"
        assert put(tier, [0]).stored == [True]
    with tier_at(tmp_path) as tier:
        assert {one.name for one in tier.found()} == {NAMES[i] for i in left | {0}}


def test_what_the_bundles_tell_is_not_told_twice(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        tier.tombstones.remove([NAMES[0]])
        refuses(tier._bucket, "put")
        tier.remove([NAMES[0]])
        tier.tombstones.reset()
        assert tier.tombstones.is_empty
        assert len(removed(tmp_path)) == 1, "no bundle tells it yet"
        obeys(tier._bucket, "put")
        asked = refuses(tier._bucket, "delete")
        assert put(tier, [0]).stored == [True]
        assert asked == [removed(tmp_path)[0].name]
        obeys(tier._bucket, "delete")
        put(tier, [1])
        assert not removed(tmp_path)
    with tier_at(tmp_path) as tier:
        assert len(tier.found()) == N


@pytest.mark.parametrize("how", ["start", "read"])
def test_what_is_told_stays_while_there_are_objects_that_nobody_knows(
    tmp_path: Path, how: str
) -> None:
    """They cannot be removed by their names, and the next process would find them."""
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
    with tier_at(tmp_path) as tier:
        if how == "start":
            refuses(tier._bucket, "begin")
            assert tier.found() == []
            obeys(tier._bucket, "begin")
        else:
            assert len(tier.found()) == N
            refuses(tier._bucket, "ranges")
            assert read_all(tier, [3]) == [None]
            obeys(tier._bucket, "ranges")
        tier.tombstones.clear(NAMES[3][16:])
        tier.tombstones.reset()
        tier.remove([])
        assert len(removed(tmp_path)) == 1
    with tier_at(tmp_path) as tier:
        assert NAMES[3] not in {one.name for one in tier.found()}
        assert not removed(tmp_path)


def test_what_tells_of_removed_objects_must_be_read(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        tier.tombstones.remove([NAMES[0]])
    with tier_at(tmp_path) as tier:
        refuses(tier._bucket, "begin")
        with pytest.raises(OSError, match=r"objects='the store' does not say what was removed: "):
            tier.found()
    change_byte(removed(tmp_path)[0], 50)
    with tier_at(tmp_path) as tier:
        assert tier.found() == [], "nobody knows what it has named"
        assert not list(tmp_path.iterdir())


def test_nothing_is_told_after_the_end(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        pass
    with pytest.raises(OSError, match="it is being closed"):
        tier.tombstones.remove([NAMES[0]])


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"objects=.*closed to all others \(chmod 700\)"):
        open_bucket((tmp_path / "open").as_uri(), TIMEOUT_S)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is no directory"):
        open_bucket((tmp_path / "file").as_uri(), TIMEOUT_S)


# -- servers


class _Failing(BaseHTTPRequestHandler):
    """S3 as it is when it is out of order."""

    def _fail(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_DELETE = do_POST = do_HEAD = _fail  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def failing() -> Iterator[str]:
    """The address of a server that answers 500."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Failing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hanging() -> Iterator[str]:
    """The address of a server that takes requests, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def s3_at(monkeypatch: pytest.MonkeyPatch, address: str, timeout_s: float) -> Bucket:
    for name, value in {
        "AWS_ENDPOINT": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(name, value)
    return open_bucket("s3://bucket/prefix", timeout_s)


def moved_to(tier: Objects, bucket: Bucket) -> Bucket:
    """The tier's object store is another one from now on. Returns the former one."""
    former, tier._bucket = tier._bucket, bucket
    return former


def test_a_server_that_fails_costs_misses(
    failing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(OSError, match=r"objects='the store' cannot be listed: it cannot"):
        tier_of(s3_at(monkeypatch, failing, TIMEOUT_S)).__enter__()
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        former = moved_to(tier, s3_at(monkeypatch, failing, TIMEOUT_S))
        assert read_all(tier, [0, 7]) == [None, None]
        assert put(tier, [0]).stored == [False]
        tier.remove([NAMES[1]])
        assert caplog.text.count("the store cannot be used (") == 1
        moved_to(tier, former).close()
        assert read_all(tier, [0, 1, 2]) == [None, None, *right([2])]


def test_a_server_that_hangs_costs_its_deadlines(
    hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=r"it cannot be listed: no answer for 0\.05 s"):
        tier_of(s3_at(monkeypatch, hanging, 0.05)).__enter__()
    with tier_at(tmp_path) as tier:
        put(tier, range(N))
        former = moved_to(tier, s3_at(monkeypatch, hanging, 0.05))
        assert read_all(tier, [0, 7]) == [None, None]
        assert put(tier, range(N)).stored == [False, *[True] * 6, False, *[True] * 12]
        tier.remove([NAMES[1]])
        moved_to(tier, former).close()
        assert read_all(tier, [0, 1, 2]) == [None, None, *right([2])]


def test_what_has_not_begun_when_one_is_late_is_not_begun() -> None:
    bucket = Bucket(MemoryStore(), 0.05)
    begun: list[int] = []

    async def request(number: int) -> int:
        begun.append(number)
        await bucket._ask(asyncio.Event().wait(), "read", str(number))
        return number

    try:
        outcomes: Sequence[Any] = bucket.each(request, range(9), 2)
        assert all(isinstance(one, BucketError) and one.is_late for one in outcomes)
        assert begun == [0, 1]
        assert bucket.each(request, [], 2) == []
    finally:
        bucket.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "is no object store: Generic URL error"),
        ("nonsense", "is no object store: relative URL without a base"),
    ],
)
def test_a_url_that_names_nothing_is_refused(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"objects='{url}' {said}"):
        open_bucket(url, TIMEOUT_S)


def test_without_the_package_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ValueError, match=r"needs the Python package obstore.*\[objects\]"):
        open_bucket("memory://", TIMEOUT_S)
