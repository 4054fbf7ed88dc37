# SPDX-License-Identifier: Apache-2.0
"""Plans against an oracle: which bytes of the destination change, and to what."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te
from sglang_mooncake.layout import (
    SEAL_BYTES,
    Buffers,
    Layout,
    LayoutMismatch,
    Plan,
    Seal,
    seal_bytes,
)

AUX = Buffers((1 << 40, 1 << 41), (64, 8), (640, 80))
SEALS = Buffers((1 << 42,), (SEAL_BYTES,), (10 * SEAL_BYTES,))


def layout(base: int, items: tuple[int, ...], pages: int, **changes: object) -> Layout:
    """KV buffers one after the other from `base`, with item lengths of their own."""
    addresses = [base + sum(items[:i]) * pages for i in range(len(items))]
    made = Layout(
        page_size=4,
        dtype="bfloat16",
        kv_layout=None,
        is_mla=False,
        layer_ids=(),
        kv=Buffers(tuple(addresses), items, tuple(item * pages for item in items)),
        aux=AUX,
        seals=SEALS,
    )
    return msgspec.structs.replace(made, **changes)


def apply(blocks: te.Blocks, source: np.ndarray, target: np.ndarray) -> None:
    """What a transfer does, with addresses as offsets + 1 into the arrays."""
    for src, dst, nbytes in blocks.array.tolist():
        target[dst - 1 : dst - 1 + nbytes] = source[src - 1 : src - 1 + nbytes]


@given(
    items=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    pairs=st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 15)), max_size=12, unique_by=lambda p: p[1]
    ),
)
def test_pages_go_where_they_belong_and_nowhere_else(items, pairs):
    source = np.random.default_rng(0).integers(0, 256, 12 * sum(items), dtype=np.uint8)
    target = np.zeros(16 * sum(items), dtype=np.uint8)
    plan = Plan(layout(1, items, 12), layout(1, items, 16))
    sources = np.array([p[0] for p in pairs], dtype=np.int64)
    targets = np.array([p[1] for p in pairs], dtype=np.int64)
    blocks = plan.kv(sources, targets)
    assert blocks.total_nbytes == len(pairs) * sum(items)
    apply(blocks, source, target)

    expected = np.zeros_like(target)
    for b, item in enumerate(items):
        begin_s, begin_t = sum(items[:b]) * 12, sum(items[:b]) * 16
        for s, t in pairs:
            expected[begin_t + t * item : begin_t + (t + 1) * item] = source[
                begin_s + s * item : begin_s + (s + 1) * item
            ]
    np.testing.assert_array_equal(target, expected)


def test_runs_of_pages_become_one_block_per_buffer():
    plan = Plan(layout(1, (32, 32), 100), layout(1, (32, 32), 100))
    assert len(plan.kv(np.arange(10, 60), np.arange(40, 90))) == 2


def test_metadata_and_seal_go_to_their_slots():
    plan = Plan(layout(1, (32,), 4), layout(1, (32,), 4))
    assert plan.aux(2, 5).array.tolist() == [
        ((1 << 40) + 128, (1 << 40) + 320, 64),
        ((1 << 41) + 16, (1 << 41) + 40, 8),
    ]
    assert plan.seal(77, 3).array.tolist() == [(77, (1 << 42) + 3 * SEAL_BYTES, SEAL_BYTES)]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda plan: plan.kv(np.array([4]), np.array([0])), "prefill page outside 0..3"),
        (lambda plan: plan.kv(np.array([0]), np.array([-1])), "decode page outside 0..3"),
        (lambda plan: plan.kv(np.array([0, 1]), np.array([0])), "length"),
        (lambda plan: plan.aux(10, 0), "prefill metadata slot outside 0..9"),
        (lambda plan: plan.aux(0, 10), "decode metadata slot outside 0..9"),
        (lambda plan: plan.seal(1, 10), "seal slot outside 0..9"),
    ],
)
def test_indices_outside_the_buffers_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call(Plan(layout(1, (32,), 4), layout(1, (32,), 4)))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"page_size": 16}, ("4", "16", "--page-size")),
        ({"dtype": "fp8_e4m3"}, ("bfloat16", "fp8_e4m3", "--kv-cache-dtype")),
        ({"kv_layout": "hnd"}, ("None", "hnd")),
        ({"is_mla": True}, ("False", "True", "model")),
        ({"layer_ids": (0, 1)}, ("()", "(0, 1)")),
        ({"aux": Buffers((1,), (8,), (80,))}, ("(64, 8)", "(8,)", "SGLang")),
    ],
)
def test_what_differs_is_named_with_both_values_and_the_remedy(changes, parts):
    with pytest.raises(LayoutMismatch) as refused:
        Plan(layout(1, (32,), 4), layout(1, (32,), 4, **changes))
    for part in parts:
        assert part in str(refused.value)


def test_kv_buffers_of_other_sizes_or_number_are_refused():
    with pytest.raises(LayoutMismatch, match=r"\[32\].*\[64\].*--tp-size"):
        Plan(layout(1, (32,), 4), layout(1, (64,), 4))
    with pytest.raises(LayoutMismatch, match="2, the decode server has 1"):
        Plan(layout(1, (32, 32), 4), layout(1, (32,), 4))
    with pytest.raises(LayoutMismatch, match="order"):
        Plan(layout(1, (32, 64), 4), layout(1, (64, 32), 4))


@given(*[st.integers(0, 2**64 - 1)] * 3)
def test_a_seal_comes_back_as_it_went(generation, writes, pages):
    seal = Seal(generation, writes, pages)
    assert Seal.unpack(seal_bytes(seal)) == seal
    assert len(seal_bytes(seal)) == SEAL_BYTES


@pytest.mark.parametrize(
    "rows", [((1,), (8,), ()), ((0,), (8,), (8,)), ((1,), (0,), (8,)), ((1,), (9,), (8,))]
)
def test_buffers_that_hold_nothing_are_refused(rows):
    with pytest.raises(ValueError, match="buffer"):
        Buffers(*rows)
