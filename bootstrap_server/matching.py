# SPDX-License-Identifier: Apache-2.0
"""Decode rank d, which prefill ranks send you what? Pure functions, no I/O.

Today's answer covers equal attention TP sizes, any DP sizes, PP 1 and CP 1. Every other pair
is refused with a sentence that names both values and the flag to change.
"""

from __future__ import annotations

from bootstrap_server.errors import MismatchError
from bootstrap_server.records import FLAGS, InstanceConfig, KVFormat, RankCoords, Topology

__all__ = ["check_configs", "check_formats", "prefill_dp_rank", "sources"]

#: Values of `InstanceConfig` that must be equal on both sides beside the format. Load balancing
#: is missing on purpose: it is the prefill router's affair.
_EQUAL_POLICIES = ("protocol", "decode_allocation_policy", "dsv41_spec_layout")


def check_formats(prefill: KVFormat, decode: KVFormat) -> None:
    """Raise `MismatchError` unless KV bytes mean the same on both sides.

    `kv_layout` is compared strictly (None is a layout of its own): both sides run the same
    model, so a side without a name for its layout uses another kind of pool.
    """
    for name in KVFormat.__struct_fields__:
        _check_equal(name, getattr(prefill, name), getattr(decode, name))


def check_configs(prefill: InstanceConfig, decode: InstanceConfig) -> None:
    """Raise `MismatchError` unless the two instances can hand over KV.

    Covers formats, policies and the protocol version; the topologies are `sources`' affair.
    """
    check_formats(prefill.format, decode.format)
    for name in _EQUAL_POLICIES:
        _check_equal(name, getattr(prefill, name), getattr(decode, name))
    # Sharding splits the pages of one KV cache over prefill ranks, which `sources` does not
    # know yet. SGLang offers it on prefill only, so the two sides cannot be asked to be equal.
    if prefill.enable_kv_cache_sharding:
        raise MismatchError(
            "enable_kv_cache_sharding is True on prefill and "
            f"{decode.enable_kv_cache_sharding} on decode, and sharded KV is not supported; "
            f"start prefill without {FLAGS['enable_kv_cache_sharding']}"
        )


def sources(
    prefill: Topology, decode: Topology, coords: RankCoords, prefill_dp_rank: int
) -> tuple[RankCoords, ...]:
    """The prefill ranks that send to the decode rank at `coords`.

    `prefill_dp_rank` is the prefill DP rank that serves the request. With equal attention TP
    sizes there is exactly one source, of the same TP rank. Raises `MismatchError` for a pair
    of topologies that cannot be served, `ValueError` for `coords` outside `decode`.
    """
    decode.check(coords)
    _check_dp_rank(prefill, prefill_dp_rank)
    if prefill.tp_size != decode.tp_size:
        raise MismatchError(
            f"attention TP size is {prefill.tp_size} on prefill and {decode.tp_size} on decode; "
            f"make them equal ({FLAGS['tp_size']})"
        )
    for name in ("cp_size", "pp_size"):
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if (ours, theirs) != (1, 1):
            raise MismatchError(
                f"{name} is {ours} on prefill and {theirs} on decode; "
                f"only 1 on both is supported ({FLAGS[name]})"
            )
    return (RankCoords(dp=prefill_dp_rank, cp=0, tp=coords.tp, pp=0),)


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


def _check_equal(name: str, prefill: object, decode: object) -> None:
    if prefill != decode:
        raise MismatchError(
            f"{name} is {prefill} on prefill and {decode} on decode; "
            f"start both with the same value ({FLAGS[name]})"
        )
