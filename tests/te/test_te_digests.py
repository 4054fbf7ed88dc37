# SPDX-License-Identifier: Apache-2.0
"""Digests of registered memory, beside Python's xxhash: of the host's, and of memory that only a
copier reads, which may be late, fail or hang."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from te_cuda import NEWEST, SYNCHRONISES, cuda
from te_sealed import Sealed, sealed

import te
from te import _digests
from te.digests import BOUNCE_NBYTES, UNITS_MAX

NBYTES = 4 << 20
Array = np.ndarray[Any, Any]


def random_bytes(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def words(*numbers: int) -> Array:
    return np.array(numbers, np.uint64)


def expected(memory: Array, starts: Array, offsets: Array, sizes: Array) -> list[int]:
    """`starts`: of the units, as offsets into the memory."""
    shape = list(zip(offsets.tolist(), sizes.tolist(), strict=True))
    return [
        xxhash.xxh3_64_intdigest(
            b"".join(memory[start + at : start + at + n].tobytes() for at, n in shape)
        )
        for start in starts.tolist()
    ]


def bytes_of(memory: Array, starts: Array, offsets: Array, sizes: Array) -> Array:
    places = [np.arange(at, at + n) for at, n in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    return memory[starts[:, None].astype(np.int64) + np.concatenate(places)]


@pytest.fixture(scope="module")
def engine() -> Iterator[te.Engine]:
    with te.Engine(te.Config(transports=("tcp",), status_dir=None)) as one:
        yield one


@pytest.fixture(scope="module")
def host(engine: te.Engine) -> Array:
    memory = random_bytes(NBYTES)
    engine.register(memory)
    return memory


@pytest.fixture(scope="module")
def digester(engine: te.Engine, host: Array) -> Iterator[te.Digester]:
    del host  # registered before
    one = engine.digester()
    yield one
    one.close()


#: Of pieces, around every border of the hash and of its blocks.
sizes_of_pieces = st.lists(
    st.sampled_from([1, 3, 8, 16, 17, 63, 64, 65, 128, 240, 241, 512, 1023, 1024, 1025, 5000]),
    min_size=1,
    max_size=8,
)


@given(sizes_of_pieces, st.integers(0, 200), st.lists(st.integers(0, 1 << 20), max_size=5))
def test_digests_are_xxh3_of_the_pieces_one_behind_the_other(digester, host, sizes, gap, starts):
    offsets = np.cumsum([gap, *[one + gap for one in sizes[:-1]]]).astype(np.uint64)
    shape = offsets, np.array(sizes, np.uint64)
    at = np.uint64(host.ctypes.data) + words(*starts)
    found = digester.digests(at, *shape)
    assert found.tolist() == expected(host, words(*starts), *shape)
    copied, of_copies = digester.read(at, *shape)
    assert of_copies.tolist() == found.tolist()
    np.testing.assert_array_equal(copied, bytes_of(host, words(*starts), *shape))


def test_more_units_than_one_look_at_the_regions_has(digester, host):
    starts = np.arange(UNITS_MAX + 5, dtype=np.uint64) * np.uint64(16)
    shape = words(0), words(16)
    found = digester.digests(starts + np.uint64(host.ctypes.data), *shape)
    assert found.tolist() == expected(host, starts, *shape)


def test_a_unit_that_is_not_registered_is_named(digester, host):
    inside, end = host.ctypes.data, host.ctypes.data + host.nbytes
    shape = words(0, 64), words(8, 8)
    for outside in (inside - 1, end - 71, end + 4096):
        with pytest.raises(te.DigestError, match=r"72 bytes at .* lie outside the reg"):
            digester.digests(words(inside, outside), *shape)
    assert digester.digests(words(end - 72), *shape).tolist()


@pytest.mark.parametrize(
    ("offsets", "sizes", "sentence"),
    [
        ([], [], "without a piece"),
        ([0, 8], [8, 0], "a piece of 0 bytes"),
        ([0, 2**64 - 8], [8, 16], "beyond all addresses"),
        ([0, 8], [8], "16"),
    ],
)
def test_pieces_must_be_some(digester, host, offsets, sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        digester.digests(words(host.ctypes.data), words(*offsets), words(*sizes))


def test_a_closed_one_makes_none(engine, host):
    one = engine.digester()
    one.close()
    one.close()
    with pytest.raises(te.DigestError, match="closed"):
        one.digests(words(host.ctypes.data), words(0), words(1))


def test_memory_is_deregistered_once_its_digests_are_made(engine):
    memory = random_bytes(1 << 16)
    region = engine.register(memory)
    one = engine.digester()
    one.digests(words(region.address), words(0), words(1 << 16))
    engine.deregister(region)
    with pytest.raises(te.DigestError, match="outside"):
        one.digests(words(region.address), words(0), words(1))
    one.close()


class Interrupted(_digests.Bounce):
    """Another thread has the interpreter lock while this one looks whether a device is ready."""

    meanwhile: Callable[[], object]

    def settle(self, timeout_s: float) -> bool:
        other = threading.Thread(target=self.meanwhile)
        other.start()
        other.join()
        return super().settle(timeout_s)


def test_memory_that_leaves_as_its_digests_begin_is_not_read(engine):
    """Each registration replaces the table of the regions, and frees the one before."""
    memory = random_bytes(1 << 16)
    others = [random_bytes(4096, seed=n) for n in range(20)]
    region = engine.register(memory)
    one = engine.digester()
    one._bounce = Interrupted(one._bytes.ctypes.data, BOUNCE_NBYTES)

    def come_and_go() -> None:
        engine.deregister(region)
        for other in [engine.register(other) for other in others]:
            engine.deregister(other)

    one._bounce.meanwhile = come_and_go
    with pytest.raises(te.DigestError, match="outside"):
        one.digests(words(region.address), words(0), words(1 << 16))
    one._bounce.meanwhile = lambda: None
    one.close()


class Staged:
    """An engine with sealed memory, and with some of the host's."""

    def __init__(self, kind: Sealed, nbytes: int = NBYTES) -> None:
        self.memory = kind.allocate(nbytes)
        self.view = self.memory.view
        self.view[:] = random_bytes(nbytes, seed=1)
        self.host = random_bytes(1 << 16, seed=2)
        self.engine = te.Engine(te.Config(transports=("tcp",), status_dir=None))
        self.region = self.engine.register(self.memory.address, nbytes)
        self.engine.register(self.host)
        self.digester = self.engine.digester()

    def found(self, starts: Array, offsets: Array, sizes: Array, **more: float) -> list[int]:
        at = np.uint64(self.memory.address) + starts
        return self.digester.digests(at, offsets, sizes, **more).tolist()

    def close(self) -> None:
        self.digester.close()
        self.engine.close()


@pytest.fixture
def staged() -> Iterator[tuple[Sealed, Staged]]:
    with sealed(delay_us=50) as kind:
        one = Staged(kind)
        yield kind, one
        one.close()


@pytest.mark.parametrize(
    ("unit", "sizes"),
    [
        (512, [256, 128]),
        (3 * BOUNCE_NBYTES // 4, [BOUNCE_NBYTES // 2, BOUNCE_NBYTES // 4]),  # across slots
        (1 << 14, [8] * 1200),  # more pieces than one batch has
    ],
)
def test_memory_that_only_a_copier_reads_has_the_same_digests(staged, unit, sizes):
    _, one = staged
    starts = np.arange(0, NBYTES - unit + 1, unit, dtype=np.uint64)[:40]
    offsets = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    shape = offsets, np.array(sizes, np.uint64)
    assert one.found(starts, *shape) == expected(one.view, starts, *shape)
    copied, found = one.digester.read(np.uint64(one.memory.address) + starts, *shape)
    assert found.tolist() == expected(one.view, starts, *shape)
    np.testing.assert_array_equal(copied, bytes_of(one.view, starts, *shape))


def test_units_of_several_kinds_may_be_asked_for_at_once(staged):
    _, one = staged
    at = words(one.memory.address, one.host.ctypes.data, one.memory.address + 4096)
    found = one.digester.digests(at, words(0), words(1000)).tolist()
    shape = words(0), words(1000)
    assert found[0::2] == expected(one.view, words(0, 4096), *shape)
    assert found[1:2] == expected(one.host, words(0), *shape)
    copied, again = one.digester.read(at, *shape)
    assert again.tolist() == found
    np.testing.assert_array_equal(copied[0::2], bytes_of(one.view, words(0, 4096), *shape))
    np.testing.assert_array_equal(copied[1], one.host[:1000])


@pytest.mark.parametrize("batches", [0, 1, 2])
@pytest.mark.parametrize("way", ["fail", "refuse"])
def test_a_copy_that_fails_fails_the_digests_and_nothing_else(staged, batches, way):
    kind, one = staged
    starts = np.arange(0, NBYTES, 4096, dtype=np.uint64)
    getattr(kind, way)(batches)
    with pytest.raises(te.DigestError, match="could not be read for a digest"):
        one.found(starts, words(0), words(4096))
    getattr(kind, way)(batches)
    with pytest.raises(te.DigestError, match="could not be read for a digest"):
        one.digester.read(np.uint64(one.memory.address) + starts, words(0), words(4096))
    assert kind.events == 0
    assert one.found(starts[:2], words(0), words(8)) == expected(
        one.view, starts[:2], words(0), words(8)
    )
    one.engine.deregister(one.region)


def test_a_device_that_hangs_keeps_memory_and_slots_until_it_goes_on(staged):
    kind, one = staged
    shape = words(0), words(4096)
    with kind.stuck():
        for _ in range(2):
            with pytest.raises(te.DigestError, match="timed out"):
                one.found(words(0), *shape, timeout_s=0.01)
        with pytest.raises(te.RegistrationError, match="read from the region"):
            one.engine.deregister(one.region, 0.01)
    while kind.events:
        one.digester._bounce.settle(1.0)
    assert one.found(words(0), *shape) == expected(one.view, words(0), *shape)
    one.engine.deregister(one.region)


def test_memory_that_a_device_may_still_write_outlives_who_forgot_to_close(staged):
    kind, one = staged
    bytes_of_it, bounce = weakref.ref(one.digester._bytes), one.digester._bounce
    with kind.stuck():
        with pytest.raises(te.DigestError, match="timed out"):
            one.found(words(0), words(0), words(4096), timeout_s=0.01)
        del one.digester
        gc.collect()
        assert bytes_of_it() is not None
    while kind.events:
        bounce.settle(1.0)
    one.digester = one.engine.digester()


def test_all_copies_of_a_call_have_one_deadline(digester, host, monkeypatch):
    left, now = [], itertools.count(0.0, 2.0)
    monkeypatch.setattr("te.digests.time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(_digests, "digests", lambda *a: left.append(a[6]) or (0, -1))
    digester.digests(words(*[host.ctypes.data] * (3 * UNITS_MAX)), words(0), words(8), 5.0)
    assert left == [3.0, 1.0, 0.0]


@pytest.mark.parametrize("version", [NEWEST, 12_080, 12_000])
def test_memory_of_a_gpu_is_read_by_its_copy_engine_and_nothing_waits_for_the_gpu(version):
    """On every form of the driver's batches; no copy is of memory that is not pinned."""
    with cuda(version=version) as driver:
        memory = driver.allocate(NBYTES)
        memory.view[:] = random_bytes(NBYTES, seed=3)
        with te.Engine(te.Config(transports=("tcp",), status_dir=None)) as engine:
            engine.register(memory.address, NBYTES)
            digester = engine.digester()
            driver.forget_calls()
            starts = np.arange(0, NBYTES, 1 << 16, dtype=np.uint64)
            shape = words(0, 30_000), words(5_000, 20_000)
            found = digester.digests(np.uint64(memory.address) + starts, *shape)
            assert found.tolist() == expected(memory.view, starts, *shape)
            assert driver.calls(flags=SYNCHRONISES) == 0
            assert driver.count("pageable_copies") == 0
            digester.close()
        driver.reset()
        driver.free(memory)
