# SPDX-License-Identifier: Apache-2.0
"""Which prefill ranks the decode ranks of a topology will connect to, for the status page. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

from bootstrap_server.ranks.errors import MismatchError
from bootstrap_server.ranks.matching import dealt_over, sources
from bootstrap_server.ranks.rank_status import Axes
from bootstrap_server.ranks.records import InstanceConfig, RankCoords, Topology

__all__ = ["PAIRS_MAX", "planned"]

#: Of larger topologies no plan is made: a rank can report any, and making one of this many pairs
#: takes 0.1 s.
PAIRS_MAX: Final = 1 << 15

#: (cp, tp, pp) of prefill ranks.
_Places: TypeAlias = tuple[tuple[int, int, int], ...]


def planned(prefill: InstanceConfig, decode: Axes) -> dict[str, object]:
    """The plan for decode ranks of a topology, as the page takes it: for each (tp, pp) of a decode
    rank, the (cp, tp, pp) of those that it asks in every prefill DP group. `problem` says why there
    is no plan."""
    # Pages that are dealt out over CP ranks reach every CP rank anyway.
    every_tp_rank = dealt_over(prefill) > 1 and prefill.topology.cp_size == 1
    return _plan(prefill.topology, decode, every_tp_rank)


@lru_cache(maxsize=64)
def _plan(topology: Topology, decode: Axes, every_tp_rank: bool) -> dict[str, object]:
    asking = decode[2] * decode[3]
    plan: dict[str, object] = {"topology": decode, "asked": [], "problem": None}
    if asking * topology.ranks > PAIRS_MAX * topology.dp_size:
        plan["problem"] = f"more than {PAIRS_MAX} pairs of ranks"
        return plan
    try:
        plan["asked"] = [
            (tp, pp, _asked(topology, Topology(*decode), tp, pp, every_tp_rank))
            for tp in range(decode[2])
            for pp in range(decode[3])
        ]
    except (MismatchError, ValueError) as error:
        plan["problem"] = str(error)
    return plan


def _asked(prefill: Topology, decode: Topology, tp: int, pp: int, every_tp_rank: bool) -> _Places:
    # Whom a decode rank asks depends on neither side's DP rank (matching.sources).
    found = sources(
        prefill, decode, RankCoords(0, 0, tp, pp), prefill_dp_rank=0, every_tp_rank=every_tp_rank
    )
    return tuple((source.coords.cp, source.coords.tp, source.coords.pp) for source in found)
