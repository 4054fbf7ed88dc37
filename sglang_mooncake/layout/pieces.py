# SPDX-License-Identifier: Apache-2.0
"""Inside one item: which of its bytes one rank sends, and where they lie on either side."""

from __future__ import annotations

import numpy as np

import te
from bootstrap_server.ranks.matching import sending
from sglang_mooncake.layout.description import Component, Place

__all__ = ["pieces"]


def pieces(
    ours: Component, theirs: Component, prefill: Place, decode: Place, *, every_rank: bool = False
) -> te.Blocks:
    """The copies that bring one item's part from rank to rank; offsets stand for addresses.

    Each cut contributes the units that `matching.sending` gives to this pair, in each row. As few
    as possible: neighbours in memory of both sides are one piece.

    every_rank: replicas are no reason to leave the sending to another rank: each has other pages.
    """
    src_tp, src_size = prefill.coords.tp, prefill.topology.tp_size
    dst_tp, dst_size = decode.coords.tp, decode.topology.tp_size
    row: list[tuple[int, int, int]] = []
    src_row = dst_row = 0
    for cut in ours.cuts:
        here = ours.holding(cut, src_size, src_tp)
        there = theirs.holding(cut, dst_size, dst_tp)
        if every_rank or ours.replicated:
            sent = range(max(here.start, there.start), min(here.stop, there.stop))
            if ours.replicated and not sending(
                1, src_size, src_tp, dst_size, dst_tp, decode.coords.dp
            ):
                sent = range(0)
        else:
            sent = sending(cut.total, src_size, src_tp, dst_size, dst_tp, decode.coords.dp)
        if sent:
            row.append(
                (
                    src_row + (sent.start - here.start) * cut.nbytes,
                    dst_row + (sent.start - there.start) * cut.nbytes,
                    len(sent) * cut.nbytes,
                )
            )
        src_row += len(here) * cut.nbytes
        dst_row += len(there) * cut.nbytes
    src, dst, nbytes = np.array(row, np.int64).reshape(-1, 3).T
    rows = np.arange(ours.rows)
    return te.Blocks.grid(rows * src_row, src, rows * dst_row, dst, nbytes).merged()
