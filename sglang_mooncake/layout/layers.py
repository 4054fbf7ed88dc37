# SPDX-License-Identifier: Apache-2.0
"""Which layers of the model a copy is about: a range of their numbers."""

from __future__ import annotations

from typing import TypeAlias

from sglang_mooncake.layout.description import Component, Layout
from sglang_mooncake.layout.pairing import DRAFT

__all__ = [
    "EVERY_LAYER",
    "Layers",
    "can_go_by_layers",
    "early_layers",
    "layers_from",
    "number_of",
]

#: Layer numbers [start, stop).
Layers: TypeAlias = range

#: What may be read once the whole forward is over, and not before, comes after every layer: a draft
#: model's layers from here on, and from twice as far those that have no number in the model.
_AT_END = 1 << 48
_END = 1 << 62

EVERY_LAYER = range(_END)


def layers_from(number: int) -> Layers:
    """This layer, those behind it, and what comes after every layer."""
    return range(number, _END)


def number_of(component: Component, layer: int) -> int:
    """Where this layer of a component comes in the order in which layers may be sent."""
    if component.kind.startswith(DRAFT):
        return _AT_END + layer
    return layer if component.numbered and not component.on_device else 2 * _AT_END + layer


def can_go_by_layers(layout: Layout) -> bool:
    """Whether a prefill rank with this layout can send pages some layers at a time: its layers have
    the model's own numbers, and neither pages nor tokens are dealt out."""
    paged = [one for one in layout.components if one.state is None]
    numbers = [number_of(one, layer) for one in paged for layer in one.layers]
    return (
        layout.pages_dealt.of == layout.tokens_dealt.of == 1
        and any(number < _AT_END for number in numbers)
        and all(number < 2 * _AT_END for number in numbers)
    )


def early_layers(layout: Layout) -> frozenset[int]:
    """The layers that need not wait for the end of a forward."""
    paged = (one for one in layout.components if one.state is None)
    numbers = {number_of(one, layer) for one in paged for layer in one.layers}
    return frozenset(number for number in numbers if number < _AT_END)
