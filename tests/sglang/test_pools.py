# SPDX-License-Identifier: Apache-2.0
"""SGLang's own pools, described by SGLang's own schedulers: what one or more prefill ranks send
through real engines is, for each decode rank, what the model's tensors say it must hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from handover import handover
from sglang_pools import MODELS, Rank

import te
from bootstrap_server import Topology
from bootstrap_server.ranks.matching import sources
from sglang_mooncake.layout import ALONE, LayoutMismatch, Place, Plan
from sglang_mooncake.sglang.pools.kv_args import UnsupportedPool
from sglang_mooncake.sglang.transports import register

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

WAIT_S = 60.0
#: Nothing is given up because a thread was stopped for seconds.
PATIENT = te.Config(stall_timeout_s=1_000.0, connect_timeout_s=1_000.0)
PAGES = [(1, 3), (2, 4), (4, 1)]
STATES = {
    "block_scale": [(1, 3), (2, 4), (4, 1)],
    "swa": [(2, 1), (3, 2)],
    "mamba": [(2, 3)],
    "qsa_pending": [(5, 3)],
    "qsa_compressed": [(1, 3), (2, 4), (4, 1)],
    "dsa": [(1, 3), (4, 1)],
}
#: Live slots of rings of 6: 2 tokens from slot 5 of row 3 on, then in row 2 of decode.
TAIL = ([3, 5, 1, 0, 1, 6], [2, 5, 1, 0, 1, 6])
SIZES = [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (2, 4), (4, 1), (4, 8)]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[te.Engine, te.Engine, te.Peer]]:
    with te.Engine(PATIENT) as source, te.Engine(PATIENT) as target:
        yield source, target, source.connect(target.card())


def indices(rank: Rank, side: int) -> list[list[int]]:
    return [
        TAIL[side] if name == "dsa_tail" else [pair[side] for pair in STATES[name]]
        for name in rank.caches.state_names
    ]


def expected(rank: Rank) -> dict[int | None, list[tuple[int, int]]]:
    states = {at: STATES.get(name, []) for at, name in enumerate(rank.caches.state_names)}
    return {None: PAGES, **states}


def hand_over(
    engines: tuple[te.Engine, te.Engine, te.Peer], model: str, prefill: Topology, target: Rank
) -> list[Rank]:
    """All prefill ranks that the decode rank asks send to it."""
    source_engine, target_engine, peer = engines
    regions = [(target_engine, one) for one in register(target_engine, target.ranges(), "tagged")]
    tag = te.new_tag()
    target_engine.expect(tag, peer=source_engine)
    ranks = []
    for asked in sources(prefill, target.place.topology, target.place.coords, 0):
        rank = Rank(model, "prefill", Place(prefill, asked.coords), target.page)
        ranks.append(rank)
        regions += [(source_engine, one) for one in register(source_engine, rank.ranges(), "none")]
        plan = Plan(rank.layout(), target.layout(), rank.place, target.place)
        pages = [np.array([pair[side] for pair in PAGES], np.int32) for side in (0, 1)]
        parts = [plan.kv(*pages), plan.state(indices(rank, 0), indices(target, 1))]
        if asked.aux:
            parts.append(plan.aux(3, 1))
        peer.write(te.Blocks.concat(parts), tag).wait(timeout_s=WAIT_S)
        if asked.aux:
            assert torch.equal(target.metadata.output_ids[1], rank.metadata.output_ids[3])
            assert not target.metadata.output_ids[2].any()
    assert target_engine.fence(tag) == len(ranks)
    for engine, region in regions:
        engine.deregister(region)
    return ranks


#: Of scales SGLang does not tell how they lie, and of GDN's four key heads not on which of eight
#: ranks; both go between equal sizes alone.
REFUSED = {
    *(("mxfp8", *sizes) for sizes in SIZES if len(set(sizes)) == 2),
    ("gdn", 4, 8),
    ("qsa", 4, 8),
}
CASES = [(model, *sizes) for model in MODELS for sizes in SIZES if (model, *sizes) not in REFUSED]


@pytest.mark.parametrize(("model", "src_size", "dst_size"), CASES)
def test_each_decode_rank_gets_what_the_model_holds(engines, model, src_size, dst_size):
    decode = Topology(1, 1, dst_size, 1)
    for coords in list(decode.coords())[:: max(1, dst_size // 2)]:
        target = Rank(model, "decode", Place(decode, coords), page=4)
        hand_over(engines, model, Topology(1, 1, src_size, 1), target)
        assert target.mismatches(expected(target)) == []


@pytest.mark.parametrize("page", [1, 2, 16])
@pytest.mark.parametrize("model", ["mha", "mla", "swa"])
def test_pages_of_any_size(engines, model, page):
    target = Rank(model, "decode", Place(Topology(1, 1, 1, 1), ALONE.coords), page)
    hand_over(engines, model, Topology(1, 1, 2, 1), target)
    assert target.mismatches(expected(target)) == []


@pytest.mark.parametrize("model", ["mha", "mla", "dsa"])
@pytest.mark.parametrize("stages", [(2, 1), (3, 1), (3, 3)])
def test_pipeline_stages_bring_their_layers(engines, model, stages):
    decode = Topology(1, 1, 2, stages[1])
    for coords in decode.coords():
        target = Rank(model, "decode", Place(decode, coords), page=4)
        hand_over(engines, model, Topology(1, 1, 1, stages[0]), target)
        assert target.mismatches(expected(target)) == []


@pytest.mark.parametrize(("model", "src_size", "dst_size"), sorted(REFUSED))
def test_what_cannot_be_cut_is_refused_when_ranks_meet(model, src_size, dst_size):
    source = Rank(model, "prefill", Place(Topology(1, 1, src_size, 1), ALONE.coords), 4)
    target = Rank(model, "decode", Place(Topology(1, 1, dst_size, 1), ALONE.coords), 4)
    with pytest.raises(LayoutMismatch, match=r"(block_scale|mamba).*: prefill stores .* --tp-size"):
        Plan(source.layout(), target.layout(), source.place, target.place)


def test_live_tokens_of_a_ring_reach_the_ring_of_another_row(engines):
    target = Rank("dsa", "decode", ALONE, page=4)
    source = hand_over(engines, "dsa", ALONE.topology, target)[0]
    for ours, theirs in (
        (source.caches.pool._compress_tail_k, target.caches.pool._compress_tail_k),
        (source.caches.pool._compress_tail_score, target.caches.pool._compress_tail_score),
    ):
        assert torch.equal(ours[0][3, [5, 0]], theirs[0][2, [5, 0]])


@pytest.mark.parametrize("model", ["mha", "mla"])
def test_a_whole_hand_over_between_sglangs_own_pools(model):
    """Rooms, links and metadata included."""
    source, target = (Rank(model, role, ALONE, 4) for role in ("prefill", "decode"))

    class Memory:
        def __init__(self, rank: Rank) -> None:
            self.rank, self.ranges = rank, rank.ranges

        def layout(self, completions):
            from msgspec.structs import replace

            return replace(self.rank.layout(), completions=completions)

    with handover(source=Memory(source), target=Memory(target)) as pair:
        pair.decode.know(pair.address)
        pair.complete(5, [1, 2, 4], [3, 4, 1], aux=3)
    assert target.mismatches({None: PAGES}) == []
    assert torch.equal(target.metadata.output_ids[3], source.metadata.output_ids[3])


def broken(**changes: object) -> Rank:
    rank = Rank("gdn", "prefill", ALONE, 4)
    for name, value in changes.items():
        setattr(rank.kv_args, name, value)
    return rank


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_data_lens": [1]}, "KV: SGLang gave 4 pointers, 4 item lengths and 1 lengths"),
        ({"num_draft_entries": 5}, "5 buffers of the draft model among 4"),
        ({"kv_layer_ids": [1, 3]}, "2 layer numbers for 4 KV buffers"),
        ({"kv_layer_ids": [1, 3, 1, 5]}, "are not K and V of the same layers"),
        ({"kv_item_lens": [100] * 4}, "k: an item of 100 bytes is no 4 rows of 4 heads"),
        ({"total_kv_head_num": 8}, "SGLang counts 8 KV heads .* configuration 4"),
        ({"state_dim_per_tensor": [[1]]}, "mamba: 1 facts about 6 buffers"),
        ({"state_dim_per_tensor": [[60] + [64] * 2 + [8] * 3]}, "1 rows of 60 channels in"),
    ],
)
def test_descriptions_that_do_not_add_up_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        broken(**changes).layout()


def test_what_we_do_not_know_is_refused_by_name():
    with pytest.raises(UnsupportedPool, match="keeps warp state"):
        broken(state_types=["warp"]).layout()
    rank = Rank("mha", "decode", ALONE, 4)
    rank.place = Place(Topology(1, 1, 3, 1), ALONE.coords)
    with pytest.raises(UnsupportedPool, match=r"4 KV heads cannot be laid out .* of 3"):
        rank.layout()
