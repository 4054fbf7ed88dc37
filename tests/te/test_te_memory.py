# SPDX-License-Identifier: Apache-2.0
"""The region table against a naive oracle, and what cannot be registered."""

from __future__ import annotations

import mmap
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te import BLOCK, RegistrationError
from te.core.engine import Engine as Plane
from te.core.engine import numa_node
from te.core.regions import UNUSED
from te.memory import Region, RegionTable
from te.memory_kinds import HOST
from te.topology import Locality, Topology, read_machine
from te.transports.tcp._core import TcpLink
from te.verbs.fabric import Fabric, Registration

TIMEOUT_S = 60.0
EDGES = [0, 1, 99, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
WILD = st.one_of(st.integers(0, 120), st.sampled_from(EDGES))


def covering(regions: list[Region], address: int, nbytes: int) -> list[Region] | None:
    """The regions that hold every byte of the range, by walking along it."""
    found, reached = [], address
    for region in regions:
        if reached < address + nbytes and region.address <= reached < region.end:
            found.append(region)
            reached = region.end
    return found if reached >= address + nbytes else None


def a_plane() -> Plane:
    return Plane(1, 5.0, 1.0, 0.0, 1 << 20, 1020)


def a_table() -> RegionTable:
    return RegionTable(a_plane(), None)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 15), st.integers(1, 10)), max_size=6),
    st.lists(st.tuples(WILD, WILD), min_size=1, max_size=10),
)
def test_the_plane_agrees_with_a_loop(
    gaps_and_sizes: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    regions, end = [], 0
    for serial, (gap, nbytes) in enumerate(gaps_and_sizes, 1):
        # Gaps of one byte less, so that some regions touch.
        regions.append(Region(end + gap - 1 or 1, nbytes, "host", serial, None))
        end = regions[-1].end
    plane = a_plane()
    for region in reversed(regions):
        plane.add_region(region.address, region.end, region.serial, HOST.compiled, 0, False)
    asked = [(address, nbytes) for address, nbytes in asked if nbytes]
    blocks = np.array([(address, 1, nbytes) for address, nbytes in asked], BLOCK)
    covers = [covering(regions, address, nbytes) for address, nbytes in asked]
    result = TcpLink(plane, False).submit(blocks, 0, 0, False, 1)
    if None in covers:
        assert result == covers.index(None)
    else:
        # The link has no rails, so that the transfer has failed, and holds nothing.
        assert not isinstance(result, int)
        assert all(plane.remove_region(region.serial, 1.0) == 0 for region in regions)


def test_complaint_names_the_nearest_region() -> None:
    table = a_table()
    assert "nothing is registered" in table.complaint(1, 1)
    table.regions = (Region(100, 10, "host", 1, None), Region(1000, 10, "host", 2, None))
    assert "6 bytes at 0x3ed" in table.complaint(1005, 6)
    assert "2 regions is [0x3e8, 0x3f2)" in table.complaint(1005, 6)


@pytest.mark.parametrize(
    "make", [bytearray, lambda n: np.zeros(n, np.float32), lambda n: mmap.mmap(-1, n)]
)
def test_buffers_and_addresses(make: object) -> None:
    buffer = make(8192)  # type: ignore[operator]
    table = a_table()
    region = table.register(buffer, None)
    assert region.nbytes == memoryview(buffer).nbytes
    table.deregister(region, 1.0)
    again = table.register(region.address, 100)
    assert (again.address, again.nbytes, again.kind) == (region.address, 100, "host")
    assert again.serial != region.serial


def test_where_memory_is() -> None:
    table = a_table()
    assert table.register(bytearray(100), None).location == "*"
    assert table.register(bytearray(100), None, "cuda:3").location == "cuda:3"
    for location in ("", "gpu:0", "cpu", "cuda:-1", "cpu:0 "):
        with pytest.raises(
            RegistrationError, match=f"location='{location}' is not a memory location"
        ):
            table.register(bytearray(100), None, location)


def test_a_page_has_a_node_once_it_is_there() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(page, np.uint8).ctypes.data
    assert numa_node(address) == -1
    page[0] = 1
    assert numa_node(address + 100) in read_machine().nodes
    assert numa_node(0) == -1


@given(
    st.dictionaries(st.sampled_from(["*", "cpu:0", "cuda:1"]), st.integers(0, 6), min_size=1),
    st.sampled_from(["*", "cpu:0", "cuda:0", "cuda:1"]),
)
def test_distances_are_those_of_the_place(rows: dict[str, int], place: str) -> None:
    names = ["a", "b", "c"]
    localities = {
        row: Locality((names[kind % 3],), (names[(kind + 1) % 3],) * (kind // 3))
        for row, kind in rows.items()
    }
    topology = Topology(nics=(), localities=localities, gpus={}, far={})
    nics = [SimpleNamespace(name=name) for name in names]
    fabric = Fabric(tuple(nics), topology, (0,))  # type: ignore[arg-type]
    told = [topology.distance(place, name) for name in names]
    assert fabric.distances(place) == tuple(UNUSED if one is None else one for one in told)


def test_registered_buffers_cannot_be_resized() -> None:
    buffer = bytearray(100)
    region = a_table().register(buffer, None)
    with pytest.raises(BufferError):
        buffer.append(1)
    assert region.nbytes == 100


@pytest.mark.parametrize(
    ("source", "nbytes", "says"),
    [
        (0, 4096, "0x0"),
        (1 << 12, 0, "at least one byte, not 0"),
        (1 << 12, -5, "at least one byte, not -5"),
        (1 << 12, None, "needs nbytes"),
        ((1 << 64) - 1, 4096, "not an address range"),
        (1 << 12, 4096, "not readable and writable memory of this process from 0x1000 on"),
        (b"abc", None, "read-only"),
        (bytearray(), None, "at least one byte, not 0"),
        (bytearray(4), 5, "5 bytes asked of a buffer of 4 bytes"),
        (np.zeros(10)[::2], None, "not contiguous"),
        ("text", None, "not str"),
    ],
)
def test_register_refuses(source: object, nbytes: int | None, says: str) -> None:
    table = a_table()
    with pytest.raises(RegistrationError, match=says):
        table.register(source, nbytes)
    assert table.regions == ()


def test_overlap_names_both() -> None:
    buffer = np.zeros(1000, np.uint8)
    base = buffer.ctypes.data
    table = a_table()
    table.register(base + 100, 100)
    for offset, nbytes in [(100, 100), (0, 101), (199, 1), (150, 10), (0, 1000)]:
        with pytest.raises(RegistrationError, match=f"{base + offset:#x}.*{base + 100:#x}"):
            table.register(base + offset, nbytes)
    table.register(base, 100)
    table.register(base + 200, 800)
    assert [region.address - base for region in table.regions] == [0, 100, 200]


def test_protected_and_half_mapped_memory() -> None:
    page = mmap.PAGESIZE
    readable = mmap.mmap(-1, page, prot=mmap.PROT_READ)
    address = np.frombuffer(readable, np.uint8).ctypes.data
    with pytest.raises(RegistrationError, match="not readable and writable"):
        a_table().register(address, page)
    whole = mmap.mmap(-1, 16 * page)
    address = np.frombuffer(whole, np.uint8).ctypes.data
    table = a_table()
    with pytest.raises(RegistrationError, match="not readable and writable"):
        table.register(address, 1 << 44)
    assert table.register(address, 16 * page).nbytes == 16 * page


def test_deregister_knows_its_own() -> None:
    buffer = np.zeros(64, np.uint8)
    table, other = a_table(), a_table()
    region = table.register(buffer, None)
    with pytest.raises(RegistrationError, match="not registered"):
        other.deregister(region, 1.0)
    table.deregister(region, 1.0)
    with pytest.raises(RegistrationError, match="not registered"):
        table.deregister(region, 1.0)


class SlowRegion:
    """A memory region that takes as long to close as the test lets it."""

    def __init__(self) -> None:
        self.inside, self.most_inside, self.closed = 0, 0, 0
        self.entered, self.may_end = threading.Event(), threading.Event()

    def close(self) -> None:
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        self.entered.set()
        self.may_end.wait(TIMEOUT_S)
        self.inside -= 1
        self.closed += 1


def test_threads_that_close_the_same_registration_wait_for_each_other() -> None:
    """Whoever returns may rely on it that nothing lands there any more."""
    region = SlowRegion()
    registration = Registration(b"", 0, (cast("Any", region),), "*")
    threads = [threading.Thread(target=registration.close) for _ in range(2)]
    threads[0].start()
    assert region.entered.wait(TIMEOUT_S)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    region.may_end.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (region.most_inside, region.closed) == (1, 2)
