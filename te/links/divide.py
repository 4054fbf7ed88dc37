# SPDX-License-Identifier: Apache-2.0
"""Which rail over RDMA carries which bytes of a transfer."""

from __future__ import annotations

from collections.abc import Sequence

from te.blocks import Blocks
from te.links.keeper import DirectLink
from te.links.pieces import cut
from te.rails import usable
from te.striping import Lane, levelled, patience, reachable, shares, stripe

__all__ = ["divide"]


def divide(
    direct: DirectLink, blocks: Blocks, distances: Sequence[int | None]
) -> tuple[bytes, bytes]:
    """The pieces of the blocks for the rails, as ``te.links.pieces.cut`` gives them; and by rail
    how many another must have waiting before it helps that one.

    ``distances`` are those of the local devices from the memory. Without a rail that works all of
    them get a part, and whichever is back first takes it. There is at least one block.
    """
    far = tuple(distances[nic] for nic in direct.near)
    rails, ways = reachable(usable(direct.states()) or range(len(far)), far)
    flows = direct.link.rail_flows(len(far))
    rates = direct.meter.rates(flows)
    level = levelled([rates[i] for i in rails])
    lanes = [Lane(level[k], flows[i][1], ways[k]) for k, i in enumerate(rails)]
    weights = [0.0] * len(far)
    direct.turn += 1
    for i, share in zip(rails, shares(lanes, blocks.total_nbytes, direct.turn), strict=True):
        weights[i] = share
    speeds = [max(level)] * len(far)  # of a rail that is not usable now: as if it were well
    for i, rate in zip(rails, level, strict=True):
        speeds[i] = rate
    return cut(blocks, stripe(blocks, weights)), patience(far, speeds)
