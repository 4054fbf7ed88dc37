# SPDX-License-Identifier: Apache-2.0
"""A plan for rules without memory: each layer of a page is one block, and so is the metadata. A
block's target address says which position of the room and which layer it is."""

from __future__ import annotations

import numpy as np

import te
from sglang_mooncake.layout import EVERY_LAYER

__all__ = ["AUX_NBYTES", "LAYERS", "LAYER_NBYTES", "PlainPlan", "places_of", "plan_of"]

LAYERS, LAYER_NBYTES, AUX_NBYTES = 4, 10, 7
_AUX_ADDRESS = 1 << 40
_POSITION = 1 << 16


class PlainPlan:
    def __init__(self, layers=LAYERS):
        self.layers = layers

    @property
    def cells(self):
        return self

    def of_source(self, *_):
        """No digest is made of them."""
        return ()

    def known(self, layers):
        return range(layers.start, min(layers.stop, self.layers))

    def layer_count(self, layers=EVERY_LAYER):
        return len(self.known(layers))

    def part(self, pages, first, named, layers=EVERY_LAYER):
        del named
        if len(pages) and int(np.min(pages)) < 0:
            raise ValueError(f"page {np.min(pages)}")
        known = self.known(layers)
        source = [1 + int(page) for page in pages for _ in known]
        target = [(first + at) * _POSITION + layer for at in range(len(pages)) for layer in known]
        return te.Blocks.of(source, target, [LAYER_NBYTES] * len(source))

    def state(self, source_indices, target_indices):
        del source_indices, target_indices
        return te.Blocks.of([], [], [])

    def aux(self, source_slot, target_slot):
        return te.Blocks.of([1 + source_slot], [_AUX_ADDRESS + target_slot], [AUX_NBYTES])


def plan_of(peer, layers=LAYERS):
    """The plan of any peer."""
    del peer
    return PlainPlan(layers)


def places_of(write):
    """(position, layer) → page, of what a write brings."""
    array = write.blocks.array
    return {
        (int(at) // _POSITION, int(at) % _POSITION): int(page) - 1
        for page, at in zip(array["src"], array["dst"], strict=True)
        if at < _AUX_ADDRESS
    }
