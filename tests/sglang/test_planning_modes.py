# SPDX-License-Identifier: Apache-2.0
"""Our plans beside SGLang's for the modes in which a rank stores a part of the pages, of a page's
tokens, or more heads than its share: the same blocks from the same ranks (`test_planning.py`)."""

from __future__ import annotations

import concurrent.futures
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang_pools import Rank
from test_planning import PAGES, STATES, manager, merged, registration, settings

import te
from bootstrap_server import InstanceConfig, KVFormat, RankCoords, Topology
from bootstrap_server.ranks.matching import check_configs
from sglang_mooncake.layout import ALONE, UNSPLIT, Buffers, Dealt, Layout, Named, Place, Plan, Split
from sglang_mooncake.sglang.pools.kv_args import Heads, layout_from_kv_args
from sglang_mooncake.sources import sources_of

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

__all__ = ["settings"]  # the fixture

PAGE = 4
OURS, THEIRS = (np.array([pair[side] for pair in PAGES], np.int32) for side in (0, 1))


def states(rank: Rank, side: int) -> list[list[int]]:
    return [[pair[side] for pair in STATES[name]] for name in rank.caches.state_names]


def config(topology: Topology, **given: Any) -> InstanceConfig:
    return InstanceConfig(topology, KVFormat(PAGE, "bfloat16"), **given)


def compare_each_rank(
    prefill: InstanceConfig,
    decode: InstanceConfig,
    source: Any,
    target: Any,
    theirs: Any,
    ours: Any,
) -> None:
    """For each decode rank, block for block what each prefill rank sends it.

    source, target: make the rank at a place; theirs, ours: blocks from one rank to another.
    """
    check_configs(prefill, decode)
    for coords in decode.topology.coords():
        one = target(Place(decode.topology, coords))
        asked = sources_of(prefill, 0, one.place, one.layout())
        assert_same_senders(asked, prefill, one)
        for chosen, sends in asked:
            other = source(Place(prefill.topology, chosen.coords))
            mine = ours(other, one) if sends else []
            assert len({tuple(row) for row in mine}) == len(mine), "a block comes twice"
            expected = merged(theirs(other, one), other) if sends else set()
            assert merged(mine, other) == expected
            assert expected or not sends


def assert_same_senders(asked: Any, prefill: InstanceConfig, target: Rank) -> None:
    """Those that send are the ranks that SGLang's decode side waits for."""
    sizes = prefill.topology
    info = SimpleNamespace(
        enable_kv_cache_sharding=prefill.enable_kv_cache_sharding,
        enable_dsa_cache_layer_split=False,
        attn_tp_size=sizes.tp_size,
        attn_cp_size=sizes.cp_size,
        pp_size=sizes.pp_size,
    )
    manager(target, "decode")._resolve_rank_mapping(info)
    tps = info.target_tp_ranks
    if target.is_mla and info.target_tp_rank is not None:
        tps = [info.target_tp_rank]
    theirs = {(cp, tp) for cp in info.target_cp_ranks for tp in tps}
    assert {(source.coords.cp, source.coords.tp) for source, sends in asked if sends} == theirs
    assert len([s for s, sends in asked if sends]) == info.required_prefill_response_num
    assert {source.destinations for source, _ in asked} == {info.required_dst_info_num}


# --- sharded KV cache: pages are dealt out by their numbers ---

SHARDED = [
    ("mla", Topology(1, 1, 2, 1), 2),
    ("mla", Topology(1, 1, 4, 1), 4),
    ("mha", Topology(1, 2, 1, 1), 1),
    ("mha", Topology(1, 2, 2, 1), 2),
    ("mha", Topology(1, 4, 2, 1), 4),
    ("mha", Topology(1, 2, 4, 1), 2),
    ("dsa with a key for each token", Topology(1, 2, 1, 1), 1),
    ("dsa with a key for each token", Topology(1, 4, 1, 1), 2),
]


def dealt(place: Place) -> Dealt:
    sizes, coords = place.topology, place.coords
    return Dealt(coords.cp, sizes.cp_size) if sizes.cp_size > 1 else Dealt(coords.tp, sizes.tp_size)


@pytest.mark.parametrize(("model", "prefill", "decode_tp"), SHARDED)
def test_sharded_pages_go_as_sglang_sends_them(model, prefill, decode_tp):
    from sglang.srt.disaggregation.utils import filter_kv_indices_for_shard_rank
    from sglang.srt.runtime_context import get_parallel

    def source(place: Place) -> Rank:
        return Rank(model, "prefill", place, PAGE, Split(pages_dealt=dealt(place)))

    def theirs(one: Rank, other: Rank) -> Any:
        made, info = manager(one, "prefill"), registration(other)
        made.kv_shard_rank, made.kv_shard_size = (
            one.split.pages_dealt.index,
            one.split.pages_dealt.of,
        )
        kept, positions = filter_kv_indices_for_shard_rank(
            kv_indices=OURS,
            index_slice=slice(0, len(OURS)),
            shard_rank=made.kv_shard_rank,
            shard_size=made.kv_shard_size,
        )
        request = SimpleNamespace(
            mooncake_session_id="", room=0, dst_state_indices=states(other, 1), dst_aux_index=1
        )
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            if made.is_mla_backend or made.attn_tp_size == info.dst_attn_tp_size:
                made.send_kvcache(
                    "", kept, info.dst_kv_ptrs, THEIRS[positions], executor,
                    dst_kv_item_len=info.dst_kv_item_len, dst_attn_tp_size=info.dst_attn_tp_size,
                )  # fmt: skip
            else:
                made.send_kvcache_slice(
                    "", kept, info.dst_kv_ptrs, THEIRS[positions], info.dst_tp_rank,
                    info.dst_attn_tp_size, info.dst_kv_item_len, executor, info.dst_kv_layer_ids,
                )  # fmt: skip
            with get_parallel().override(enable_kv_cache_sharding=True):
                made.maybe_send_extra(request, states(one, 0), executor, info)
        return made.engine.rows

    def ours(one: Rank, other: Rank) -> Any:
        plan = Plan(one.layout(), other.layout(), one.place, other.place)
        parts = [plan.part(OURS, 0, Named(THEIRS)), plan.state(states(one, 0), states(other, 1))]
        return te.Blocks.concat(parts).array.tolist()

    compare_each_rank(
        config(prefill, enable_kv_cache_sharding=True),
        config(Topology(1, 1, decode_tp, 1)),
        source,
        lambda place: Rank(model, "decode", place, PAGE),
        theirs,
        ours,
    )


# --- decode context parallelism: the tokens of a page are dealt out ---

DCP = [
    ("mla", "mla", 1, 2, 2),
    ("mla", "mla", 1, 4, 4),
    ("mla", "mla", 2, 4, 2),
    ("mla", "mla", 4, 2, 2),
    (
        "mla with a draft model",
        "mla with a draft model, two ranks' tokens in a page",
        1,
        2,
        2,
    ),
]


@pytest.mark.parametrize("prefix_pages", [0, 3])
@pytest.mark.parametrize("chunks", [[(0, 6)], [(0, 1), (1, 4), (4, 6)]])
@pytest.mark.parametrize(("model", "there", "src_tp", "dst_tp", "dcp"), DCP)
def test_tokens_of_decode_context_parallelism_go_as_sglang_sends_them(
    model, there, src_tp, dst_tp, dcp, chunks, prefix_pages
):
    virtual = -(-len(OURS) // dcp)
    named = np.array([5, 2, 7, 1, 3, 4][:virtual], np.int32)
    prefix_len = prefix_pages * PAGE * dcp

    def target(place: Place) -> Rank:
        split = Split(tokens_dealt=Dealt(place.coords.tp % dcp, dcp))
        return Rank(there, "decode", place, PAGE, split)

    def theirs(one: Rank, other: Rank) -> Any:
        made, info = manager(one, "prefill"), registration(other)
        made.dcp_size = 1
        assert made.requires_dcp_relayout(dcp, other.split.tokens_dealt.index)
        main = len(one.kv_args.kv_item_lens) - one.kv_args.num_draft_entries
        lens = [info.dst_kv_item_len] * main + [None] * one.kv_args.num_draft_entries
        widths = made.prepare_dcp_token_item_lens(lens, dcp)
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            for begin, end in chunks:
                made.send_kvcache_dcp(
                    "", OURS[begin:end], info.dst_kv_ptrs, named,
                    dcp_token_item_lens=widths, dst_dcp_size=dcp,
                    dst_dcp_rank=other.split.tokens_dealt.index, src_page_offset=begin,
                    decode_prefix_len=prefix_len, num_kv_tokens=(end - begin) * PAGE,
                    executor=executor, dst_layer_ids=[],
                    dst_kv_item_lens=other.kv_args.kv_item_lens,
                    dst_tp_rank=info.dst_tp_rank, dst_attn_tp_size=info.dst_attn_tp_size,
                )  # fmt: skip
        return made.engine.rows

    def ours(one: Rank, other: Rank) -> Any:
        plan = Plan(one.layout(), other.layout(), one.place, other.place)
        wanted = Named(named, prefix_len=prefix_len)
        parts = [plan.part(OURS[begin:end], begin, wanted) for begin, end in chunks]
        return te.Blocks.concat(parts).array.tolist()

    compare_each_rank(
        config(Topology(1, 1, src_tp, 1)),
        config(Topology(1, 1, dst_tp, 1), dcp_size=dcp),
        lambda place: Rank(model, "prefill", place, PAGE),
        target,
        theirs,
        ours,
    )


# --- CP-TP group sharing: all heads on every rank, which share the state as TP ranks ---


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 2), (4, 4), (2, 4), (2, 1), (4, 2)])
@pytest.mark.parametrize("model", ["gdn", "qsa"])
def test_ranks_that_share_the_cp_and_the_tp_group_send_as_sglang_does(model, src_tp, dst_tp):
    """Where several ranks hold a head, SGLang has all of them send it, here one does."""
    from sglang.srt.runtime_context import get_parallel

    prefill, decode = Topology(1, 1, src_tp, 1), Topology(1, 1, dst_tp, 1)
    split = Split(whole_heads=True)
    for coords in decode.coords():
        target = Rank(model, "decode", Place(decode, coords), PAGE)
        info = registration(target)
        request = SimpleNamespace(
            mooncake_session_id="", room=0, dst_state_indices=states(target, 1), dst_aux_index=1
        )
        theirs: set[Any] = set()
        mine: list[Any] = []
        for chosen, _ in sources_of(config(prefill), 0, target.place, target.layout()):
            place = Place(prefill, chosen.coords)
            source = Rank(f"{model} with all heads", "prefill", place, PAGE, split)
            made = manager(source, "prefill")
            made.attn_tp_size, made.attn_cp_size, made.attn_cp_rank = 1, src_tp, place.coords.tp
            with (
                concurrent.futures.ThreadPoolExecutor(1) as executor,
                get_parallel().override(enable_cp_tp_group_sharing=True),
            ):
                if info.dst_attn_tp_size == 1:
                    made.send_kvcache(
                        "", OURS, info.dst_kv_ptrs, THEIRS, executor,
                        dst_layer_ids=info.dst_kv_layer_ids,
                    )  # fmt: skip
                else:
                    made.send_kvcache_slice(
                        "", OURS, info.dst_kv_ptrs, THEIRS, info.dst_tp_rank,
                        info.dst_attn_tp_size, info.dst_kv_item_len, executor,
                        info.dst_kv_layer_ids,
                    )  # fmt: skip
                made.maybe_send_extra(request, states(source, 0), executor, info)
            theirs |= merged(made.engine.rows, source)
            plan = Plan(source.layout(), target.layout(), source.place, target.place)
            blocks = te.Blocks.concat(
                [
                    plan.part(OURS, 0, Named(THEIRS)),
                    plan.state(states(source, 0), states(target, 1)),
                ]
            ).array.tolist()
            mine += merged(blocks, source)
        assert len(mine) == len(set(mine))
        assert set(mine) == theirs


# --- HiSparse: the model's pages in host memory, the draft model's on the device ---


def test_pages_on_the_host_and_on_the_device_go_as_sglang_sends_them():
    source = Rank("mla with a draft model", "prefill", ALONE, PAGE)
    target = Rank("mla with a draft model", "decode", ALONE, PAGE, Split(on_host=True))
    device = np.array([8, 9, 1, 2, 3, 4], np.int32)
    made, info = manager(source, "prefill"), registration(target)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        made.send_kvcache(
            "", OURS, info.dst_kv_ptrs, THEIRS, executor, dst_device_kv_indices=device,
            dst_kv_item_len=info.dst_kv_item_len, dst_attn_tp_size=1,
        )  # fmt: skip
    plan = Plan(source.layout(), target.layout())
    blocks = plan.part(OURS, 0, Named(THEIRS, device)).array.tolist()
    assert merged(blocks, source) == merged(made.engine.rows, source)
    assert len(merged(blocks, source)) == len(blocks)
    with pytest.raises(ValueError, match="named no device pages"):
        plan.part(OURS, 0, Named(THEIRS))


#: Lists of KVArgs that are empty for a model without state.
ABSENT = [
    "state_types",
    "state_data_ptrs",
    "state_data_lens",
    "state_item_lens",
    "state_layer_ids",
    "state_dim_per_tensor",
    "state_slice_outer_counts",
    "state_conv_shard_groups",
    "kv_layer_ids",
    "aux_data_ptrs",
    "aux_data_lens",
    "aux_item_lens",
]


class Compressed:
    """DeepSeek-V4 of four layers, two of which keep every fourth token, and one every 128th."""

    def __init__(self, role: str, split: Split = UNSPLIT) -> None:
        nbytes = [64, 64, 24, 24, 40]  # latents and indexers of two layers, latents of one
        self.memory = [np.zeros(20 * one, np.uint8) for one in nbytes]
        self.place, self.is_mla, self.split = ALONE, True, split
        self.kv_args = SimpleNamespace(
            **{name: [] for name in ABSENT},
            kv_data_ptrs=[one.ctypes.data for one in self.memory],
            kv_data_lens=[one.nbytes for one in self.memory], kv_item_lens=nbytes,
            num_draft_entries=0, page_size=PAGE, kv_layout=None, is_hybrid_mla_backend=False,
            swa_kv_cache_layout=None, mla_compression_ratios=[4, 128, 0, 4], engine_rank=0,
            prefill_start_layer=0, prefill_end_layer=4,
        )  # fmt: skip

    def layout(self) -> Layout:
        facts = self.kv_args, "bfloat16", True, Buffers((), (), ()), Heads(1)
        return layout_from_kv_args(*facts, self.place, self.split)


def test_compressed_latents_on_the_host_and_the_others_on_the_device_go_as_sglang_sends_them():
    source, target = Compressed("prefill"), Compressed("decode", Split(on_host=True))
    device = np.array([8, 9, 1, 2, 3, 4], np.int32)
    made = manager(source, "prefill")
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        made.send_kvcache(
            "", OURS, target.kv_args.kv_data_ptrs, THEIRS, executor,
            dst_device_kv_indices=device, dst_kv_item_len=64, dst_attn_tp_size=1,
        )  # fmt: skip
    blocks = Plan(source.layout(), target.layout()).part(OURS, 0, Named(THEIRS, device))
    assert merged(blocks.array.tolist(), source) == merged(made.engine.rows, source)
    assert {kind for kind, *_ in merged(made.engine.rows, source)} == {
        "c4 latent", "c4 indexer", "c128 latent"
    }  # fmt: skip


def test_the_coordinates_of_a_rank_are_those_that_peers_ask_for():
    assert dealt(Place(Topology(1, 2, 4, 1), RankCoords(0, 1, 3, 0))) == Dealt(1, 2)
    assert dealt(Place(Topology(1, 1, 4, 1), RankCoords(0, 0, 3, 0))) == Dealt(3, 4)
