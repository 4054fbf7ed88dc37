# SPDX-License-Identifier: Apache-2.0
"""Random layouts, pages and prefixes, moved by real engines in one process: what the decode rank's
memory holds afterwards is what the oracle says, to the last byte inside and outside the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from caches import CANARY, RankMemory, models, pairings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from te_transports import TRANSPORTS

import te
from bootstrap_server import Topology
from bootstrap_server.ranks.matching import CPTransfer, Source, sources
from sglang_mooncake.layout import Place, Plan

ITEMS, WAIT_S = 8, 60.0
# The kernel's siw sends wrong bytes of small blocks that lie across two pages of its memory: 383 of
# 3,600 that did, and none of 3,600 that did not. Where these blocks lie is chance.
ON_RXE = [pytest.mark.driver("rxe"), pytest.mark.by_turns("rxe")]
OVER = [
    pytest.param(*one.values, marks=[*one.marks, *(ON_RXE if one.marks else [])])
    for one in TRANSPORTS
]
TP_SIZES = st.sampled_from([1, 2, 3, 4, 6])


@dataclass
class Pair:
    source: te.Engine
    target: te.Engine
    peer: te.Peer
    tag: int = 0

    def move(self, blocks: te.Blocks) -> None:
        self.peer.write(blocks, tag=self.tag).wait(timeout_s=WAIT_S)


@pytest.fixture(scope="module", params=OVER)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config = te.Config(
        transports=(request.param,), segment_blocks=5, segment_bytes=64, stall_timeout_s=WAIT_S
    )
    with te.Engine(config) as source, te.Engine(config) as target:
        yield Pair(source, target, source.connect(target.card()))


def register(engine: te.Engine, memory: RankMemory) -> list[te.Region]:
    """Buffer by buffer, as a rank does: a block that left its buffer would be refused."""
    return [engine.register(array.reshape(-1)) for array in memory.arrays.values()]


@dataclass
class Request:
    """(source item, target item) pairs of the pages that the decode rank lacks, in the chunks in
    which prefill computes them, and of each state."""

    pages: list[tuple[int, int]]
    states: list[list[tuple[int, int]]]
    cuts: list[int]

    @property
    def moved(self) -> dict[int | None, list[tuple[int, int]]]:
        return {None: self.pages, 0: self.states[0], 1: self.states[1]}

    def blocks(self, asked: Source, plan: Plan) -> Iterator[te.Blocks]:
        bounds = [0, *self.cuts, len(self.pages)]
        for begin, end in itertools.pairwise(bounds):
            mine = asked.pages.within(range(begin, end), len(self.pages))
            chunk = self.pages[mine.start : mine.stop]
            yield plan.kv([source for source, _ in chunk], [target for _, target in chunk])
        if asked.state:
            yield plan.state(
                *[[[pair[side] for pair in state] for state in self.states] for side in (0, 1)]
            )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    pages = draw(pairings(ITEMS))
    prefix = draw(st.integers(0, len(pages)))  # what decode holds already is in neither list
    states = [draw(pairings(ITEMS)) for _ in range(2)]
    cuts = draw(st.lists(st.integers(0, len(pages) - prefix), max_size=3).map(sorted))
    return Request(pages[prefix:], states, cuts)


@pytest.mark.slow
@given(
    TP_SIZES,
    TP_SIZES,
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    st.sampled_from([(1, CPTransfer.FIRST), (2, CPTransfer.FIRST), (3, CPTransfer.PAGES)]),
    requests(),
    st.data(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_arrives_is_what_the_oracle_says(
    pair, src_size, dst_size, stages, context, request_, data
):
    model = data.draw(models(src_size, dst_size))
    prefill = Topology(1, context[0], src_size, stages[0])
    decode = Topology(2, 1, dst_size, stages[1])
    coords = data.draw(st.sampled_from(list(decode.coords())))
    target = RankMemory(model, Place(decode, coords), ITEMS, full=False)
    regions = [(pair.target, region) for region in register(pair.target, target)]
    pair.tag += 1
    pair.target.expect(pair.tag)
    for asked in sources(prefill, decode, coords, 0, context[1]):
        source = RankMemory(model, Place(prefill, asked.coords), ITEMS, full=True)
        regions += [(pair.source, region) for region in register(pair.source, source)]
        plan = Plan(source.layout(), target.layout(), source.place, target.place)
        for blocks in request_.blocks(asked, plan):
            pair.move(blocks)
    pair.target.fence(pair.tag)
    for engine, region in regions:
        engine.deregister(region)
    expected = target.expect(request_.moved)
    np.testing.assert_array_equal(target.base, expected)
    untouched = target.expect({})
    assert (untouched == CANARY).all()
