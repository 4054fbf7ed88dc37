# SPDX-License-Identifier: Apache-2.0
"""Layers of several pools, loaded together: in the model's order, each once, and none after a page
was found to be wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.objects.outcomes import Got
from kvstore.store import StillLanding
from sglang_mooncake.sglang.store.layer_loads import LayerLoads, PoolLoad, ranges

PIECES = 2


@dataclass
class Reads:
    """`kvstore.loading.Load`, of which a test says which wait finds a wrong page."""

    wrong_at: int | None = None
    wrong_at_the_end: bool = False
    begun: list[tuple[int, int]] = field(default_factory=list)
    waited: int = 0
    cancelled: bool = False

    def begin(self, first: int, end: int) -> None:
        self.begun.append((first, end))

    def wait(self, part: int) -> bool:
        assert part == self.waited, "in the order of begin"
        self.waited += 1
        return part != self.wrong_at

    def finish(self) -> list[Got]:
        is_wrong = self.wrong_at_the_end or self.wrong_at is not None
        return [Got.RIGHT, Got.CORRUPTED if is_wrong else Got.RIGHT]

    def cancel(self) -> None:
        self.cancelled = True


#: Which of two pools each layer of a model is in.
MODELS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def pools(model: list[int], *reads: Reads) -> list[PoolLoad]:
    return [
        PoolLoad(f"p{pool}", one, [at for at, of in enumerate(model) if of == pool], PIECES)
        for pool, one in enumerate(reads)
    ]


def until_wrong(model: list[int], step: int, reads: list[Reads]) -> tuple[list[int], str]:
    """The layers that came, and what was said after the last."""
    came: list[int] = []
    try:
        with LayerLoads(pools(model, *reads), len(model), step) as loads:
            layers = loads.layers()
            while True:
                came.append(next(layers))
    except LookupError as exc:
        return came, str(exc)


@given(st.integers(1, 30), st.integers(1, 9))
def test_ranges_have_each_layer_once(layers: int, step: int) -> None:
    found = ranges(layers, step)
    assert [layer for first, end in found for layer in range(first, end)] == list(range(layers))
    assert all(end - first <= step for first, end in found)


@given(MODELS, st.integers(1, 13))
def test_layers_come_in_order_and_each_piece_is_read_once(model: list[int], step: int) -> None:
    reads = Reads(), Reads()
    with LayerLoads(pools(model, *reads), len(model), step) as loads:
        assert list(loads.layers()) == list(range(len(model)))
    for pool, one in enumerate(reads):
        pieces = [piece for first, end in one.begun for piece in range(first, end)]
        assert pieces == list(range(model.count(pool) * PIECES))
        assert all(first < end for first, end in one.begun)
        assert one.waited == len(one.begun)
        assert one.cancelled


@given(MODELS, st.integers(1, 13), st.data())
def test_no_layer_is_yielded_of_a_read_that_failed(
    model: list[int], step: int, data: st.DataObject
) -> None:
    pool = data.draw(st.sampled_from(sorted(set(model))))
    parts = [(first, end) for first, end in ranges(len(model), step) if pool in model[first:end]]
    wrong_at = data.draw(st.integers(0, len(parts) - 1))
    reads = [Reads(), Reads()]
    reads[pool].wrong_at = wrong_at
    yielded, why = until_wrong(model, step, reads)
    assert why.startswith(f"1 of 2 pages of the pool p{pool} did not come: corrupted")
    assert yielded == list(range(parts[wrong_at][0]))
    assert all(one.cancelled for one in reads)


@given(MODELS, st.integers(1, 13), st.integers(0, 1))
def test_the_last_layer_waits_for_the_checksums_of_all_pools(
    model: list[int], step: int, pool: int
) -> None:
    reads = [Reads(), Reads()]
    reads[pool].wrong_at_the_end = True
    yielded, why = until_wrong(model, step, reads)
    assert f"of the pool p{pool} did not come" in why
    assert yielded == list(range(len(model) - 1))
    assert all(one.cancelled for one in reads)


class Stuck(StillLanding):
    """What goes on until it is waited for."""

    waited = False

    def __init__(self) -> None:
        super().__init__([])

    def wait(self, clock: object = None) -> None:
        self.waited = True


class StuckReads(Reads):
    """They do not stop, and nor does what `wait` reads anew."""

    def __init__(self, at_wait: bool) -> None:
        super().__init__()
        self.at_wait, self.told = at_wait, [Stuck(), Stuck()]

    def wait(self, part: int) -> bool:
        if self.at_wait:
            raise self.told[1]
        return super().wait(part)

    def cancel(self) -> None:
        super().cancel()
        raise self.told[0]


@pytest.mark.parametrize("at_wait", [True, False])
def test_nothing_lands_behind_it_though_reads_do_not_stop(at_wait: bool) -> None:
    stuck, others = StuckReads(at_wait), Reads()
    with (
        pytest.raises(StillLanding),
        LayerLoads(pools([0, 1], stuck, others), 2, 1) as loads,
    ):
        list(loads.layers())
    assert others.cancelled, "though the first one does not stop"
    assert [one.waited for one in stuck.told] == [True, at_wait]
