# SPDX-License-Identifier: Apache-2.0
"""How the caches of a rank lie in memory, and which bytes of them go where on another rank.

A `Layout` is a plain description that travels in the hello between ranks: components, each of
them one kind of cached tensor with a buffer per layer. `Plan` is the intersection of two layouts,
made once per pair of ranks; each request then only applies its index lists to it. There are no
cases: equal layouts come out as whole pages, other TP sizes as slices of heads, pipeline stages as
a choice of layers, replicas as a choice of one rank among several.
"""

from sglang_mooncake.layout.cells import (
    Cells,
    Difference,
    Digests,
    DigestsDisagree,
    bytes_of,
    differences,
    digest,
)
from sglang_mooncake.layout.chosen import Verify, chosen_cells, is_chosen, sample_size
from sglang_mooncake.layout.description import (
    ALL,
    ALONE,
    COMPLETION_BYTES,
    Buffers,
    CompletionRecord,
    Component,
    Dealt,
    Layout,
    LayoutMismatch,
    Place,
    Units,
    completion_bytes,
    without_addresses,
)
from sglang_mooncake.layout.layers import (
    EVERY_LAYER,
    Layers,
    can_go_by_layers,
    early_layers,
    layers_from,
)
from sglang_mooncake.layout.pair_cells import Sent
from sglang_mooncake.layout.plan import Named, Plan
from sglang_mooncake.layout.split import UNSPLIT, Split

__all__ = [
    "ALL",
    "ALONE",
    "COMPLETION_BYTES",
    "EVERY_LAYER",
    "UNSPLIT",
    "Buffers",
    "Cells",
    "CompletionRecord",
    "Component",
    "Dealt",
    "Difference",
    "Digests",
    "DigestsDisagree",
    "Layers",
    "Layout",
    "LayoutMismatch",
    "Named",
    "Place",
    "Plan",
    "Sent",
    "Split",
    "Units",
    "Verify",
    "bytes_of",
    "can_go_by_layers",
    "chosen_cells",
    "completion_bytes",
    "differences",
    "digest",
    "early_layers",
    "is_chosen",
    "layers_from",
    "sample_size",
    "without_addresses",
]
