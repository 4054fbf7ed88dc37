# SPDX-License-Identifier: Apache-2.0
"""The JSON shapes of SGLang 0.5.23's bootstrap routes, translated to and from our records.

Source: `disaggregation/common/conn.py`, `CommonKVManager.register_to_bootstrap` (what ranks
send), `PrefillServerInfo` and `CommonKVReceiver` (what the decode side reads).
"""

from __future__ import annotations

from typing import Final

import msgspec

from bootstrap_server.ranks.records import (
    DEFAULT_INSTANCE,
    Instance,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    SpecLayout,
    Topology,
    check_instance_name,
)

__all__ = [
    "ROOMS_PER_QUERY_MAX",
    "ROOM_MAX",
    "QueryBody",
    "RoomBody",
    "RouteBody",
    "SGLangParallel",
    "rank_answer",
    "topology_answer",
]

#: Rooms are 63-bit numbers in SGLang's router; this many fit into the largest body taken.
ROOMS_PER_QUERY_MAX: Final = 32_768
ROOM_MAX: Final = 2**64 - 1


class SGLangParallel(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place in SGLang's own terms (sizes count from 1, ranks from 0).

    SGLang's `--tp-size` is the width of a whole replica. Attention splits it into
    attention DP, CP and TP groups, and the KV cache follows attention. Replicas under
    SGLang's own DP controller are `system_dp`; DP attention does not run inside them, so at
    most one of the two DP sizes exceeds 1.
    """

    attn_tp_size: int
    attn_tp_rank: int
    attn_cp_size: int
    attn_cp_rank: int
    attn_dp_size: int
    attn_dp_rank: int
    pp_size: int
    pp_rank: int
    system_dp_size: int
    system_dp_rank: int

    def place(self) -> tuple[Topology, RankCoords]:
        """Our topology and coordinates; `ValueError` for numbers that name no rank.

        The one place of this translation: DP is `attn_dp`, unless SGLang runs several
        replicas, when it is `system_dp`; TP is the attention TP group.
        """
        if self.attn_dp_size > 1 and self.system_dp_size > 1:
            raise ValueError(
                f"attn_dp_size {self.attn_dp_size} and system_dp_size {self.system_dp_size} "
                "cannot both exceed 1"
            )
        replicas = self.system_dp_size > 1
        topology = Topology(
            dp_size=self.system_dp_size if replicas else self.attn_dp_size,
            cp_size=self.attn_cp_size,
            tp_size=self.attn_tp_size,
            pp_size=self.pp_size,
        )
        coords = RankCoords(
            dp=self.system_dp_rank if replicas else self.attn_dp_rank,
            cp=self.attn_cp_rank,
            tp=self.attn_tp_rank,
            pp=self.pp_rank,
        )
        topology.check(coords)
        return topology, coords


class RouteBody(SGLangParallel, frozen=True, kw_only=True):
    """Body of `PUT /route`: one stock SGLang prefill rank."""

    rank_ip: str
    rank_port: int
    page_size: int
    kv_cache_dtype: str
    kv_layout: str | None = None
    dsv41_spec_layout: SpecLayout | None = None
    load_balance_method: str = "follow_bootstrap_room"
    decode_allocation_policy: str = "early"
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None

    def record(self) -> RankRecord:
        """The rank as a record of protocol 0 and epoch 0; `ValueError` for bad values."""
        topology, coords = self.place()
        config = InstanceConfig(
            topology=topology,
            format=KVFormat(self.page_size, self.kv_cache_dtype, self.kv_layout),
            load_balance_method=self.load_balance_method,
            decode_allocation_policy=self.decode_allocation_policy,
            enable_dsa_cache_layer_split=self.enable_dsa_cache_layer_split,
            enable_kv_cache_sharding=self.enable_kv_cache_sharding,
            dsv41_spec_layout=self.dsv41_spec_layout,
        )
        rank = Rank(coords, self.rank_ip, self.rank_port, prefill_http_port=self.prefill_http_port)
        return RankRecord(config, rank)


class RoomBody(msgspec.Struct, frozen=True):
    """Body of `POST /register_dp_rank`; SGLang's ranks name no instance.

    Rooms are not kept apart by instance: routers draw their numbers from 63 bits.
    """

    bootstrap_room: int
    dp_rank: int
    instance: str = DEFAULT_INSTANCE

    def __post_init__(self) -> None:
        if not 0 <= self.bootstrap_room <= ROOM_MAX:
            raise ValueError(f"bootstrap_room is outside 0..{ROOM_MAX}")
        check_instance_name(self.instance)


class QueryBody(msgspec.Struct, frozen=True):
    """Body of `POST /query_dp_ranks`. Its rooms may be any numbers, as nobody knows those that are
    none: clients choose them, and SGLang asks for all requests that wait at once, again and again
    until each is known or has failed. One that was refused would keep all of them waiting.
    """

    bootstrap_rooms: list[int]

    def __post_init__(self) -> None:
        if len(self.bootstrap_rooms) > ROOMS_PER_QUERY_MAX:
            raise ValueError(
                f"{len(self.bootstrap_rooms)} rooms in one query, at most "
                f"{ROOMS_PER_QUERY_MAX} are allowed"
            )


def topology_answer(instance: Instance) -> dict[str, object]:
    """Answer of `GET /route` with four -1: keyword arguments of SGLang's `PrefillServerInfo`.

    Optional layouts are left out when absent, as older SGLang versions do not know the keys.
    The HTTP port is that of the lowest rank, which lives on the node that decode knows.
    """
    config = instance.config
    topology, form = config.topology, config.format
    answer: dict[str, object] = {
        "attn_tp_size": topology.tp_size,
        "attn_cp_size": topology.cp_size,
        "dp_size": topology.dp_size,
        "pp_size": topology.pp_size,
        "page_size": form.page_size,
        "kv_cache_dtype": form.kv_cache_dtype,
        "follow_bootstrap_room": config.follow_bootstrap_room,
        "enable_dsa_cache_layer_split": config.enable_dsa_cache_layer_split,
        "enable_kv_cache_sharding": config.enable_kv_cache_sharding,
        "prefill_http_port": instance.ranks[0].prefill_http_port,
        "decode_allocation_policy": config.decode_allocation_policy,
    }
    if form.kv_layout is not None:
        answer["kv_layout"] = form.kv_layout
    if config.dsv41_spec_layout is not None:
        answer["dsv41_spec_layout"] = config.dsv41_spec_layout
    return answer


def rank_answer(rank: Rank) -> dict[str, object]:
    """Answer of `GET /route` for one rank."""
    return {"rank_ip": rank.host, "rank_port": rank.port}
