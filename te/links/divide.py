# SPDX-License-Identifier: Apache-2.0
"""Which rail over RDMA carries which bytes of a transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from te._blocks import total
from te.links.keeper import DirectLink
from te.links.pieces import cut
from te.rails import usable
from te.striping import lanes, levelled, shares, stripe

__all__ = ["divide"]


def divide(
    direct: DirectLink, blocks: npt.NDArray[np.void]
) -> tuple[npt.NDArray[np.void], npt.NDArray[Any]]:
    """The blocks, shape (n,), dtype ``te.blocks.BLOCK``, maybe cut where rails meet; and the pieces
    of them for the rails.

    Without a rail that works all of them get a part, and whichever is back first takes it.
    """
    rails = usable(direct.states()) or tuple(range(len(direct.rails)))
    bounds = np.zeros(len(direct.rails) + 1, np.int64)
    if len(rails) == 1:
        bounds[rails[0] + 1 :] = len(blocks)
        return blocks, cut(blocks, bounds)
    flows = direct.link.rail_flows()
    rates = direct.meter.rates(flows)
    weights = np.zeros(len(direct.rails))
    direct.turn += 1
    weights[list(rails)] = shares(
        lanes(levelled([rates[i] for i in rails]), [float(flows[i][1]) for i in rails]),
        total(blocks),
        direct.turn,
    )
    stripes = stripe(blocks, weights)
    return stripes.blocks, cut(stripes.blocks, stripes.bounds)
