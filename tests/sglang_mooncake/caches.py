# SPDX-License-Identifier: Apache-2.0
"""Models made up for tests, the memory of their ranks, and the oracle that says what every byte of
it must be: a function of (kind, layer, item, row, cut, unit, byte), whichever rank stores it.

Written against the meaning of `Component` alone: units, not addresses, decide what a byte is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import te
from bootstrap_server import RankCoords, Topology
from bootstrap_server.ranks.matching import holding
from sglang_mooncake.layout import (
    COMPLETION_BYTES,
    Buffers,
    Component,
    Layout,
    Place,
    Units,
)

CANARY = 0xEE
AUX = Buffers((1 << 40, 1 << 41), (64, 8), (640, 80))
COMPLETIONS = Buffers((1 << 42,), (COMPLETION_BYTES,), (10 * COMPLETION_BYTES,))


@dataclass(frozen=True)
class Cache:
    """One kind of tensor of a model: all layers, all units."""

    kind: str
    layers: tuple[int, ...]
    cuts: tuple[Units, ...]
    rows: int = 1
    state: int | None = None

    def on(self, place: Place, layers_of: range) -> tuple[int, ...]:
        """The layers that a pipeline stage stores."""
        return tuple(layer for layer in self.layers if layer in layers_of)

    def held(self, place: Place) -> list[range]:
        return [holding(cut.total, place.topology.tp_size, place.coords.tp) for cut in self.cuts]

    def item_bytes(self, place: Place) -> list[tuple[int, int, int, int]]:
        """(row, cut, unit, byte) of each byte of an item, in memory order."""
        return [
            (row, at, unit, byte)
            for row in range(self.rows)
            for at, (cut, units) in enumerate(zip(self.cuts, self.held(place), strict=True))
            for unit in units
            for byte in range(cut.nbytes)
        ]


@dataclass(frozen=True)
class Model:
    caches: tuple[Cache, ...]
    layers: int
    page_size: int = 4
    states: tuple[str, ...] = ()

    def stage(self, place: Place) -> range:
        size = place.topology.pp_size
        return range(
            place.coords.pp * self.layers // size, (place.coords.pp + 1) * self.layers // size
        )


def value(
    kind: str, layer: int, items: npt.NDArray[np.uint64], inside: list[tuple[int, int, int, int]]
) -> npt.NDArray[np.uint8]:
    """f: what these bytes of these items hold, shape (items, bytes)."""
    salt = np.uint64(sum(ord(letter) * 31**at for at, letter in enumerate(kind)) * 257 + layer)
    weights = np.array([1_000_003, 8_191, 131_071, 524_287], np.uint64)
    place = (np.array(inside, np.uint64).reshape(-1, 4) * weights).sum(axis=1)
    with np.errstate(over="ignore"):
        mixed = (items[:, None] * np.uint64(2_654_435_761) + place + salt) * np.uint64(
            0x9E3779B97F4A7C15
        )
    # Never the canary: what was written must differ from what was not.
    return ((mixed >> np.uint64(40)) % np.uint64(CANARY)).astype(np.uint8)


@dataclass
class RankMemory:
    """What one rank stores of a model; a prefill rank's is full of oracle, a decode rank's of
    canaries. Buffers are apart by a gap, so that nothing merges across them by chance."""

    model: Model
    place: Place
    items: int
    full: bool
    arrays: dict[tuple[str, int], npt.NDArray[np.uint8]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [
            (cache, layer, len(cache.item_bytes(self.place)))
            for cache in self.model.caches
            for layer in cache.on(self.place, self.model.stage(self.place))
        ]
        self.base = np.full(sum(n * self.items + 64 for _, _, n in sizes) + 64, CANARY, np.uint8)
        at = 64
        for cache, layer, nbytes in sizes:
            view = self.base[at : at + nbytes * self.items].reshape(self.items, nbytes)
            self.arrays[cache.kind, layer] = view
            if self.full:
                everything = np.arange(self.items, dtype=np.uint64)
                view[:] = value(cache.kind, layer, everything, cache.item_bytes(self.place))
            at += nbytes * self.items + 64

    def layout(self, completions: Buffers = COMPLETIONS, address: int | None = None) -> Layout:
        """With `address`, as if the memory lay there."""
        shift = 0 if address is None else address - self.base.ctypes.data
        return Layout(
            page_size=self.model.page_size,
            dtype="bfloat16",
            kv_layout=None,
            components=tuple(
                self._component(cache, shift)
                for cache in self.model.caches
                if cache.on(self.place, self.model.stage(self.place))
            ),
            aux=AUX,
            completions=completions,
            states=self.model.states,
        )

    def _component(self, cache: Cache, shift: int) -> Component:
        layers = cache.on(self.place, self.model.stage(self.place))
        arrays = [self.arrays[cache.kind, layer] for layer in layers]
        return Component(
            kind=cache.kind,
            layers=layers,
            buffers=Buffers(
                tuple(array.ctypes.data + shift for array in arrays),
                tuple(array.shape[1] for array in arrays),
                tuple(array.nbytes for array in arrays),
            ),
            cuts=cache.cuts,
            rows=cache.rows,
            state=cache.state,
        )

    def expect(self, moved: dict[int | None, list[tuple[int, int]]]) -> npt.NDArray[np.uint8]:
        """The whole memory as it must be once all prefill ranks have sent: `moved` has the
        (source item, target item) pairs of each index list."""
        expected = np.full_like(self.base, CANARY)
        for (kind, layer), array in self.arrays.items():
            cache = next(cache for cache in self.model.caches if cache.kind == kind)
            at = array.ctypes.data - self.base.ctypes.data
            view = expected[at : at + array.nbytes].reshape(array.shape)
            for source, target in moved.get(cache.state, []):
                view[target] = value(
                    kind, layer, np.array([source], np.uint64), cache.item_bytes(self.place)
                )
        return expected


def copy(blocks: te.Blocks, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    """What a transfer does, with addresses as offsets + 1 into the arrays."""
    for src, dst, nbytes in blocks.array.tolist():
        assert 0 < src <= source.size - nbytes + 1
        assert 0 < dst <= target.size - nbytes + 1
        target[dst - 1 : dst - 1 + nbytes] = source[src - 1 : src - 1 + nbytes]


def fewest(blocks: te.Blocks) -> int:
    """How few blocks can make the same copies: a byte needs a block of its own unless the copy of
    the byte before it, on both sides, is made as well."""
    copied = {
        (src + byte, dst + byte)
        for src, dst, nbytes in blocks.array.tolist()
        for byte in range(nbytes)
    }
    assert len(copied) == blocks.total_nbytes, "a byte is copied twice"
    return sum((src - 1, dst - 1) not in copied for src, dst in copied)


def place(tp_size: int, tp: int, pp_size: int = 1, pp: int = 0, dp: int = 0, dps: int = 1) -> Place:
    return Place(Topology(dps, 1, tp_size, pp_size), RankCoords(dp, 0, tp, pp))


@st.composite
def models(draw: st.DrawFn, *tp_sizes: int) -> Model:
    """A model whose units can be dealt out to so many ranks."""

    def units(nbytes: int) -> Units:
        fits = [
            total
            for total in (1, 2, 3, 4, 6, 8, 12, 16, 64)
            if all(total % size == 0 or size % total == 0 for size in tp_sizes)
        ]
        return Units(draw(st.sampled_from(fits)), draw(st.integers(1, nbytes)))

    layers = draw(st.integers(1, 4))
    caches = []
    for at in range(draw(st.integers(1, 3))):
        rows = draw(st.sampled_from([1, 2, 4]))
        cuts = tuple(units(6) for _ in range(draw(st.integers(1, 3))))
        some = draw(st.lists(st.integers(0, layers - 1), min_size=1, unique=True))
        state = draw(st.sampled_from([None, None, 0, 1]))
        caches.append(Cache(f"cache {at}", tuple(sorted(some)), cuts, rows, state))
    return Model(tuple(caches), layers, states=("one", "two"))


@st.composite
def pairings(draw: st.DrawFn, items: int) -> list[tuple[int, int]]:
    """Which item goes to which: no target twice, often neighbours on both sides."""
    count = draw(st.integers(0, items))
    targets = draw(st.permutations(range(items)))[:count]
    sources = draw(st.permutations(range(items)))[:count]
    if draw(st.booleans()):
        targets = sorted(targets)
    if draw(st.booleans()):
        sources = sorted(sources)
    return list(zip(sources, targets, strict=True))
