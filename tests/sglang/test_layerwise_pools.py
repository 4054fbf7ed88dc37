# SPDX-License-Identifier: Apache-2.0
"""A layer that attention names by its number is that layer of the layout: on SGLang's own pools.

What goes early is all layers below the one whose attention begins. If a layout counted them in
another way, layers would go before they are written, and nobody could tell."""

from __future__ import annotations

import pytest
from sglang_pools import MODELS, Rank

from sglang_mooncake.layout import ALONE, can_go_by_layers
from sglang_mooncake.sglang.layerwise.internals import KNOWN_POOLS

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]


def is_known(rank: Rank) -> bool:
    pool = type(rank.caches.pool)
    return f"{pool.__module__}.{pool.__qualname__}" in KNOWN_POOLS


def written(rank: Rank, layer: int) -> set[int]:
    """Addresses of the buffers that attention of a layer writes."""
    pool = rank.caches.pool
    return {get(layer).data_ptr() for get in (pool.get_key_buffer, pool.get_value_buffer)}


@pytest.mark.parametrize("model", MODELS)
def test_attention_and_layout_name_layers_alike(model):
    rank = Rank(model, "prefill", ALONE, 4)
    layout = rank.layout()
    if not is_known(rank) or not can_go_by_layers(layout):
        return  # `test_which_models_may_go_layer_by_layer` says which these are
    paged = [
        (layer, address)
        for one in layout.components
        if one.state is None and not one.kind.startswith("draft ")
        for layer, address in zip(one.layers, one.buffers.addresses, strict=True)
    ]
    assert paged
    for layer, address in paged:
        assert address in written(rank, layer), f"layer {layer}"


def test_which_models_may_go_layer_by_layer():
    may = {
        model
        for model in MODELS
        if is_known(rank := Rank(model, "prefill", ALONE, 4)) and can_go_by_layers(rank.layout())
    }
    assert set(MODELS) - may == {"mxfp8", "qsa", "swa"}
