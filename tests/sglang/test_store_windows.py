# SPDX-License-Identifier: Apache-2.0
"""The linker on models with sliding windows: two pools, of which one is needed for the last pages
of a prefix alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from store_host import store_directory

if TYPE_CHECKING:
    from sglang_mooncake.sglang.store.linker import StoreLinker

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


@pytest.fixture(params=["windows_pool", "windows_mla_pool"])
def linker(
    request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreLinker]:
    import store_linking

    pool = getattr(store_linking, request.param)()
    made = store_linking.make(directory, pool, monkeypatch)
    yield made
    made.close()


def stored_with_windows(linker: StoreLinker) -> list[str]:
    """Six pages in the slots 0 to 5, of which the windows' pool has those from the third on in its
    slots 0 to 3."""
    from store_linking import PoolName, hashes, of_pool, offloaded_all

    keys = hashes(6)
    whole = of_pool(PoolName.KV, keys, 0, 1, 2, 3, 4, 5)
    assert offloaded_all(linker, [whole, of_pool(PoolName.SWA, keys[2:], 0, 1, 2, 3)])
    return keys


def test_pages_of_both_pools_come_back_into_other_slots(linker: StoreLinker) -> None:
    import torch
    from store_linking import PoolName, fill, loaded_all, of_pool, slots, tensors_of

    before = fill(linker)
    keys = stored_with_windows(linker)
    whole = of_pool(PoolName.KV, keys, 10, 11, 12, 13, 14, 15)
    assert loaded_all(linker, [whole, of_pool(PoolName.SWA, keys[4:], 7, 6)])
    old = iter(before)
    for name, to, of in (
        (PoolName.KV, (10, 11, 12, 13, 14, 15), (0, 1, 2, 3, 4, 5)),
        (PoolName.SWA, (7, 6), (2, 3)),
    ):
        for new in tensors_of(linker.pools[name]):
            was = next(old)
            assert torch.equal(new[slots(*to)], was[slots(*of)])
            rest = torch.ones(len(new), dtype=torch.bool)
            rest[slots(*to)] = False
            assert torch.equal(new[rest], was[rest]), "nothing else has changed"


def test_every_prefix_is_named_whose_last_pages_have_their_windows(linker: StoreLinker) -> None:
    from store_linking import PoolName, fill, hashes, of_pool, transfer

    fill(linker)
    keys = stored_with_windows(linker)

    def lengths(wanted: list[str], window: int) -> list[int]:
        return linker.lookup("r", [*transfer(wanted), of_pool(PoolName.SWA, wanted[-window:])])

    assert lengths(keys, 2) == [4, 5, 6]
    assert lengths(keys, 1) == [3, 4, 5, 6]
    assert lengths(keys, 6) == []
    assert lengths([*keys, *hashes(3, 1)], 2) == [4, 5, 6], "what is behind does not matter"
    assert lengths(keys[2:], 4) == [1, 2, 3, 4], "the device has what was before"


def test_a_window_that_is_gone_fails_its_batch_alone(linker: StoreLinker) -> None:
    from store_linking import PoolName, fill, loaded_all, of_pool, transfer

    fill(linker)
    keys = stored_with_windows(linker)
    gone = np.frombuffer(bytes.fromhex(keys[5]), np.uint8)[None, :16]
    linker._store.remove(gone, linker._signatures[PoolName.SWA].digest)
    wanted = [*transfer(keys), of_pool(PoolName.SWA, keys[4:])]
    assert linker.lookup("r", wanted) == [4, 5]
    whole = of_pool(PoolName.KV, keys, 10, 11, 12, 13, 14, 15)
    assert not loaded_all(linker, [whole, of_pool(PoolName.SWA, keys[4:], 6, 7)])
    whole = of_pool(PoolName.KV, keys[:5], 10, 11, 12, 13, 14)
    assert loaded_all(linker, [whole, of_pool(PoolName.SWA, keys[3:5], 6, 7)])


def test_prompts_whose_windows_are_not_stored_are_not_stored(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_linking import PoolName, fill, hashes, of_pool, offloaded_all

    from kvstore.objects.outcomes import Put

    fill(linker)
    keys = hashes(2)
    signature = linker._signatures[PoolName.SWA].digest
    put = linker._store.put
    monkeypatch.setattr(
        linker._store,
        "put",
        lambda keys, of, pieces, **more: (
            [Put.NO_SPACE] * len(keys) if of == signature else put(keys, of, pieces, **more)
        ),
    )
    both = [of_pool(PoolName.KV, keys, 0, 1), of_pool(PoolName.SWA, keys, 0, 1)]
    assert not offloaded_all(linker, both)
    assert len(linker._store) == 0
    assert offloaded_all(linker, both[:1]), "of a node without windows SGLang offers nothing else"
    assert linker.lookup("r", [of_pool(PoolName.KV, keys), of_pool(PoolName.SWA, keys)]) == []


def test_ranks_and_seams_that_share_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HiCache calls the same pages, and which ranks have others."""
    import store_hosting
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from store_linking import PAGE, windows_pool

    from sglang_mooncake.sglang.store import device_pools
    from sglang_mooncake.sglang.store.hicache import HiCacheStore
    from sglang_mooncake.sglang.store.host_pool import HostPool

    server = store_hosting.in_a_server(monkeypatch)
    monkeypatch.setattr(device_pools, "get_parallel", lambda: server.parallel)
    server.parallel.pp_rank, server.parallel.pp_size = 0, 1
    _, windows = device_pools.pools_of(windows_pool(), PAGE)
    ours = device_pools.facts_of(windows, server.args)
    pool = store_hosting.host_pool("mha", "page_first_direct", monkeypatch)
    hicache = HiCacheStore.__new__(HiCacheStore)
    hicache._config = store_hosting.storage_config({})
    assert hicache._facts(PoolName.SWA.value, pool, HostPool(pool)) == ours
    server.parallel.attn_tp_rank, server.parallel.attn_tp_size = 1, 2
    assert device_pools.facts_of(windows, server.args) != ours


# -- what is refused


def test_a_rank_whose_layers_do_not_begin_at_0_is_refused() -> None:
    from store_linking import PAGE, windows_pool

    from sglang_mooncake.sglang.store.device_pools import pools_of

    pool = windows_pool()
    pool.layers_mapping = {layer + 5: place for layer, place in pool.layers_mapping.items()}
    with pytest.raises(ValueError, match=r"has the layers 5 to 9 .* leave --pp-size or"):
        pools_of(pool, PAGE)


def test_a_model_of_windows_alone_is_refused() -> None:
    from store_linking import PAGE, windows_pool

    from sglang_mooncake.sglang.store.device_pools import pools_of

    with pytest.raises(ValueError, match="has no layers in its pool kv"):
        pools_of(windows_pool((0, 1), 2), PAGE)
