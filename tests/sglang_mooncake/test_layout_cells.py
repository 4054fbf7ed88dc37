# SPDX-License-Identifier: Apache-2.0
"""Cells, and digests of them, between random ranks of random models: equal bytes have equal digests
on both sides however TP and stages cut them, and any byte that differs is found and named."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import xxhash
from caches import Cache, Model, RankMemory, copy, models, place
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs
from test_layout import ring
from test_layout_oracle import ITEMS, Moved, blocks_of, lists, moves, tp_sizes

from bootstrap_server import Topology
from bootstrap_server.ranks.matching import sources
from sglang_mooncake.layout import (
    Buffers,
    Dealt,
    Digests,
    Layout,
    Named,
    Place,
    Plan,
    Sent,
    Units,
    Verify,
    bytes_of,
    chosen_cells,
    differences,
    digest,
    is_chosen,
    sample_size,
)
from sglang_mooncake.layout import cells as cells_module
from sglang_mooncake.layout.cells import Cells, DigestsDisagree, Shape
from sglang_mooncake.layout.chosen import (
    SAMPLE_CELLS_MIN,
    SAMPLE_NBYTES,
    SAMPLE_PART,
    SAMPLE_ROOMS,
)
from sglang_mooncake.layout.indices import owned


def reader(memory):
    """Digests of memory whose first byte has address 1."""

    def read(addresses, offsets, sizes):
        return np.array(
            [
                xxhash.xxh3_64_intdigest(
                    b"".join(
                        memory[at + offset - 1 : at + offset - 1 + n].tobytes()
                        for offset, n in zip(offsets.tolist(), sizes.tolist(), strict=True)
                    )
                )
                for at in addresses.tolist()
            ],
            np.uint64,
        )

    return read


def all_of(of: tuple[Cells, ...], memory: RankMemory) -> tuple[Digests, ...]:
    everything = chosen_cells(0, 0, sum(map(len, of)))
    return tuple(one for some in digest(of, everything, reader(memory.base)) for one in some)


def cells_of(plan: Plan, moved: Moved) -> tuple[tuple[Cells, ...], tuple[Cells, ...]]:
    """Of the source and of the target, of pairs of items for each list."""
    ours, theirs = lists(moved[None])
    states = list(zip(*(lists(moved[state]) for state in (0, 1)), strict=True))
    here = plan.cells.of_source(np.arange(len(ours)), ours, *states)
    nbytes = blocks_of(plan, moved).total_nbytes
    told = [(one.which, one.positions) for one in here]
    sent = Sent(len(ours), nbytes)
    return here, plan.cells.of_target(told, theirs, None, states[1], None, sent)


@pytest.mark.slow
@given(tp_sizes, tp_sizes, st.sampled_from([(1, 1), (2, 1), (2, 2)]), moves(), st.data())
def test_any_changed_byte_is_found_and_named_whatever_the_layouts(
    src_size, dst_size, stages, moved, data
):
    model = data.draw(models(src_size, dst_size))
    prefill, decode = Topology(1, 1, src_size, stages[0]), Topology(2, 1, dst_size, stages[1])
    coords = data.draw(st.sampled_from(list(decode.coords())))
    target = RankMemory(model, Place(decode, coords), ITEMS, full=False)
    asked = data.draw(st.sampled_from(sources(prefill, decode, coords, 0)))
    source = RankMemory(model, Place(prefill, asked.coords), ITEMS, full=True)
    plan = Plan(source.layout(address=1), target.layout(address=1), source.place, target.place)
    blocks = blocks_of(plan, moved)
    copy(blocks, source.base, target.base)
    here, there = cells_of(plan, moved)
    assert sum(one.nbytes for one in here) == blocks.total_nbytes
    sent = all_of(here, source)
    landed = all_of(there, target)
    assert differences(there, landed, sent) == []

    # One byte, anywhere in the decode rank's memory.
    at = data.draw(st.integers(0, target.base.size - 1))
    target.base[at] ^= 1 << data.draw(st.integers(0, 7))
    array = blocks.array
    was_sent = ((array["dst"] - 1 <= at) & (at < array["dst"] - 1 + array["nbytes"])).any()
    differ = differences(there, all_of(there, target), sent)
    assert len(differ) == was_sent
    for one in differ:
        assert len(one.items) == len(one.buffers) == 1
        assert one.buffers[0] == name_of(target, at)
        state = None if one.name == "page" else model.states.index(one.name)
        assert moved[state][one.items[0]][1] == item_of(target, at)


def name_of(memory: RankMemory, at: int) -> str:
    kind, layer = next(key for key, array in memory.arrays.items() if covers(memory, array, at))
    return f"{kind} of layer {layer}"


def item_of(memory: RankMemory, at: int) -> int:
    array = next(array for array in memory.arrays.values() if covers(memory, array, at))
    return (at - begin(memory, array)) // array.shape[1]


def begin(memory: RankMemory, array) -> int:
    return array.ctypes.data - memory.base.ctypes.data


def covers(memory: RankMemory, array, at: int) -> bool:
    return 0 <= at - begin(memory, array) < array.nbytes


MODEL = Model((Cache("k", (0, 1, 2), (Units(4, 8),), rows=2),), layers=3, states=("one", "two"))


def pair(pages: int = 4) -> tuple[RankMemory, RankMemory, tuple[Cells, ...], tuple[Cells, ...]]:
    """Two ranks that hold the same, and their cells."""
    source = RankMemory(MODEL, place(1, 0), ITEMS, full=True)
    target = RankMemory(MODEL, place(1, 0), ITEMS, full=False)
    plan = Plan(source.layout(address=1), target.layout(address=1))
    moved: Moved = {None: [(i, ITEMS - 1 - i) for i in range(pages)], 0: [], 1: []}
    copy(blocks_of(plan, moved), source.base, target.base)
    return source, target, *cells_of(plan, moved)


def test_cells_that_are_exchanged_differ():
    source, target, here, there = pair()
    pages = target.arrays["k", 1]
    pages[[2, 3]] = pages[[3, 2]]
    (differ,) = differences(there, all_of(there, target), all_of(here, source))
    assert differ.items == (2, 3)
    assert differ.buffers == ("k of layer 1",)


def test_a_sample_finds_what_has_changed_in_the_cells_that_it_draws_alone():
    source, target, here, there = pair()
    (cells,) = there

    def sampled(of, memory, chosen):
        return tuple(one for some in digest(of, chosen, reader(memory.base)) for one in some)

    for seed in range(20):
        chosen = chosen_cells(seed, 5, len(cells))
        sent = sampled(here, source, chosen)
        for number in range(len(cells)):
            item, layer = divmod(number, cells.columns)
            target.arrays["k", layer][ITEMS - 1 - item, 0] ^= 1
            differ = differences(there, sampled(there, target, chosen), sent)
            assert bool(differ) == (number in chosen)
            target.arrays["k", layer][ITEMS - 1 - item, 0] ^= 1


def test_several_that_differ_are_named_by_all_their_items_and_buffers():
    source, target, here, there = pair()
    target.arrays["k", 0][5, 0] ^= 1
    target.arrays["k", 2][4, 3] ^= 1
    (differ,) = differences(there, all_of(there, target), all_of(here, source))
    assert differ.items == (0, 1)
    assert differ.buffers == ("k of layer 0", "k of layer 2")


def test_bytes_of_cells_that_differ_are_read_by_name_and_bounded(monkeypatch):
    source, target, here, there = pair()
    target.arrays["k", 0][5, 0] ^= 1
    target.arrays["k", 2][4, 3] ^= 1
    differ = differences(there, all_of(there, target), all_of(here, source))
    read, calls = reader(target.base), []

    def with_bytes(addresses, offsets, sizes):
        calls.append(len(addresses))
        parts = list(zip(offsets.tolist(), sizes.tolist(), strict=True))
        found = [
            np.concatenate([target.base[at + o - 1 : at + o - 1 + n] for o, n in parts])
            for at in addresses.tolist()
        ]
        return np.stack(found), read(addresses, offsets, sizes)

    (cells,) = there
    everything = range(len(cells))
    (found,) = bytes_of(there, differ, everything, with_bytes)
    assert {name: cell.tolist() for name, cell in found.items()} == {
        f"page {at} in k of layer {layer}": target.arrays["k", layer][5 - at].tolist()
        for at in (0, 1)
        for layer in (0, 2)
    }
    assert calls == [4]  # Others wait for each call.
    (item,) = {len(cell) for cell in found.values()}
    names = list(found)
    for name, most, pieces in (
        ("CELLS_READ_AT_ONCE", 3, [names[:3], names[3:]]),
        ("NBYTES_READ_AT_ONCE", 2 * item, [names[:2], names[2:]]),
        ("NBYTES_READ_AT_ONCE", item - 1, [[name] for name in names]),
        ("CELLS_KEPT_MAX", 2, [names[:2]]),
        ("NBYTES_KEPT_MAX", 2 * item, [names[:2]]),
        ("NBYTES_KEPT_MAX", item - 1, [names[:1]]),
    ):
        with monkeypatch.context() as bounded:
            bounded.setattr(cells_module, name, most)
            kept = bytes_of(there, differ, everything, with_bytes)
            assert [list(piece) for piece in kept] == pieces
    sample = np.array([0, 1, cells.columns + 2, 2 * cells.columns])
    (found,) = bytes_of(there, differ, sample, with_bytes)
    assert list(found) == [names[0], names[3]]


def test_digests_of_other_cells_are_no_digests_to_compare():
    source, target, here, there = pair()
    sent, landed = all_of(here, source), all_of(there, target)
    (one,) = sent
    for other, what in (
        (Digests(one.which + 1, one.positions, one.of_items, one.of_buffers), "other buffers"),
        (Digests(one.which, one.positions, one.of_items, one.of_buffers[:-1]), "other buffers"),
        (Digests(one.which, one.positions + 1, one.of_items, one.of_buffers), "other items"),
    ):
        with pytest.raises(ValueError, match=what):
            differences(there, landed, (other,))


def plain(names: list[str], begin: int, nbytes: int) -> Shape:
    """Buffers of whole items."""
    at = begin + 1_000 * np.arange(len(names), dtype=np.uint64)
    return Shape(tuple(names), at, nbytes, np.zeros(1, np.uint64), np.array([nbytes], np.uint64))


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 5), st.integers(1, 500), st.data())
def test_pieces_of_work_are_bounded_and_have_every_chosen_cell_once(
    pages, slots, cells_max, nbytes_max, data
):
    with (
        mock.patch.object(cells_module, "CELLS_AT_ONCE", cells_max),
        mock.patch.object(cells_module, "NBYTES_AT_ONCE", nbytes_max),
    ):
        lists_ = [
            Cells("page", 0, np.arange(pages), np.arange(pages), (plain(["k", "v"], 0, 48),)),
            Cells("slot", 1, np.arange(slots), np.arange(slots), (plain(["s"], 2_000, 99),)),
        ]
        total = sum(map(len, lists_))
        chosen = data.draw(st.sets(st.integers(0, total - 1)).map(sorted))
        read: list[tuple[int, int]] = []

        def note(addresses, offsets, sizes):
            read.extend((int(at), int(sizes.sum())) for at in addresses)
            return addresses

        ended, before = [], 0
        for some in digest(lists_, np.array(chosen, np.int64), note):
            ended += some
            piece = read[before:]
            before = len(read)
            assert len(piece) <= max(cells_max, 1)
            assert len(piece) <= 1 or sum(nbytes for _, nbytes in piece) <= nbytes_max
        assert [one.which for one in ended] == [0, 1]
        assert len(set(read)) == len(read) == len(chosen)


@pytest.mark.parametrize(
    ("digested", "sentence"),
    [
        ([(0, [0, 1, 2, 4])], "digests of page 4, and 4 were asked for"),
        ([(0, [0, 2, 1, 3])], "do not rise"),
        ([(0, [-1, 0, 1, 2])], "do not rise"),
        ([(0, [0, 1, 2])], "digests of 3 pages, and 4 pages were sent"),
        ([], "digests of 0 pages, and 4 pages were sent"),
        ([(0, [0, 1, 2, 3]), (1, [0])], "device page, and none was asked for"),
        ([(0, [0, 1, 2, 3]), (4, [0])], "one, and none was asked for|not asked for"),
        ([(0, [0, 1, 2, 3]), (99, [0])], "that was not asked for"),
        ([(0, [0, 1, 2, 3]), (5, [0])], "metadata that was not asked for"),
    ],
)
def test_a_decode_rank_takes_digests_of_nothing_else_than_it_has_asked_for(digested, sentence):
    source = RankMemory(MODEL, place(1, 0), ITEMS, full=True)
    target = RankMemory(MODEL, place(1, 0), ITEMS, full=False)
    plan = Plan(source.layout(address=1), target.layout(address=1))
    told = [(which, np.array(at)) for which, at in digested]
    with pytest.raises(ValueError, match=sentence):
        plan.cells.of_target(told, np.arange(4), sent=Sent(4, 4 * 3 * 64))


def test_metadata_that_was_asked_for_must_be_digested():
    source = RankMemory(MODEL, place(1, 0), ITEMS, full=True)
    plan = Plan(source.layout(address=1), source.layout(address=1))
    here = plan.cells.of_source(np.arange(2), np.arange(2), aux_slot=3)
    assert [one.name for one in here] == ["page", "metadata"]
    told = [(one.which, one.positions) for one in here]
    sent = Sent(2, sum(one.nbytes for one in here))
    there = plan.cells.of_target(told, np.arange(2), aux_slot=5, sent=sent)
    assert [shape.addresses.tolist() for shape in there[1].shapes] == [[1 << 40], [1 << 41]]
    assert there[1].items.tolist() == [5]
    with pytest.raises(ValueError, match="no digests of metadata"):
        plan.cells.of_target(told[:1], np.arange(2), aux_slot=5, sent=sent)


# --- whether they are all ---


@pytest.mark.slow
@given(tp_sizes, tp_sizes, moves(), st.data())
def test_whatever_a_prefill_rank_has_no_digests_of_is_missed(src_size, dst_size, moved, data):
    """A whole list, or the last of its items."""
    model = data.draw(models(src_size, dst_size))
    coords = [data.draw(st.integers(0, size - 1)) for size in (src_size, dst_size)]
    source = RankMemory(model, place(src_size, coords[0]), ITEMS, full=False)
    target = RankMemory(model, place(dst_size, coords[1]), ITEMS, full=False)
    plan = Plan(source.layout(address=1), target.layout(address=1), source.place, target.place)
    here, _ = cells_of(plan, moved)
    assume(here)
    lost = data.draw(st.integers(0, len(here) - 1))
    told = [(one.which, one.positions) for one in here]
    which, positions = told[lost]
    told[lost : lost + 1] = data.draw(st.sampled_from([[], [(which, positions[:-1])]]))
    theirs, states = lists(moved[None])[1], [lists(moved[state])[1] for state in (0, 1)]
    sent = Sent(len(theirs), blocks_of(plan, moved).total_nbytes)
    with pytest.raises(DigestsDisagree, match="were sent"):
        plan.cells.of_target(told, theirs, None, states, None, sent)


def test_state_lists_of_which_there_are_no_digests_are_named():
    model = replace(MODEL, caches=(*MODEL.caches, Cache("conv", (0, 1), (Units(4, 8),), state=1)))
    plan = Plan(*(RankMemory(model, place(1, 0), ITEMS, full=False).layout() for _ in range(2)))
    slots = np.array([2])
    here = plan.cells.of_source(np.arange(3), np.arange(3), [slots, slots], [slots, slots])
    told = [(one.which, one.positions) for one in here if one.name == "page"]
    sent = Sent(3, sum(one.nbytes for one in here))
    says = "digests of 576 bytes, and none of one, two; 640 bytes were sent"
    with pytest.raises(DigestsDisagree, match=says):
        plan.cells.of_target(told, np.arange(3), None, [slots, slots], None, sent)


def dealt_out(layout: Layout, *, on_device: bool = False, **parts: Dealt) -> Layout:
    """The second cache is its draft model's, whose pages have the tokens of all parts; the third
    one may lie on the device."""
    page, draft, device = layout.components
    of = parts["tokens_dealt"].of if "tokens_dealt" in parts else 1
    at, item, all_of_it = (
        draft.buffers.addresses,
        draft.buffers.item_nbytes,
        draft.buffers.nbytes,
    )
    larger = Buffers(at, tuple(of * one for one in item), tuple(of * one for one in all_of_it))
    drafted = structs.replace(draft, kind="draft k", rows=of * draft.rows, buffers=larger)
    components = (page, drafted, structs.replace(device, on_device=on_device))
    return structs.replace(layout, components=components, **parts)


@pytest.mark.slow
@given(st.sampled_from([1, 2, 4]), st.data())
def test_cells_are_what_is_copied_of_pages_and_tokens_that_are_dealt_out(of, data):
    """However pages, or the tokens of a page, are dealt out, and with pages on the device."""
    tokens = Cache("k", (0, 1), (Units(1, 6),), rows=4)
    model = Model((tokens, replace(tokens, kind="d"), replace(tokens, kind="e")), layers=2)
    whole = RankMemory(model, place(1, 0), 16, full=False).layout(address=1)
    part = Dealt(data.draw(st.integers(0, of - 1)), of)
    is_on_device = data.draw(st.booleans())
    if is_on_device:
        ours, theirs = dealt_out(whole, pages_dealt=part), dealt_out(whole, on_device=True)
    else:
        ours, theirs = dealt_out(whole), dealt_out(whole, tokens_dealt=part)
    plan = Plan(ours, theirs)
    numbers = np.array(data.draw(st.permutations(range(16)))[: data.draw(st.integers(0, 12))])
    pages, named = numbers.astype(np.int64), np.arange(16)[::-1]
    here = plan.cells.of_source(np.arange(len(pages)), pages)
    blocks = plan.part(pages, 0, Named(named, named if is_on_device else None))
    assert sum(one.nbytes for one in here) == blocks.total_nbytes
    told = [(one.which, one.positions) for one in here]
    count = int(owned(pages, ours.pages_dealt).sum())
    sent = Sent(count, blocks.total_nbytes)
    there = plan.cells.of_target(told, named, named if is_on_device else None, sent=sent)
    assert [one.nbytes for one in there] == [one.nbytes for one in here]
    if told:
        lost = data.draw(st.integers(0, len(told) - 1))
        with pytest.raises(DigestsDisagree, match="were sent"):
            plan.cells.of_target(
                told[:lost] + told[lost + 1 :], named, named if is_on_device else None, sent=sent
            )


def test_cells_of_rings_are_the_live_slots_that_are_copied():
    plan = Plan(ring(5), ring(6))
    ours, theirs = [np.array([2, 3, 2, 0, 2, 5])], [np.array([1, 1, 4, 0, 0, 6])]
    none = np.empty(0, np.int64)
    here = plan.cells.of_source(none, none, ours, theirs)
    sent = Sent(0, plan.state(ours, theirs).total_nbytes)
    told = [(one.which, one.positions) for one in here]
    (there,) = plan.cells.of_target(told, none, states=theirs, sent=sent)
    assert there.nbytes == sent.nbytes == 4 * 8 * 2
    with pytest.raises(DigestsDisagree, match="digests of 0 bytes, and none of dsa_tail; 64 bytes"):
        plan.cells.of_target([], none, states=theirs, sent=sent)


# --- which are chosen ---


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 500), st.integers(0, 1 << 33))
def test_both_sides_choose_the_same_rising_cells(seed, drawn, cells):
    if not drawn:
        cells = min(cells, 1000)
    chosen = np.asarray(chosen_cells(seed, drawn, cells))
    assert np.array_equal(chosen, chosen_cells(seed, drawn, cells))
    assert (chosen[1:] > chosen[:-1]).all()
    assert len(chosen) == 0 if not cells else chosen[0] >= 0 and chosen[-1] < cells
    assert len(chosen) == cells if not drawn else len(chosen) <= drawn


def test_all_cells_of_a_million_tokens_are_named_without_a_list_of_them():
    cells = 2 * 64 * 10**6
    assert sys.getsizeof(chosen_cells(7, sample_size(Verify.ALL, cells, 512 * cells), cells)) < 100


def test_every_cell_is_chosen_as_often_as_any_other():
    times = np.zeros(50)
    for seed in range(2_000):
        times[chosen_cells(seed, 10, 50)] += 1
    expected = 2_000 * (1 - (49 / 50) ** 10)
    assert abs(times - expected).max() < 5 * expected**0.5


def test_what_of_a_request_is_digested_is_bounded():
    assert sample_size(Verify.ALL, 10**7, 10**12) == 0
    assert sample_size(Verify.SAMPLE, SAMPLE_CELLS_MIN, 10**12) == 0
    assert sample_size(Verify.SAMPLE, 65, 10**3) == SAMPLE_CELLS_MIN
    assert sample_size(Verify.SAMPLE, 10**4, SAMPLE_NBYTES) == 10**4 // SAMPLE_PART
    assert sample_size(Verify.SAMPLE, 10**5, 100 * SAMPLE_NBYTES) == 1000
    assert sample_size(Verify.SAMPLE, 100, 100 * SAMPLE_NBYTES) == SAMPLE_CELLS_MIN


def test_of_sampled_requests_one_of_some_is_digested():
    assert all(is_chosen(Verify.ALL, n) for n in range(100))
    assert not any(is_chosen(Verify.OFF, n) for n in range(100))
    assert sum(is_chosen(Verify.SAMPLE, n) for n in range(100 * SAMPLE_ROOMS)) == 100
