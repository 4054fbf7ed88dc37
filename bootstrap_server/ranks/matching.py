# SPDX-License-Identifier: Apache-2.0
"""Decode rank d, which prefill ranks send you what? Pure functions, no I/O.

**TP.** A cache of `units` equal pieces (KV heads, Mamba head shards; an MLA latent is 1 unit)
lies on the line 0..1; rank r of n covers r/n..(r+1)/n of it and stores the units that it
touches: whole shares when the units divide, one replicated unit when there are more ranks than
units. A decode rank therefore finds everything it stores on the prefill ranks whose intervals
overlap its own, whatever the number of units. So *whom to ask* (`sources`) follows from the two
topologies alone, and registration need not say how many heads a model has; *which units a pair
moves* (`sending`) is computed per component by whoever knows its units.

**Every prefill rank is asked.** SGLang opens a sender for a room on each rank of the prefill
DP group (on each PP stage, CP rank and replica), and each waits to be asked. Overlap reaches all
TP ranks; sources that have nothing to send are asked all the same (`Source.pages` is empty).

**Replicas** hold the same unit. Who sends it turns with the decode rank's DP rank, so that the
decode ranks of an instance load all replicas alike.

Which pairs SGLang 0.5.23 serves itself: `disaggregation/common/conn.py`,
`CommonKVManager._resolve_rank_mapping`. Beyond it, TP sizes of which none divides the other.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import msgspec

from bootstrap_server.ranks.errors import MismatchError, Why
from bootstrap_server.ranks.records import FLAGS, InstanceConfig, KVFormat, RankCoords, Topology

__all__ = [
    "CPTransfer",
    "PageShare",
    "Source",
    "check_configs",
    "check_formats",
    "cp_transfer",
    "dealt_over",
    "holding",
    "prefill_dp_rank",
    "sending",
    "sources",
]

#: Values of `InstanceConfig` that must be equal on both sides beside the format. Load balancing
#: is missing on purpose: it is the prefill router's affair.
_EQUAL_POLICIES = ("decode_allocation_policy", "dsv41_spec_layout")
#: By the name of a value: what kind of difference it makes.
_WHY = {
    "protocol": Why.RELEASE,
    "model": Why.MODEL,
    "page_size": Why.PAGE_SIZE,
    "kv_cache_dtype": Why.DTYPE,
    "kv_layout": Why.LAYOUT,
    "tp_size": Why.TOPOLOGY,
    "dcp_size": Why.TOPOLOGY,
}


class CPTransfer(enum.Enum):
    """How the CP ranks of a prefill instance share the sending.

    Prefill CP gathers the KV of a chunk before it is stored, so that each CP rank holds all
    pages (SGLang's `mem_cache/page_interleave.py`, `get_kv_shard_group`).
    """

    #: CP rank 0 sends everything.
    FIRST = "first"
    #: Each CP rank sends its share of the pages, CP rank 0 all state
    #: (SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER).
    PAGES = "pages"
    #: Each CP rank sends the layers that it alone stores (--enable-dsa-cache-layer-split).
    LAYERS = "layers"
    #: Each CP rank sends the pages that it alone stores, KV and state: which, their numbers tell
    #: the prefill side (--enable-kv-cache-sharding).
    NUMBERS = "numbers"


class PageShare(msgspec.Struct, frozen=True):
    """Part `index` of `of` almost equal contiguous parts of a request's pages; `of` 0 is no page.

    Pages are counted as the prefill side sends them, from the first one that decode lacks.
    """

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < max(self.of, 1):
            raise ValueError(f"there is no part {self.index} of {self.of} parts of the pages")

    def bounds(self, total: int) -> range:
        """Which of a request's `total` pages belong to this part.

        The first `total % of` parts have one page more, as SGLang cuts them
        (`disaggregation/utils.py`, `_get_cp_rank_page_bounds`).
        """
        if self.of == 0:
            return range(0)
        least, larger = divmod(total, self.of)
        first = self.index * least + min(self.index, larger)
        return range(first, first + least + (self.index < larger))

    def within(self, chunk: range, total: int) -> range:
        """Which pages of `chunk`, a contiguous part of a request's `total` pages, are in it."""
        mine = self.bounds(total)
        first = min(max(chunk.start, mine.start), chunk.stop)
        return range(first, max(first, min(chunk.stop, mine.stop)))


ALL_PAGES = PageShare(0, 1)
NO_PAGES = PageShare(0, 0)


class Source(msgspec.Struct, frozen=True):
    """One prefill rank that a decode rank asks for each room, and what it asks for.

    `destinations` is how many ranks of the decode DP group ask this prefill rank: it waits for
    so many requests for a room. `aux`: send SGLang's metadata of the request (one source of
    each decode rank does). `state`: send per-request state (Mamba, SWA …). `pages`: which of
    the request's pages to send. Which units of a component is `sending`'s answer.
    """

    coords: RankCoords
    destinations: int
    aux: bool
    state: bool
    pages: PageShare


def check_formats(prefill: KVFormat, decode: KVFormat, flags: Mapping[str, str] = FLAGS) -> None:
    """Raise `MismatchError` unless KV bytes mean the same on both sides. `flags`: of the server,
    behind each value.

    `kv_layout` is compared strictly (None is a layout of its own): both sides run the same
    model, so a side without a name for its layout uses another kind of pool.
    """
    for name in KVFormat.__struct_fields__:
        _check_equal(name, getattr(prefill, name), getattr(decode, name), flags)


def check_configs(
    prefill: InstanceConfig, decode: InstanceConfig, flags: Mapping[str, str] = FLAGS
) -> None:
    """Raise `MismatchError` unless the two instances can hand over KV. `flags`: of the server,
    behind each value.

    Covers the release, the model, formats and policies; the topologies are `sources`' affair.
    """
    # First what explains the rest: other releases may mean other things by the same names.
    _check_equal("protocol", prefill.protocol, decode.protocol, flags)
    if prefill.model and decode.model:
        _check_equal("model", prefill.model, decode.model, flags)
    check_formats(prefill.format, decode.format, flags)
    for name in _EQUAL_POLICIES:
        _check_equal(name, getattr(prefill, name), getattr(decode, name), flags)
    _check_dcp(prefill, decode)


def _check_dcp(prefill: InstanceConfig, decode: InstanceConfig) -> None:
    """Tokens that decode deals out come from a prefill server that deals them out alike, or not at
    all; then it must hold whole pages (SGLang's `try_ensure_parallel_info`)."""
    if decode.dcp_size == prefill.dcp_size:
        if decode.dcp_size > 1:
            _check_equal("tp_size", prefill.topology.tp_size, decode.topology.tp_size)
    elif prefill.dcp_size > 1:
        _check_equal("dcp_size", prefill.dcp_size, decode.dcp_size)
    if decode.dcp_size > 1 and (prefill.topology.cp_size > 1 or prefill.enable_kv_cache_sharding):
        raise MismatchError(
            f"dcp_size is {decode.dcp_size} on decode, while prefill has cp_size "
            f"{prefill.topology.cp_size} and enable_kv_cache_sharding "
            f"{prefill.enable_kv_cache_sharding}: start decode without {FLAGS['dcp_size']}, or "
            f"prefill without {FLAGS['cp_size']} and {FLAGS['enable_kv_cache_sharding']}"
        )


def cp_transfer(prefill: InstanceConfig, all_cp_ranks: bool) -> CPTransfer:
    """How the CP ranks of `prefill` share the sending.

    `all_cp_ranks` is what the decode side was told
    (SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER) or needs (a hybrid MLA model).
    """
    if prefill.enable_dsa_cache_layer_split:
        return CPTransfer.LAYERS
    if prefill.enable_kv_cache_sharding and prefill.topology.cp_size > 1:
        return CPTransfer.NUMBERS
    return CPTransfer.PAGES if all_cp_ranks else CPTransfer.FIRST


def dealt_over(prefill: InstanceConfig) -> int:
    """Over how many ranks of `prefill` each cache of KV pages is dealt out by their numbers: its CP
    ranks, or without CP the TP ranks, as these would hold MLA latents alike (SGLang's
    `mem_cache/page_interleave.py`, `get_kv_shard_group`)."""
    if not prefill.enable_kv_cache_sharding:
        return 1
    sizes = prefill.topology
    return sizes.cp_size if sizes.cp_size > 1 else sizes.tp_size


def holding(units: int, tp_size: int, tp: int, what: str = "KV heads") -> range:
    """Which of the `units` pieces of a component (`what`, for sentences) TP rank `tp` stores.

    A share of `units / tp_size` of them, or, with more ranks than units, the one that it stores
    along with its neighbours. Raises `MismatchError` when neither number divides the other.
    """
    if not (units >= 1 and 0 <= tp < tp_size):
        raise ValueError(f"tp rank {tp} of {tp_size} cannot hold any of {units} {what}")
    if units % tp_size == 0:
        share = units // tp_size
        return range(tp * share, (tp + 1) * share)
    if tp_size % units == 0:
        unit = tp * units // tp_size
        return range(unit, unit + 1)
    raise MismatchError(
        f"{units} {what} cannot be laid out over an attention TP size of {tp_size}: neither "
        f"number divides the other ({FLAGS['tp_size']})"
    )


def sending(
    units: int,
    prefill_tp_size: int,
    p: int,
    decode_tp_size: int,
    d: int,
    turn: int = 0,
    what: str = "KV heads",
) -> range:
    """The units that prefill TP rank `p` sends to decode TP rank `d`: contiguous, maybe none.

    Over all `p` these are exactly `holding(units, decode_tp_size, d)`, each unit once, and a
    rank that is not among `sources` has none. `turn` is the DP rank of the decode rank: it
    turns the choice among prefill ranks that hold the same unit. Raises as `holding` does.
    """
    mine = holding(units, prefill_tp_size, p, what)
    wanted = holding(units, decode_tp_size, d, what)
    first = max(mine.start, wanted.start)
    common = range(first, max(first, min(mine.stop, wanted.stop)))
    if units < prefill_tp_size and common:
        chosen = _replica(units, common.start, prefill_tp_size, decode_tp_size, d, turn)
        return common if p == chosen else range(first, first)
    return common


def _replica(
    units: int, unit: int, prefill_tp_size: int, decode_tp_size: int, d: int, turn: int
) -> int:
    """Which of the prefill TP ranks that hold `unit` and overlap decode TP rank `d` sends it.

    The line 0..1 is cut so finely that every rank of both sides covers whole cells; each turn
    takes another cell of the overlap, in an order that spreads the turns over the ranks.
    """
    cells = math.lcm(prefill_tp_size, decode_tp_size)
    of_p, of_d, of_unit = cells // prefill_tp_size, cells // decode_tp_size, cells // units
    first = max(d * of_d, unit * of_unit)
    overlap = min((d + 1) * of_d, (unit + 1) * of_unit) - first
    return (first + turn * of_p % overlap) // of_p


def sources(
    prefill: Topology,
    decode: Topology,
    coords: RankCoords,
    prefill_dp_rank: int,
    cp: CPTransfer = CPTransfer.FIRST,
    every_tp_rank: bool = False,
) -> tuple[Source, ...]:
    """The prefill ranks that the decode rank at `coords` asks for a room, in ascending order.

    `every_tp_rank`: each prefill TP rank has pages for each decode rank (`dealt_over`).
    `prefill_dp_rank` is the prefill DP rank that serves the request. Raises `MismatchError` for
    a pair of topologies that cannot be served, `ValueError` for `coords` outside `decode`.
    """
    decode.check(coords)
    _check_dp_rank(prefill, prefill_dp_rank)
    _check_axes(prefill, decode)
    stages = range(prefill.pp_size) if decode.pp_size == 1 else range(coords.pp, coords.pp + 1)
    # SGLang fills the metadata of a request on every stage, on the last one first.
    aux_place = (
        0,
        _replica(1, 0, prefill.tp_size, decode.tp_size, coords.tp, coords.dp),
        stages[-1],
    )
    found: list[Source] = []
    for cp_rank in range(prefill.cp_size):
        pages, state = _cp_part(cp, cp_rank, prefill.cp_size)
        asked = range(prefill.tp_size)
        if not every_tp_rank:
            asked = _overlapping(decode.tp_size, coords.tp, prefill.tp_size)
        for p in asked:
            destinations = decode.tp_size
            if not every_tp_rank:
                destinations = len(_overlapping(prefill.tp_size, p, decode.tp_size))
            for stage in stages:
                place = RankCoords(dp=prefill_dp_rank, cp=cp_rank, tp=p, pp=stage)
                aux = (cp_rank, p, stage) == aux_place
                found.append(Source(place, destinations, aux, state, pages))
    return tuple(found)


def _overlapping(size: int, rank: int, other_size: int) -> range:
    """The ranks of `other_size` whose intervals overlap that of `rank` of `size`."""
    return range(rank * other_size // size, -(-(rank + 1) * other_size // size))


def _cp_part(cp: CPTransfer, cp_rank: int, cp_size: int) -> tuple[PageShare, bool]:
    """What one CP rank sends: its pages, and whether state."""
    match cp:
        case CPTransfer.FIRST:
            return (ALL_PAGES if cp_rank == 0 else NO_PAGES), cp_rank == 0
        case CPTransfer.PAGES:
            # Nothing is known of the inside of state, so it is not split.
            return PageShare(cp_rank, cp_size), cp_rank == 0
        case CPTransfer.LAYERS | CPTransfer.NUMBERS:
            return ALL_PAGES, True


def _check_axes(prefill: Topology, decode: Topology) -> None:
    if decode.cp_size != 1:
        raise MismatchError(
            f"cp_size is {prefill.cp_size} on prefill and {decode.cp_size} on decode; context "
            f"parallelism is for prefill alone, start decode with 1 ({FLAGS['cp_size']})"
        )
    if decode.pp_size not in (1, prefill.pp_size):
        raise MismatchError(
            f"pp_size is {prefill.pp_size} on prefill and {decode.pp_size} on decode; start "
            f"decode with that of prefill or with 1 ({FLAGS['pp_size']})"
        )


def prefill_dp_rank(
    room: int, topology: Topology, follow_bootstrap_room: bool, queried: int | None
) -> int | None:
    """The prefill DP rank that serves `room`, or None while only a query can tell.

    `queried` is what the request or the bootstrap server says, if anything; it overrides the
    rule that SGLang's load balancer otherwise follows (`room mod dp_size`). Raises
    `MismatchError` when it names a rank that the prefill instance does not have. Source of
    the rule: SGLang's `disaggregation/decode.py`, `DecodePreallocQueue._resolve_prefill_dp_rank`.
    """
    if queried is not None:
        _check_dp_rank(topology, queried)
        return queried
    if topology.dp_size == 1:
        return 0
    return room % topology.dp_size if follow_bootstrap_room else None


def _check_dp_rank(prefill: Topology, dp_rank: int) -> None:
    if not 0 <= dp_rank < prefill.dp_size:
        raise MismatchError(
            f"the request asks for prefill dp rank {dp_rank}, but the prefill instance has "
            f"dp_size {prefill.dp_size} ({FLAGS['dp_size']})"
        )


def _check_equal(
    name: str, prefill: object, decode: object, flags: Mapping[str, str] = FLAGS
) -> None:
    if prefill != decode:
        raise MismatchError(
            f"{name} is {prefill} on prefill and {decode} on decode; "
            f"start both with the same value ({flags[name]})",
            _WHY.get(name, Why.SETTING),
        )
