# SPDX-License-Identifier: Apache-2.0
"""Our plans beside those of SGLang's own Mooncake backend (`disaggregation/mooncake/conn.py`, which
imports without the mooncake package): the same blocks, once theirs are merged.

SGLang's code decides which pairs of ranks talk (`_resolve_rank_mapping`), which function plans
(`transfer_worker` is followed here, condition by condition) and what it plans; only the engine at
its end is ours, and writes down what it is asked to copy.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from sglang_pools import Rank

import te
from bootstrap_server import Topology
from bootstrap_server.ranks.matching import PageShare, sources
from sglang_mooncake.layout import ALONE, Layout, Place, Plan

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

#: (prefill page, decode page): runs on both sides, on one side, and none.
PAGES = [(1, 3), (2, 4), (3, 5), (5, 1), (6, 8), (8, 9)]
STATES = {
    "block_scale": PAGES,
    "swa": [(2, 1), (3, 2), (5, 3)],
    "mamba": [(2, 3)],
    "qsa_pending": [(5, 3)],
    "qsa_compressed": [(1, 3), (2, 4), (4, 1)],
    "dsa": [(1, 3), (2, 4), (4, 1)],
}
TAIL = ([3, 5, 1, 0, 1, 6], [2, 5, 1, 0, 1, 6])
#: What SGLang supports. It refuses to cut scales, and where the values of a head are shorter than
#: its keys it would cut them as if they were as long.
MODELS = {
    "mha": [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (1, 4)],
    "gqa with fewer heads than ranks": [(4, 4), (4, 1), (1, 4), (2, 4), (4, 2), (4, 8), (8, 4)],
    "mha with short values": [(1, 1), (2, 2)],
    "mha in fp8": [(2, 1), (1, 2)],
    "mha with a draft model": [(1, 1), (2, 2)],
    "mla": [(1, 1), (2, 2), (1, 2), (4, 2), (2, 4)],
    "mxfp8": [(1, 1), (2, 2)],
    "swa": [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (2, 4)],
    "gdn": [(1, 1), (2, 2), (1, 2), (2, 1), (4, 1), (2, 4)],
    "qsa": [(1, 1), (2, 2), (1, 2), (4, 2)],
    "kimi": [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (2, 4)],
    "dsa": [(1, 1), (2, 2), (1, 2), (4, 2)],
}
CASES = [(model, *sizes) for model, some in MODELS.items() for sizes in some]
#: Stages with as many layers each: else SGLang takes the decode rank's other layers for those of a
#: draft model (`get_mha_kv_ptrs_with_pp`).
STAGED = [("mha", 1, 1), ("mla", 2, 1), ("dsa", 1, 2)]

Block = tuple[Any, ...]


class Recorder:
    """The engine library at the end of SGLang's backend."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []

    def batch_transfer_sync(
        self, _session: str, src: list[int], dst: list[int], nbytes: list[int]
    ) -> int:
        self.rows += zip(src, dst, nbytes, strict=True)
        return 0


def manager(rank: Rank, role: str) -> Any:
    """SGLang's manager around this rank's KVArgs, without its threads and sockets."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    made = MooncakeKVManager.__new__(MooncakeKVManager)
    sizes = rank.place.topology
    vars(made).update(
        kv_args=rank.kv_args,
        engine=Recorder(),
        is_mla_backend=rank.is_mla,
        is_hybrid_mla_backend=rank.kv_args.is_hybrid_mla_backend,
        attn_tp_size=sizes.tp_size,
        state_tp_size=sizes.tp_size,
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=sizes.pp_size,
        pp_rank=rank.place.coords.pp,
        kv_shard_size=1,
        enable_all_cp_ranks_for_transfer=False,
        enable_custom_mem_pool=False,
        enable_staging=False,
        enable_deferred_decode_kv_release=False,
        max_transfer_batch_indices=0,
        state_strides_validated=set(),
        request_status={0: object()},
    )
    return made


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    """What SGLang's functions ask of the server's configuration."""
    from sglang.srt.disaggregation.mooncake import conn
    from sglang.srt.runtime_context import get_parallel

    with ExitStack() as stack:
        memory = SimpleNamespace(enable_unified_memory=False)
        stack.enter_context(mock.patch.object(conn, "get_memory", return_value=memory))
        stack.enter_context(
            get_parallel().override(
                attn_dcp_size=1,
                enable_kv_cache_sharding=False,
                enable_dsa_cache_layer_split=False,
                enable_cp_tp_group_sharing=False,
            )
        )
        yield


def indices(rank: Rank, side: int) -> list[list[int]]:
    return [
        TAIL[side] if name == "dsa_tail" else [pair[side] for pair in STATES[name]]
        for name in rank.caches.state_names
    ]


def registration(target: Rank) -> SimpleNamespace:
    """What a decode rank registers (`KVArgsRegisterInfo`)."""
    args = target.kv_args
    return SimpleNamespace(
        dst_kv_ptrs=args.kv_data_ptrs,
        dst_kv_layer_ids=args.kv_layer_ids,
        dst_kv_item_len=args.kv_item_lens[0],
        dst_attn_tp_size=target.place.topology.tp_size,
        dst_tp_rank=args.engine_rank,
        dst_state_data_ptrs=args.state_data_ptrs,
        dst_state_item_lens=args.state_item_lens,
        dst_state_dim_per_tensor=args.state_dim_per_tensor,
        dst_state_layer_ids=args.state_layer_ids,
    )


def their_sources(target: Rank, prefill: Topology) -> list[tuple[int, int]]:
    """(tp, pp) of the prefill ranks that send, as SGLang's decode side resolves them."""
    info = SimpleNamespace(
        enable_kv_cache_sharding=False,
        enable_dsa_cache_layer_split=False,
        attn_tp_size=prefill.tp_size,
        attn_cp_size=1,
        pp_size=prefill.pp_size,
    )
    manager(target, "decode")._resolve_rank_mapping(info)
    tps = [info.target_tp_rank] if target.is_mla else info.target_tp_ranks
    return [(tp, pp) for tp in tps for pp in info.target_pp_ranks]


def their_blocks(source: Rank, target: Rank) -> list[tuple[int, int, int]]:
    """What SGLang's prefill side copies for a request with one chunk (`transfer_worker`)."""
    ours, info = manager(source, "prefill"), registration(target)
    request = SimpleNamespace(
        mooncake_session_id="", room=0, dst_state_indices=indices(target, 1), dst_aux_index=1
    )
    pages = [np.array([pair[side] for pair in PAGES], np.int32) for side in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        skip_kv, skip_state = ours._get_dsa_cache_transfer_skip_flags(info)
        assert not skip_state
        if skip_kv:
            pass
        elif (
            ours.is_mla_backend
            or ours.is_hybrid_mla_backend
            or ours.attn_tp_size == info.dst_attn_tp_size
        ):
            assert not ours.send_kvcache(
                "", pages[0], info.dst_kv_ptrs, pages[1], executor,
                dst_layer_ids=info.dst_kv_layer_ids, dst_kv_item_len=info.dst_kv_item_len,
                dst_attn_tp_size=info.dst_attn_tp_size,
            )  # fmt: skip
        else:
            assert not ours.send_kvcache_slice(
                "", pages[0], info.dst_kv_ptrs, pages[1], info.dst_tp_rank,
                info.dst_attn_tp_size, info.dst_kv_item_len, executor, info.dst_kv_layer_ids,
            )  # fmt: skip
        assert not ours.maybe_send_extra(request, indices(source, 0), executor, info)
    return ours.engine.rows


def our_blocks(source: Rank, target: Rank) -> list[tuple[int, int, int]]:
    plan = Plan(source.layout(), target.layout(), source.place, target.place)
    pages = [np.array([pair[side] for pair in PAGES], np.int32) for side in (0, 1)]
    blocks = te.Blocks.concat([plan.kv(*pages), plan.state(indices(source, 0), indices(target, 1))])
    return blocks.array.tolist()


def regions(layout: Layout, place: Place) -> list[tuple[int, int, Block]]:
    """(begin, end, what lies there) of each buffer of a prefill rank. Ranks that hold the same
    units of a layer hold the same bytes, whichever is asked for them."""
    found = []
    for component in layout.components:
        held = tuple(
            component.holding(cut, place.topology.tp_size, place.coords.tp)
            for cut in component.cuts
        )
        for layer, address, nbytes in zip(
            component.layers, component.buffers.addresses, component.buffers.nbytes, strict=True
        ):
            what = (component.kind, component.layers.index(layer), place.coords.pp, held)
            found.append((address, address + nbytes, what))
    return sorted(found)


def merged(rows: list[tuple[int, int, int]], source: Rank) -> set[Block]:
    """Blocks as (what is read, from which byte, to which address, how much), merged by buffer."""
    places = regions(source.layout(), source.place)
    begins = np.array([begin for begin, _, _ in places])
    found: dict[int, list[tuple[int, int, int]]] = {}
    for src, dst, nbytes in set(rows):
        at = int(np.searchsorted(begins, src, side="right")) - 1
        begin, end, _ = places[at]
        assert begin <= src <= src + nbytes <= end
        found.setdefault(at, []).append((src - begin, dst, nbytes))
    return {
        (*places[at][2], *row)
        for at, inside in found.items()
        for row in te.Blocks.of(
            *np.array(sorted(inside, key=lambda row: (row[1] - row[0], row[0]))).T
        )
        .merged()
        .array.tolist()
    }


def compare(model: str, prefill: Topology, decode: Topology) -> None:
    for coords in decode.coords():
        target = Rank(model, "decode", Place(decode, coords), 4)
        ranks: dict[tuple[int, int], Rank] = {}

        def rank(tp: int, pp: int, ranks: dict = ranks) -> Rank:
            if (tp, pp) not in ranks:
                place = next(c for c in prefill.coords() if (c.tp, c.pp) == (tp, pp))
                ranks[tp, pp] = Rank(model, "prefill", Place(prefill, place), 4)
            return ranks[tp, pp]

        theirs: set[Block] = set()
        for tp, pp in their_sources(target, prefill):
            theirs |= merged(their_blocks(rank(tp, pp), target), rank(tp, pp))
        mine: list[Block] = []
        for asked in sources(prefill, decode, coords, 0):
            source = rank(asked.coords.tp, asked.coords.pp)
            rows = our_blocks(source, target)
            # As few as there are without merging once more, and none twice.
            assert len(merged(rows, source)) == len(rows)
            mine += merged(rows, source)
        assert len(mine) == len(set(mine))
        assert set(mine) == theirs
        assert theirs


@pytest.mark.parametrize(("model", "src_size", "dst_size"), CASES)
def test_our_blocks_are_sglangs(model, src_size, dst_size):
    compare(model, Topology(1, 1, src_size, 1), Topology(1, 1, dst_size, 1))


@pytest.mark.parametrize(("model", "src_size", "dst_size"), STAGED)
@pytest.mark.parametrize("stages", [(2, 1), (3, 3)])
def test_our_blocks_are_sglangs_for_pipeline_stages(model, src_size, dst_size, stages):
    compare(model, Topology(1, 1, src_size, stages[0]), Topology(1, 1, dst_size, stages[1]))


def test_metadata_goes_as_sglang_sends_it():
    source, target = (Rank("mha", role, ALONE, 4) for role in ("prefill", "decode"))
    ours = manager(source, "prefill")
    request = SimpleNamespace(mooncake_session_id="", room=0, dst_aux_index=1)
    assert not ours.send_aux(request, 3, target.kv_args.aux_data_ptrs)
    plan = Plan(source.layout(), target.layout())
    assert plan.aux(3, 1).array.tolist() == ours.engine.rows


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [(0, 5), (3, 7), (6, 6), (0, 17), (16, 17)])
def test_context_parallel_ranks_send_the_pages_that_sglang_gives_them(cp_size, chunk):
    from sglang.srt.disaggregation.utils import filter_kv_indices_for_cp_rank

    pages = np.arange(100, 100 + chunk[1] - chunk[0])
    for rank in range(cp_size):
        ours = PageShare(rank, cp_size).within(range(*chunk), 17)
        theirs, where = filter_kv_indices_for_cp_rank(
            SimpleNamespace(attn_cp_rank=rank, attn_cp_size=cp_size), pages, slice(*chunk), 17
        )
        assert len(theirs) == len(ours)
        if len(ours):
            assert range(where.start, where.stop) == ours
            assert theirs.tolist() == [100 + page - chunk[0] for page in ours]
