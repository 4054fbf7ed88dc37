# SPDX-License-Identifier: Apache-2.0
"""Which rail over RDMA carries which bytes of a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from te._blocks import total
from te.links.keeper import DirectLink
from te.links.pieces import cut
from te.rails import usable
from te.striping import lanes, levelled, patience, reachable, shares, stripe

__all__ = ["divide"]


def divide(
    direct: DirectLink, blocks: npt.NDArray[np.void], distances: Sequence[int | None]
) -> tuple[npt.NDArray[np.void], npt.NDArray[Any], bytes]:
    """The blocks, shape (n,), dtype ``te.blocks.BLOCK``, maybe cut where rails meet; the pieces of
    them for the rails; and how many another rail must have waiting before each helps it.

    ``distances`` are those of the local devices from the memory. Without a rail that works all of
    them get a part, and whichever is back first takes it.
    """
    far = [distances[nic] for nic in direct.near]
    rails, ways = reachable(usable(direct.states()) or range(len(far)), far)
    least = patience(far)
    bounds = np.zeros(len(far) + 1, np.int64)
    if len(rails) == 1:
        bounds[rails[0] + 1 :] = len(blocks)
        return blocks, cut(blocks, bounds), least
    flows = direct.link.rail_flows()
    rates = direct.meter.rates(flows)
    weights = np.zeros(len(far))
    direct.turn += 1
    weights[rails] = shares(
        lanes(levelled([rates[i] for i in rails]), [float(flows[i][1]) for i in rails], ways),
        total(blocks),
        direct.turn,
    )
    stripes = stripe(blocks, weights)
    return stripes.blocks, cut(stripes.blocks, stripes.bounds), least
