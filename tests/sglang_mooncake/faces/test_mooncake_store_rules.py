# SPDX-License-Identifier: Apache-2.0
"""The pure parts of ``mooncake.store`` over kvstore."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_far import wait_until

from kvstore.objects.outcomes import Got, Put, Removed
from sglang_mooncake.faces.mooncake_store.arena import Arena, Gaps, NoRoom
from sglang_mooncake.faces.mooncake_store.codes import OF_GET, OF_PUT, OF_REMOVE
from sglang_mooncake.faces.mooncake_store.objects import Memory
from sglang_mooncake.faces.mooncake_store.sessions import runs_of
from sglang_mooncake.faces.mooncake_store.settings import Setup, nbytes_of


@given(st.integers(0, 40), st.lists(st.integers(1, 12), max_size=20), st.data())
def test_what_is_taken_is_nobody_elses_and_comes_back(nbytes, wanted, data) -> None:
    gaps, taken = Gaps(nbytes), list[tuple[int, int]]()
    for count in wanted:
        if taken and data.draw(st.booleans()):
            gaps.give_back(*taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        first = gaps.take(count)
        if first is None:
            assert all(end - begin < count for begin, end in gaps.gaps)
        else:
            taken.append((first, count))
        used = [at for begin, n in taken for at in range(begin, begin + n)]
        free = [at for begin, end in gaps.gaps for at in range(begin, end)]
        assert sorted(used + free) == list(range(nbytes))
    for one in taken:
        gaps.give_back(*one)
    assert gaps.gaps == ([(0, nbytes)] if nbytes else [])


def arena_of(nbytes: int) -> Arena:
    store: Any = SimpleNamespace(register=lambda _: SimpleNamespace(address=0))
    return Arena(store, nbytes)


def test_who_came_first_has_room_first() -> None:
    """A large one waits: what has become free is not for a small one that came later."""
    arena, order = arena_of(192), list[str]()

    def wants(name: str, nbytes: int) -> threading.Thread:
        def take() -> None:
            with arena.room(nbytes, 60.0):
                order.append(name)

        before = len(arena._waiting)
        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: len(arena._waiting) > before, "it waits")
        return thread

    with arena.room(128, 0.0):
        with arena.room(64, 0.0):
            threads = [wants("large", 192), wants("small", 64)]
        with pytest.raises(NoRoom, match="were not free within 0 s"), arena.room(64, 0.0):
            pass
        assert not order
    for one in threads:
        one.join(60.0)
    assert order == ["large", "small"]


@pytest.mark.parametrize(
    ("given_", "nbytes"),
    [(5, 5), ("5", 5), ("16MB", 16 << 20), ("16 mb", 16 << 20), ("1.5GiB", 3 << 29), ("2k", 2048)],
)
def test_a_size_is_a_number_or_a_text(given_, nbytes) -> None:
    assert nbytes_of(given_) == nbytes


@pytest.mark.parametrize("given_", ["50%", "", "MB", "-1", "1 2", "1XB", True, None])
def test_what_is_no_size_is_refused(given_) -> None:
    with pytest.raises(ValueError, match="is no size"):
        nbytes_of(given_)


def test_devices_count_for_rdma_alone() -> None:
    def devices(protocol: str) -> tuple[str, ...]:
        return Setup.of("h", "s", 0, 0, protocol, "mlx5_0, mlx5_1,").devices

    assert devices("tcp") == ()
    assert devices("rdma") == ("mlx5_0", "mlx5_1")


def test_a_dictionary_says_the_same_by_mooncakes_names_and_by_lmcaches() -> None:
    base = {"local_hostname": "h", "metadata_server": "s", "global_segment_size": "16MB"}
    ours = Setup.of("h", "s", "16MB", rdma_devices="d", protocol="rdma", master_server_addr="m:1")
    of_lmcache = {"device_name": "d", "master_server_address": "m:1", "transfer_timeout": 1}
    of_mooncake = {"rdma_devices": "d", "master_server_addr": "m:1", "enable_ssd_offload": "false"}
    for names in (of_lmcache, of_mooncake):
        assert Setup.of_mapping(base | {"protocol": "rdma"} | names) == ours
    with pytest.raises(ValueError, match="ssd_offload_path"):
        Setup.of_mapping(base | {"enable_ssd_offload": "True"})
    with pytest.raises(ValueError, match="local_hostname"):
        Setup.of("", "s")
    with pytest.raises(ValueError, match="kvstore top"):
        Setup.of("h", "s", enable_client_http_server=True)


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8)


@given(RANGES)
def test_ranges_that_follow_each_other_are_read_as_one(ranges) -> None:
    buffers = [1000 * (row + 1) for row in range(len(ranges))]
    offsets, sizes = [one[0] for one in ranges], [one[1] for one in ranges]
    runs = runs_of(buffers, sizes, offsets)
    copied = [
        (first + i + sum(memory.nbytes[:at]), address + i)
        for first, memory in runs
        for at, (address, count) in enumerate(zip(memory.addresses, memory.nbytes, strict=True))
        for i in range(count)
    ]
    wanted = [
        (offset + i, buffer + i)
        for buffer, size, offset in zip(buffers, sizes, offsets, strict=True)
        for i in range(size)
    ]
    assert copied == wanted
    for (first, memory), (second, _) in itertools.pairwise(runs):
        assert first + memory.total != second


def test_each_outcome_has_a_number() -> None:
    assert OF_PUT.keys() == set(Put)
    assert OF_GET.keys() == set(Got) - {Got.RIGHT}
    assert OF_REMOVE.keys() == set(Removed)
    assert all(number < 0 for number in OF_GET.values())


def test_an_object_has_at_least_one_byte() -> None:
    assert Memory.of([1, 2, 3], [0, 5, 0]) == Memory((2,), (5,))
    for addresses, sizes in (([], []), ([1], [0]), ([1], [1, 2])):
        with pytest.raises(ValueError, match=r"at least one byte|buffers and"):
            Memory.of(addresses, sizes)
