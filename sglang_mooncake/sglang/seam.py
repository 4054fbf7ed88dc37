# SPDX-License-Identifier: Apache-2.0
"""Everything that we take from SGLang (written against 0.5.23).

What other releases have otherwise is in `differences.py`.

What SGLang takes from us is in `manager.py`, `sender.py` and `receiver.py`. A test scans the
installed SGLang for members that its schedulers read of our objects and that we lack;
`ABSENT_MEMBERS` holds those that are left out on purpose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    get_ib_devices_for_gpu,
)
from sglang.srt.environ import envs
from sglang.srt.runtime_context import (
    get_disagg,
    get_memory,
    get_observability,
    get_parallel,
    get_serving,
    get_spec,
)
from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto
from sglang.version import __version__

from bootstrap_server import InstanceConfig, KVFormat, RankCoords, SGLangParallel, Topology
from sglang_mooncake.context import Deadlines, RankContext, Role, engine_label
from sglang_mooncake.layout import ALL, Dealt, Split
from sglang_mooncake.messages import PROTOCOL_VERSION
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.sglang.config import SETTING_NAMES
from sglang_mooncake.sglang.differences import (
    dp_ranks,
    has_vectorized_pools,
    servers_alike,
    setting,
    spec_layout,
    stages_vote,
)
from sglang_mooncake.sglang.pools.kv_args import Heads, KVArgsLike
from sglang_mooncake.sglang.pools.states import state_names
from sglang_mooncake.sglang.releases import MODELLESS_DRAFTS, Mode, first_lacking
from sglang_mooncake.sglang.supported import Modes, refusal

__all__ = [
    "ABSENT_MEMBERS",
    "BaseKVManager",
    "BaseKVReceiver",
    "BaseKVSender",
    "DisaggregationMode",
    "KVPoll",
    "KVTransferError",
    "KVTransferMetric",
    "StageBoard",
    "UnsupportedServer",
    "check_supported",
    "dp_rank_conflict",
    "kv_heads",
    "own_address",
    "pins_host_memory",
    "rank_context",
    "rank_label",
    "rdma_devices",
    "recompute_address",
    "server_address",
    "stage_board",
]

#: Members that SGLang probes for with getattr or hasattr, or reads only in modes which
#: `check_supported` refuses. We leave them out on purpose; each with the reason.
ABSENT_MEMBERS: dict[str, str] = {
    "set_kv_buffer_tensors": "GPU staging of head slices (SGLANG_DISAGG_STAGING_BUFFER), refused",
    "_staging_handler": "the same",
    "_prefetch_staging_reqs": "the same",
    "transfer_infos": "the same",
}


#: A wildcard can be listened on, but not called.
_LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}


_MODEL_CHARS_MAX = 200
#: Far more than a scheduler has under way: it asks for the state of each in every step.
FAILED_ROOMS_MAX = 16_384


class UnsupportedServer(RuntimeError):
    """SGLang runs in a mode that this version does not serve; names the flag."""


def rank_context(
    kv_args: KVArgsLike, mode: DisaggregationMode, server_args: Any, host: str | None
) -> RankContext:
    """The facts about this scheduler process.

    Raises:
        UnsupportedServer: a mode that would give wrong bytes or hang later.
    """
    parallel, disagg, serving = get_parallel(), get_disagg(), get_serving()
    check_supported(kv_args, mode, kv_heads(kv_args, server_args).draft is not None)
    role: Role = "prefill" if mode == DisaggregationMode.PREFILL else "decode"
    topology, coords = _place(kv_args)
    return RankContext(
        role=role,
        coords=coords,
        config=InstanceConfig(
            topology=topology,
            format=KVFormat(
                int(kv_args.page_size), _kv_dtype(kv_args, server_args), kv_args.kv_layout
            ),
            load_balance_method=str(parallel.load_balance_method),
            decode_allocation_policy=str(
                setting(disagg, "disaggregation_decode_allocation_policy")
            ),
            enable_dsa_cache_layer_split=bool(parallel.enable_dsa_cache_layer_split),
            enable_kv_cache_sharding=bool(setting(parallel, "enable_kv_cache_sharding")),
            dsv41_spec_layout=spec_layout(kv_args),
            protocol=PROTOCOL_VERSION,
            dcp_size=int(parallel.attn_dcp_size),
            model=_model(server_args),
        ),
        host=host or own_address(),
        bootstrap_address=_bootstrap_address() if role == "prefill" else "",
        prefill_http_port=int(serving.port) if role == "prefill" else None,
        register_dp_rank=role == "prefill" and dp_ranks(parallel) > 1 and not _follows_room(),
        deadlines=_deadlines(),
        # As SGLang decides it (CommonKVManager.__init__, enable_all_cp_ranks_for_transfer).
        all_cp_ranks=bool(
            envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get()
            or getattr(kv_args, "is_hybrid_mla_backend", False)
        ),
        split=_split(role),
        names=SETTING_NAMES,
    )


def _model(server_args: Any) -> str:
    """What all copies of a model have in common, however their weights are stored: two servers for
    which this differs have different models."""
    config = ModelConfig.from_server_args(server_args)
    text = config.hf_text_config
    names = getattr(config.hf_config, "architectures", None) or ["a model without a name"]
    layers, hidden, vocabulary = (
        getattr(text, name, "?") for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    said = f"{names[0]} ({layers} layers of {hidden}, {vocabulary} tokens)"
    return "".join(char for char in said if char.isprintable())[:_MODEL_CHARS_MAX]


def _deadlines() -> Deadlines:
    """SGLang's, but for heartbeats of which the operator says nothing: SGLang's own defaults (5 s,
    2) are made for HTTP requests, and would find a frozen rank after 15 s."""
    interval = envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL
    failures = envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE
    deadlines = Deadlines(
        bootstrap_s=float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
        waiting_s=float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
    )
    if not (interval.is_set() or failures.is_set()):
        return deadlines
    return replace(
        deadlines,
        heartbeat_s=max(float(interval.get()), 0.1),
        heartbeat_failures_max=max(int(failures.get()), 1),
    )


def _split(role: Role) -> Split:
    """As SGLang's own backend reads it (`CommonKVManager.__init__`)."""
    parallel = get_parallel()
    pages_dealt = ALL
    if setting(parallel, "enable_kv_cache_sharding"):
        from sglang.srt.mem_cache.page_interleave import get_kv_shard_group

        # Without CP it is for MLA alone, which SGLang has checked.
        group = get_kv_shard_group(use_mla_backend=True)
        pages_dealt = Dealt(group.rank_in_group, group.world_size)
    return Split(
        pages_dealt,
        Dealt(parallel.attn_dcp_rank, parallel.attn_dcp_size),
        whole_heads=bool(setting(parallel, "enable_cp_tp_group_sharing")),
        on_host=role == "decode" and bool(get_memory().enable_hisparse),
    )


def own_address() -> str:
    """The address of this host that others can reach: SGLang's answer, or where it finds none (a
    host without a default route) the one that the server was told to listen on.

    Raises:
        UnsupportedServer: neither is there.
    """
    try:
        return str(get_local_ip_auto())
    except ValueError as error:
        host = str(get_serving().host).removeprefix("[").removesuffix("]")
        if host and host not in _LOOPBACK_OF_WILDCARD:
            return host
        raise UnsupportedServer(
            "SGLang finds no address of this host that others can reach (it has no default route): "
            f"give it in the environment as SGLANG_HOST_IP, or as --host instead of {host!r}"
        ) from error


def _kv_dtype(kv_args: KVArgsLike, server_args: Any) -> str:
    """The type of the cached numbers. SGLang's name for it is `auto` whenever it is the model's
    own, which would make a float16 and a bfloat16 server look alike."""
    name = str(kv_args.kv_cache_dtype_str)
    if name == "auto":
        return str(ModelConfig.from_server_args(server_args).dtype).removeprefix("torch.")
    return {"bf16": "bfloat16"}.get(name, name)


def rdma_devices(kv_args: KVArgsLike) -> tuple[str, ...]:
    """The devices that --disaggregation-ib-device names for this rank's GPU; none if it names none.

    It takes a list, or a mapping from GPU to list, in JSON or a file: SGLang's own parser knows.
    """
    names = get_ib_devices_for_gpu(kv_args.ib_device, kv_args.gpu_id)
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


def kv_heads(kv_args: KVArgsLike, server_args: Any) -> Heads:
    """The KV heads of the model and its draft model, which KVArgs does not tell on decode."""
    model = ModelConfig.from_server_args(server_args)
    draft = None
    if kv_args.num_draft_entries:
        spec = get_spec()
        drafter = ModelConfig.from_server_args(
            server_args,
            model_path=spec.speculative_draft_model_path,
            model_revision=spec.speculative_draft_model_revision,
            is_draft_model=True,
        )
        if drafter.attention_arch != AttentionArch.MLA:
            draft = int(drafter.get_total_num_kv_heads())
    # HND pools cannot be handed over at all: SGLang does not give out their pointers.
    return Heads(
        total=int(model.get_total_num_kv_heads()),
        swa=int(model.get_swa_num_kv_heads(1)),
        draft=draft,
        head_major=has_vectorized_pools(),
    )


def _place(kv_args: Any) -> tuple[Topology, RankCoords]:
    parallel = get_parallel()
    tp, cp = (
        (parallel.attn_tp_size, parallel.attn_tp_rank),
        (parallel.attn_cp_size, parallel.attn_cp_rank),
    )
    if setting(parallel, "enable_cp_tp_group_sharing"):
        # State is dealt out over the CP ranks as over TP ranks, and all of them hold the pages:
        # for its peers it is a server with so many TP ranks.
        tp, cp = cp, (1, 0)
    return SGLangParallel(
        attn_tp_size=tp[0],
        attn_tp_rank=tp[1],
        attn_cp_size=cp[0],
        attn_cp_rank=cp[1],
        attn_dp_size=parallel.attn_dp_size,
        attn_dp_rank=parallel.attn_dp_rank,
        pp_size=parallel.pp_size,
        pp_rank=kv_args.pp_rank,
        system_dp_size=servers_alike(parallel),
        system_dp_rank=kv_args.system_dp_rank or 0,
    ).place()


def _follows_room() -> bool:
    """Whether the decode side can derive the DP rank of a room from its number."""
    return (
        get_parallel().load_balance_method == "follow_bootstrap_room"
        and not envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get()
    )


def _bootstrap_address() -> str:
    """Where this instance's registry listens, as `CommonKVManager.register_to_bootstrap` finds it:
    on the first node, under the port that this node chose."""
    parallel, port = get_parallel(), int(get_disagg().disaggregation_bootstrap_port)
    if not parallel.dist_init_addr:
        host = str(get_serving().host)
        host = _LOOPBACK_OF_WILDCARD.get(host, host)
        return str(NetworkAddress(host, port).to_host_port_str())
    host = NetworkAddress.parse(parallel.dist_init_addr).resolved().host
    if parallel.nnodes > 1:
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedServer(
                "a prefill server on several nodes was not joined by torch.distributed before its "
                "KV manager was made"
            )
        port = int(parallel.world_group.broadcast_object(port, src=0))
    return str(NetworkAddress(host, port).to_host_port_str())


def check_supported(kv_args: KVArgsLike, mode: DisaggregationMode, has_draft_heads: bool) -> None:
    """Raises UnsupportedServer for a mode that would fail at a request, or give wrong bytes."""
    modes = _modes(kv_args, mode, has_draft_heads)
    problem = refusal(modes) or _lacking(kv_args, modes)
    if problem is not None:
        raise UnsupportedServer(problem)


def _modes(kv_args: KVArgsLike, mode: DisaggregationMode, has_draft_heads: bool) -> Modes:
    parallel = get_parallel()
    return Modes(
        role="prefill" if mode == DisaggregationMode.PREFILL else "decode",
        decode_allocation_policy=str(
            setting(get_disagg(), "disaggregation_decode_allocation_policy")
        ),
        dcp_size=int(parallel.attn_dcp_size),
        kv_cache_sharding=bool(setting(parallel, "enable_kv_cache_sharding")),
        cp_tp_group_sharing=bool(setting(parallel, "enable_cp_tp_group_sharing")),
        staging_buffer=bool(envs.SGLANG_DISAGG_STAGING_BUFFER.get()),
        has_draft_heads=has_draft_heads,
        states=state_names(kv_args),
    )


def _lacking(kv_args: KVArgsLike, modes: Modes) -> str | None:
    """The first mode that this server runs in and that its release does not have, in a sentence."""
    compressed = bool(kv_args.mla_compression_ratios) or "c128_state" in modes.states
    on = {
        Mode.DRAFTS: get_spec().speculative_algorithm not in MODELLESS_DRAFTS,
        Mode.DEEPSEEK_V4: compressed,
        Mode.DCP: modes.dcp_size > 1,
        Mode.SHARDING: modes.kv_cache_sharding,
        Mode.GROUP_SHARING: modes.cp_tp_group_sharing,
        Mode.HISPARSE: bool(get_memory().enable_hisparse),
    }
    return first_lacking({mode for mode, is_on in on.items() if is_on}, __version__)


class StageBoard:
    """What the pipeline stages of a prefill server say of their rooms, read by stage 0.

    SGLang lets stage 0 alone decide when a request may start, and start it on all stages
    (`poll_and_all_reduce_prefill_pp`, sglang/srt/disaggregation/utils.py), so stage 0 must know
    that the decode side has asked the others, too. The store is SGLang's own. `consensus` is for
    the scheduler thread, the rest for the loop thread.
    """

    def __init__(self) -> None:
        from sglang.srt.disaggregation.pp_consensus_store import PPConsensusStore

        parallel = get_parallel()
        self._store = PPConsensusStore(parallel.pp_size, parallel.pp_rank, parallel.pp_group)
        #: Which use of a room number has said something.
        self._serials: dict[int, int] = {}
        #: Numbers of rooms that have failed, by serial; the oldest failure first.
        self._failed: dict[int, int] = {}

    def ready(self, room: Room) -> None:
        self._say(room, KVPoll.WaitingForInput)

    def failed(self, room: Room) -> None:
        """Kept until `forget`, but no more of them than `FAILED_ROOMS_MAX`: requests that are
        aborted before they are computed are never closed."""
        self._say(room, KVPoll.Failed)
        self._failed.pop(room.serial, None)
        self._failed[room.serial] = room.number
        if len(self._failed) > FAILED_ROOMS_MAX:
            serial = next(iter(self._failed))
            self._forget(self._failed.pop(serial), serial)

    def forget(self, room: Room) -> None:
        """The scheduler has closed the room. A newer use of its number stays."""
        self._failed.pop(room.serial, None)
        self._forget(room.number, room.serial)

    def _forget(self, number: int, serial: int) -> None:
        if self._serials.get(number) == serial:
            del self._serials[number]
            self._store.pop(number)

    def consensus(self, room: int, own: int) -> int:
        """The least advanced of all stages; `own` is the `KVPoll` of this one, which is stage 0."""
        others = self._store.collect(room)[1:]
        return int(min(own, *(KVPoll.Bootstrapping if say is None else say for say in others)))

    def close(self) -> None:
        self._store.close()

    def _say(self, room: Room, state: int) -> None:
        if room.serial >= self._serials.get(room.number, 0):
            self._serials[room.number] = room.serial
            self._store[room.number] = int(state)


def stage_board() -> StageBoard | None:
    """For a prefill server of several stages that asks stage 0; every stage must call it once."""
    if get_parallel().pp_size == 1 or stages_vote():
        return None
    try:
        return StageBoard()
    except ValueError as error:
        raise UnsupportedServer(
            f"SGLang's store for pipeline stages does not start: {error}. Where the host has no "
            "default route, give its address in the environment as SGLANG_HOST_IP"
        ) from error


def dp_rank_conflict(context: RankContext, room: int, chosen_by_request: bool) -> str | None:
    """A request that was sent to another DP rank than its room number says: the decode side would
    look for it elsewhere. None when all is well."""
    dp_size, dp_rank = context.config.topology.dp_size, context.coords.dp
    if dp_size == 1 or chosen_by_request or context.register_dp_rank or room % dp_size == dp_rank:
        return None
    return (
        f"room {room} was dispatched to prefill dp rank {dp_rank}, but with "
        f"--load-balance-method follow_bootstrap_room it belongs to dp rank {room % dp_size}; set "
        "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 on both servers to mix both ways"
    )


def pins_host_memory() -> bool:
    """Whether SGLang's prefill scheduler can copy page numbers into pinned memory, with an event
    behind the copy: it does so as is done here, and only CUDA's torch (or ROCm's) can."""
    try:
        torch.empty(1, device="cpu", pin_memory=True)
        torch.cuda.Event().record(torch.cuda.current_stream())
    except (RuntimeError, AssertionError):
        return False
    return True


def recompute_address(bootstrap_address: str, http_port: int) -> str:
    """Where the prefill server's HTTP API is, on the host of its registry."""
    host = NetworkAddress.parse(bootstrap_address).host
    return str(NetworkAddress(host, http_port).to_host_port_str())


def server_address(server_args: Any, host: str) -> tuple[str, int]:
    """HOST:PORT that all ranks of this server have in common and no other server has, and the port
    of SGLang's HTTP API on this node, which is `host`."""
    port = int(get_serving().port)
    if server_args.nnodes > 1:
        return str(server_args.dist_init_addr), port
    return str(NetworkAddress(host, port).to_host_port_str()), port


def rank_label(context: RankContext) -> str:
    """What `te top` calls this rank's engine."""
    serving = get_serving()
    who = f"{context.role} ({context.coords})"
    return engine_label(who, str(serving.served_model_name), int(serving.port))


def metric_labels(context: RankContext) -> dict[str, str] | None:
    """How this rank's metrics are labelled (`metrics.RANK_LABELS`); None where the server was
    started without --enable-metrics."""
    if not get_observability().enable_metrics:
        return None
    coords = context.coords
    return {
        "model_name": str(get_serving().served_model_name),
        "role": context.role,
        "dp_rank": str(coords.dp),
        "cp_rank": str(coords.cp),
        "tp_rank": str(coords.tp),
        "pp_rank": str(coords.pp),
    }
