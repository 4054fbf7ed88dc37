# SPDX-License-Identifier: Apache-2.0
"""Which layers of a layout may go before the others, and what a plan keeps for the end."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from caches import Cache, Model, RankMemory

from sglang_mooncake.layout import (
    ALONE,
    EVERY_LAYER,
    Component,
    Dealt,
    Layout,
    Named,
    Plan,
    Units,
    can_go_by_layers,
    layers_from,
)

#: The numbers have gaps, as where some layers of a model have no cache.
NUMBERS = (1, 4, 9)
WHOLE = (Units(1, 8),)
ITEMS, SOURCES, TARGETS = 8, np.array([2, 5]), np.array([6, 1])


def layout(*more: Cache, address: int = 1, **changes: object) -> Layout:
    model = Model((Cache("k", NUMBERS, WHOLE), *more), layers=10, states=("one",))
    made = RankMemory(model, ALONE, ITEMS, full=False).layout(address=address)
    return msgspec.structs.replace(made, **changes)


def changed(made: Layout, which: str, **changes: object) -> Layout:
    """With changes of the components whose kind is `which`."""

    def after(one: Component) -> Component:
        return msgspec.structs.replace(one, **changes) if one.kind == which else one

    return msgspec.structs.replace(made, components=tuple(map(after, made.components)))


def rows(plan: Plan, layers: range) -> list[tuple[int, int, int]]:
    return sorted(plan.part(SOURCES, 0, Named(TARGETS), layers).array.tolist())


@pytest.mark.parametrize(
    ("made", "can"),
    [
        (layout(), True),
        (layout(Cache("draft k", (0,), WHOLE)), True),
        (layout(Cache("window", (0,), WHOLE, state=0)), True),
        (changed(layout(), "k", numbered=False), False),
        (changed(layout(Cache("index", (1,), WHOLE)), "index", numbered=False), False),
        (changed(layout(Cache("index", (1,), WHOLE)), "index", on_device=True), False),
        (changed(layout(), "k", kind="draft k"), False),
        (changed(layout(), "k", state=0), False),
        (layout(pages_dealt=Dealt(1, 2)), False),
        (layout(tokens_dealt=Dealt(0, 2)), False),
    ],
    ids=[
        "numbered",
        "a draft model",
        "state",
        "no numbers",
        "some without numbers",
        "on the device",
        "a draft model alone",
        "state alone",
        "pages dealt out",
        "tokens dealt out",
    ],
)
def test_a_rank_knows_whether_its_layers_can_go_one_by_one(made, can):
    assert can_go_by_layers(made) is can


def test_layers_go_by_the_models_numbers():
    plan = Plan(layout(), layout())
    counts = {layers: plan.layer_count(layers) for layers in (range(1), range(2), range(2, 9))}
    assert counts == {range(1): 0, range(2): 1, range(2, 9): 1}
    assert rows(plan, range(5, 9)) == []
    first, rest = (rows(plan, layers) for layers in (range(5), range(5, 10)))
    assert (len(first), len(rest)) == (2 * 2, 2)
    assert sorted(first + rest) == rows(plan, EVERY_LAYER)


def test_a_draft_models_layers_come_last_whatever_their_numbers():
    """A draft model's layer 0 is filled once the model's own forward is over."""
    with_draft = layout(Cache("draft k", (0,), WHOLE))
    plan = Plan(with_draft, with_draft)
    assert plan.layer_count() == len(NUMBERS) + 1
    early, late = rows(plan, range(10)), rows(plan, layers_from(10))
    first = with_draft.components[1].buffers.addresses[0]
    assert (len(early), len(late)) == (6, 2)
    assert all(source >= first for source, _, _ in late)
    assert sorted(early + late) == rows(plan, EVERY_LAYER)


def test_state_is_never_a_layer():
    both = layout(Cache("window", (1,), WHOLE, state=0))
    plan = Plan(both, both)
    assert plan.layer_count() == len(NUMBERS)
    assert rows(plan, EVERY_LAYER) == rows(Plan(layout(), layout()), EVERY_LAYER)


def test_layers_that_decode_numbers_otherwise_go_by_prefills_numbers():
    theirs = changed(layout(), "k", numbered=False, layers=(0, 1, 2))
    plan, alike = Plan(layout(), theirs), Plan(layout(), layout())
    for layers in (range(2), range(2, 5), layers_from(5)):
        assert rows(plan, layers) == rows(alike, layers)


def test_pages_that_are_cut_into_tokens_go_whole():
    tokens = {"rows": 4, "cuts": (Units(1, 2),)}
    theirs = layout(tokens_dealt=Dealt(0, 2))
    by_row = Plan(changed(layout(), "k", **tokens), changed(theirs, "k", **tokens))
    assert not by_row.by_layers
    assert Plan(layout(), layout()).by_layers
    with pytest.raises(ValueError, match="go with all their layers"):
        by_row.part(SOURCES, 0, Named(TARGETS), range(5))
    assert len(by_row.part(SOURCES, 0, Named(TARGETS)))
