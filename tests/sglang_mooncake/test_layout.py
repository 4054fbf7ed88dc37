# SPDX-License-Identifier: Apache-2.0
"""Layouts and plans: what fits together, what is refused and how it is said. What plans copy is
held against an oracle in `test_layout_oracle.py`."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from caches import Cache, Model, RankMemory, place
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.layout import (
    ALONE,
    COMPLETION_BYTES,
    Buffers,
    CompletionRecord,
    Layout,
    LayoutMismatch,
    Place,
    Plan,
    Units,
    completion_bytes,
)
from sglang_mooncake.layout.indices import joined

MHA = Model(
    (
        Cache("k", (0, 1), (Units(4, 8),), rows=4),
        Cache("v", (0, 1), (Units(4, 8),), rows=4),
        Cache("window", (0,), (Units(1, 6),), state=0),
    ),
    layers=2,
    states=("swa", "ring"),
)


def layout(at: Place = ALONE, model: Model = MHA, items: int = 4, **changes: object) -> Layout:
    made = RankMemory(model, at, items, full=False).layout(address=1)
    return msgspec.structs.replace(made, **changes)


def with_component(number: int, **changes: object) -> Layout:
    made = layout()
    components = list(made.components)
    components[number] = msgspec.structs.replace(components[number], **changes)
    return msgspec.structs.replace(made, components=tuple(components))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_joined_pairs_are_the_pairs_again_in_as_few_runs_as_there_can_be(pairs):
    columns = np.array(pairs, np.int64).reshape(-1, 2).T
    runs = list(zip(*joined(*columns), strict=True))
    assert [(a + n, b + n) for a, b, count in runs for n in range(count)] == pairs
    for (a, b, count), following in itertools.pairwise(runs):
        assert (a + count, b + count) != following[:2]


def test_runs_of_pages_become_one_block_per_buffer():
    plan = Plan(layout(items=100), layout(items=100))
    assert len(plan.kv(np.arange(10, 60), np.arange(40, 90))) == 4
    shuffled = np.random.default_rng(0).permutation(50)
    assert len(plan.kv(shuffled + 10, shuffled + 40)) == 4


def test_heads_of_another_tp_size_are_slices_of_each_token():
    plan = Plan(layout(place(2, 1)), layout(place(4, 3)), place(2, 1), place(4, 3))
    k = layout(place(2, 1)).components[0].buffers.addresses[0]
    there = layout(place(4, 3)).components[0].buffers.addresses[0]
    first = plan.kv(np.array([1]), np.array([2])).array[:4].tolist()
    assert first == [(k + 64 + token * 16 + 8, there + 64 + token * 8, 8) for token in range(4)]


def test_metadata_and_completion_record_go_to_their_slots():
    plan = Plan(layout(), layout())
    assert plan.aux(2, 5).array.tolist() == [
        ((1 << 40) + 128, (1 << 40) + 320, 64),
        ((1 << 41) + 16, (1 << 41) + 40, 8),
    ]
    assert plan.completion(77, 3).array.tolist() == [
        (77, (1 << 42) + 3 * COMPLETION_BYTES, COMPLETION_BYTES)
    ]


def aux(*item_nbytes: int) -> Buffers:
    """Ten slots in each of these buffers, far from each other."""
    addresses = tuple((at + 1) << 40 for at in range(len(item_nbytes)))
    return Buffers(addresses, item_nbytes, tuple(10 * nbytes for nbytes in item_nbytes))


def test_what_a_draft_model_continues_from_stays_where_one_side_has_none():
    """And the other metadata goes to its own slots (finding D3)."""
    without, with_drafts = aux(64, 64, 8), aux(64, 14_336, 8)
    for ours, theirs in ((without, with_drafts), (with_drafts, without)):
        plan = Plan(layout(aux=ours, draft_aux=1), layout(aux=theirs, draft_aux=1))
        assert plan.aux(2, 5).array.tolist() == [
            ((1 << 40) + 128, (1 << 40) + 320, 64),
            ((3 << 40) + 16, (3 << 40) + 40, 8),
        ]


@pytest.mark.parametrize(
    ("ours", "theirs", "known"),
    [
        (aux(64, 64, 8), aux(64, 14_336, 8), (None, None)),
        (aux(64, 64, 8), aux(64, 14_336, 8), (1, 0)),
        (aux(64, 64, 8), aux(64, 14_336, 16), (1, 1)),
        (aux(64, 64, 8), aux(64, 64), (1, 1)),
    ],
)
def test_metadata_that_differs_otherwise_is_refused(ours, theirs, known):
    with pytest.raises(LayoutMismatch, match="bytes per request of metadata buffers"):
        Plan(layout(aux=ours, draft_aux=known[0]), layout(aux=theirs, draft_aux=known[1]))


def test_releases_that_mean_different_things_by_a_list_are_refused_with_both_named():
    newer = msgspec.structs.replace(
        layout(), release="SGLang 0.5.23", conventions=("dsa from the prefix on",)
    )
    older = msgspec.structs.replace(layout(), release="SGLang 0.5.22")
    for prefill, decode in ((older, newer), (newer, older)):
        with pytest.raises(LayoutMismatch) as refused:
            Plan(prefill, decode)
        said = str(refused.value)
        assert "mean different things by the lists of a request" in said
        assert f"the prefill server runs {prefill.release}, the decode server {decode.release}" in (
            said
        )


def test_releases_that_mean_the_same_are_served():
    older, newer = (
        msgspec.structs.replace(layout(), release=f"SGLang {number}")
        for number in ("0.5.22", "0.5.23")
    )
    Plan(older, newer)


def test_a_mismatch_between_servers_of_one_release_names_no_release():
    one = msgspec.structs.replace(layout(), release="SGLang 0.5.23")
    other = msgspec.structs.replace(one, page_size=one.page_size + 1)
    with pytest.raises(LayoutMismatch) as refused:
        Plan(one, other)
    assert "SGLang 0.5.23" not in str(refused.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda plan: plan.kv(np.array([4]), np.array([0])), "prefill page outside 0..3"),
        (lambda plan: plan.kv(np.array([0]), np.array([-1])), "decode page outside 0..3"),
        (lambda plan: plan.kv(np.array([0, 1]), np.array([0])), "prefill names 2 and decode 1"),
        (lambda plan: plan.kv(np.array([0.5]), np.array([0])), "must be integers, not float64"),
        (lambda plan: plan.state([[4]], [[0]]), "prefill swa outside 0..3"),
        (lambda plan: plan.state([[0], [], []], [[0]]), "3 state lists; the model has"),
        (lambda plan: plan.aux(10, 0), "prefill metadata slot outside 0..9"),
        (lambda plan: plan.aux(0, 10), "decode metadata slot outside 0..9"),
        (lambda plan: plan.completion(1, 10), "slot for a completion record outside 0..9"),
    ],
)
def test_indices_outside_the_buffers_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call(Plan(layout(), layout()))


def test_state_without_a_list_moves_nothing():
    plan = Plan(layout(), layout())
    assert plan.sends_state
    assert len(plan.state([None], [[1]])) == len(plan.state([], [])) == 0
    assert plan.state([[2], None], [[1], None]).total_nbytes == 6
    # SGLang's only Mamba index comes as a list of an array.
    assert plan.state([[np.array([2])]], [[np.array([1])]]).total_nbytes == 6


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"page_size": 16}, ("4", "16", "--page-size")),
        ({"dtype": "fp8_e4m3"}, ("bfloat16", "fp8_e4m3", "--kv-cache-dtype")),
        ({"kv_layout": "hnd"}, ("None", "hnd")),
        ({"states": ("swa", "dsa")}, ("swa, ring", "swa, dsa", "model")),
        ({"aux": Buffers((1,), (8,), (80,))}, ("64, 8", "8", "SGLang")),
        ({"components": ()}, ("k, v, window", "none", "model")),
    ],
)
def test_what_differs_is_named_with_both_values_and_the_remedy(changes, parts):
    with pytest.raises(LayoutMismatch) as refused:
        Plan(layout(), layout(**changes))
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"layers": (0, 3)}, "k: prefill has layers 1, which decode has not"),
        ({"cuts": (Units(8, 4),)}, "4 rows of 4 units of 8 bytes, decode 4 rows of 8 units of 4"),
        ({"rows": 1}, "prefill stores 4 rows of .* decode 1 rows of"),
        ({"state": 1}, "state list None, decode by 1"),
        ({"segments": True}, "state list None"),
        ({"numbered": False, "elided": (7,)}, "k of 2 layers on prefill .* and 3 on decode"),
    ],
)
def test_caches_that_do_not_fit_are_refused(theirs, says):
    with pytest.raises(LayoutMismatch, match=says):
        Plan(layout(), with_component(0, **theirs))


def test_a_decode_rank_with_layers_that_prefill_lacks_is_refused():
    with pytest.raises(LayoutMismatch, match="k: decode has layers 7, which prefill has not"):
        Plan(layout(), with_component(0, elided=(7,)))


def test_bytes_that_do_not_add_up_are_refused_when_ranks_meet():
    odd = with_component(0, buffers=Buffers((1, 1000), (127, 127), (508, 508)))
    with pytest.raises(LayoutMismatch, match="k: an item on decode TP rank 0 of 1 has 127 bytes"):
        Plan(layout(), odd)
    with pytest.raises(LayoutMismatch, match="k: an item on prefill TP rank 0 of 1 has 127 bytes"):
        Plan(odd, layout())
    with pytest.raises(LayoutMismatch, match=r"4 units of k cannot be laid out over .* of 3"):
        Plan(layout(), layout(), ALONE, place(3, 0))


def test_layers_without_numbers_go_by_position():
    ours = with_component(0, numbered=False, layers=(40, 41))
    plan = Plan(ours, with_component(0, numbered=False))
    alike = Plan(layout(), layout())
    copies = [np.sort(one.kv(np.array([1]), np.array([2])).array) for one in (plan, alike)]
    assert np.array_equal(*copies)
    with pytest.raises(LayoutMismatch, match=r"stage \(0, 2\)\) and 2 on decode .*--pp-size"):
        Plan(ours, layout(), place(1, 0, 2, 0))


def test_elided_layers_move_nothing():
    ours = with_component(0, layers=(0, 1), elided=(2,))
    theirs = with_component(0, layers=(0, 2), elided=(1,))
    assert len(Plan(ours, theirs).kv(np.array([1]), np.array([2]))) == 1 + 2


def test_a_draft_model_on_one_side_alone_moves_nothing():
    draft = msgspec.structs.replace(layout().components[0], kind="draft k")
    both = layout(components=(*layout().components, draft))
    moved = [
        len(Plan(*sides).kv(np.array([1]), np.array([2])))
        for sides in ((both, layout()), (layout(), both), (both, both))
    ]
    assert moved == [4, 4, 6]
    stages = [
        Plan(both, both, place(1, 0, 2, at)).kv(np.array([1]), np.array([2])) for at in (0, 1)
    ]
    assert [len(blocks) for blocks in stages] == [4, 6]


RING = Model((Cache("tail", (0, 1), (Units(1, 24),), state=0),), layers=2, states=("dsa_tail",))


def ring(slots: int, items: int = 3) -> Layout:
    made = layout(model=RING, items=items)
    tail = msgspec.structs.replace(made.components[0], segments=True, cuts=(Units(1, 8 * slots),))
    buffers = Buffers(
        tail.buffers.addresses, (8 * slots,) * 2, tuple(items * 8 * slots for _ in range(2))
    )
    return msgspec.structs.replace(
        made, components=(msgspec.structs.replace(tail, buffers=buffers),)
    )


def test_live_slots_move_between_rings_of_other_lengths():
    """Four slots, oldest at 3 of a ring of 5 on prefill, at 1 of a ring of 6 on decode."""
    ours, theirs = ring(5), ring(6)
    blocks = Plan(ours, theirs).state([[2, 3, 2, 0, 2, 5]], [[1, 1, 4, 0, 0, 6]])
    src, dst = (side.components[0].buffers.addresses[0] for side in (ours, theirs))
    assert blocks.array[:2].tolist() == [
        (src + (2 * 5 + 3) * 8, dst + (6 + 1) * 8, 16),
        (src + 2 * 5 * 8, dst + (6 + 3) * 8, 16),
    ]
    assert len(blocks) == 4
    assert len(Plan(ours, theirs).state([[]], [[]])) == 0


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ([2, 3, 2, 0, 2, 5], [1, 1, 3, 0, 0, 6], "prefill has 4 live slots, decode 3"),
        ([2, 3, 2, 0, 2, 5], [1, 1, 4, 0, 0, 5], "with 5 slots on prefill, .* with 5 slots"),
        ([3, 0, 1, 0, 0, 5], [1, 0, 1, 0, 0, 6], "row 3 of 3"),
        ([0, 4, 2, 0, 0, 5], [1, 0, 2, 0, 0, 6], "2 slots from 4 on leave a ring of 5"),
        ([0, 0, 1], [1, 0, 2, 0, 0, 6], "3 numbers"),
    ],
)
def test_parts_of_rings_that_do_not_fit_are_refused(source, target, says):
    with pytest.raises(ValueError, match=says):
        Plan(ring(5), ring(6)).state([source], [target])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: with_component(0, layers=(0,)), "k: 1 layers for 2 buffers"),
        (lambda: with_component(0, elided=(1,)), "a layer comes twice"),
        (lambda: with_component(0, cuts=()), "no regular tensor"),
        (
            lambda: with_component(0, buffers=Buffers((1, 9), (8, 4), (8, 4))),
            r"items of \[4, 8\] bytes",
        ),
        (lambda: with_component(2, state=2), "window wants state list 2 of 2"),
        (lambda: layout(page_size=0), "a page of 0 tokens"),
        (lambda: Units(0, 8), "no piece of a cache"),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@given(st.builds(CompletionRecord, *[st.integers(0, 2**64 - 1)] * 8))
def test_a_completion_record_comes_back_as_it_went(completion):
    assert CompletionRecord.unpack(completion_bytes(completion)) == completion
    assert len(completion_bytes(completion)) == COMPLETION_BYTES


@pytest.mark.parametrize(
    "rows", [((1,), (8,), ()), ((0,), (8,), (8,)), ((1,), (0,), (8,)), ((1,), (9,), (8,))]
)
def test_buffers_that_hold_nothing_are_refused(rows):
    with pytest.raises(ValueError, match="buffer"):
        Buffers(*rows)
