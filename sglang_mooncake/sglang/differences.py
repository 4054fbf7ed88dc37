# SPDX-License-Identifier: Apache-2.0
"""What differs between the releases of SGLang that the package runs with, each difference in one
place with the release that began it. No other module asks what this SGLang has.

A difference is told by what SGLang's modules have, not by the number of the release: a build
between two releases has one or the other. Which releases are served, and which of them have a mode
that is not the hand-over itself: `releases.py`.

Names that came later, and what stands for them until then:

- 0.5.20: `KVArgs.num_draft_entries`. A draft model's caches cannot be told from the model's.
- 0.5.21: `get_dsv41_spec_layout`; `KVArgs.mla_compression_ratios` on decode ranks (the field is
  declared before). Of DeepSeek-V4 decode ranks do not know what prefill ranks know.
- 0.5.22: `PPConsensusStore`; `KVArgs.swa_kv_cache_layout`; three settings (`_YOUNG_SETTINGS`).
- 0.5.23: `KVArgs.kv_layout`. Pools have one layout, or sizes that tell their layouts apart.

What changed its meaning, or comes in another order:

- 0.5.19: deferred release of a failed request's pages. Until then they are free right after
  `failure_exception()`, so that call waits for the fence. Off by default until 0.5.21.
- 0.5.19: `maybe_init_shared_mooncake_transfer_engine` asks the runtime context, not `server_args`.
- 0.5.19, 0.5.20: the scheduler also calls `register_deferred_abort_room` when it aborts.
- 0.5.22: `failure_exception()` is called also when a decode server cannot restore a prefix from
  HiCache. Until then the scheduler releases the pages without a word: `hook_deferred_releases` and
  `KVReceiver.clear()` end such a room.
- 0.5.22: `parallel.dp_size` counts servers that are alike; until then also the ranks of DP
  attention, if that is on. `num_dp_ranks` is what `dp_size` was.
- 0.5.22: senders are made without `dest_tp_ranks` and `pp_rank`.
- 0.5.22: stage 0 of a pipelined prefill server decides when a request starts, and must ask the
  others (`StageBoard`). Until then the stages vote, each for its own sender.
- 0.5.23: the ranks of a decode server agree when they hold pages of a failed request, and when
  these are free again (`all_reduce_flags`). Until then each decides by itself; ranks that differ
  admit other requests, and hang.
- 0.5.23: the state lists `dsa` and `minimax_index_k` leave out the prefix that the decode server
  has already (`conventions`).

The metadata buffers (`MetadataBuffers.get_buf_infos`) have the same order and the same sizes in all
releases since 0.5.18, but for the sampling masks, whose size changed in 0.5.21.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import is_hip
from sglang.version import __version__

__all__ = [
    "agreed",
    "asks_for_pd",
    "call_without_pd",
    "completed",
    "conventions",
    "deferred_release_enabled",
    "dp_ranks",
    "has_vectorized_pools",
    "hook_deferred_releases",
    "ranks_must_agree",
    "release",
    "servers_alike",
    "setting",
    "spec_layout",
    "stages_vote",
]

#: Settings that some releases do not know, and what they are there.
_YOUNG_SETTINGS: Final[dict[str, Any]] = {
    "disaggregation_decode_allocation_policy": "early",
    "enable_cp_tp_group_sharing": False,
    "enable_kv_cache_sharding": False,
}
#: State lists that mean the same in all releases. Of those that are in neither tuple nobody has
#: compared what they mean: they go between servers of one release.
_ALIKE_LISTS: Final = ("mamba", "swa")
#: State lists that leave out what the decode server has already, in releases that do so.
_LISTS_FROM_PREFIX: Final = ("dsa", "minimax_index_k")
#: How SGLang's decode queue holds the pages of a failed request, and for how many seconds.
_DEFER, _DEADLINE = "_defer_release", "deferred_kv_release_timeout"


def setting(bag: Any, name: str) -> Any:
    """A setting of SGLang's runtime context, in a release that does not know it what it is there.

    Raises:
        AttributeError: it should be there.
    """
    if name in _YOUNG_SETTINGS and not hasattr(bag, name):
        return _YOUNG_SETTINGS[name]
    return getattr(bag, name)


def completed(kv_args: Any, is_mla: bool) -> Any:
    """SGLang's `KVArgs` with the fields that this release does not know. A field that it does know,
    and has not set, is still an error where it is read."""
    young: dict[str, Any] = {"kv_layout": None, "num_draft_entries": 0}
    is_latent = is_mla or bool(kv_args.is_hybrid_mla_backend)
    young["swa_kv_cache_layout"] = None if is_latent else _window_layout()
    for name, value in young.items():
        if name not in KVArgs.__annotations__:
            setattr(kv_args, name, value)
    if not hasattr(utils, "get_dsv41_spec_layout") and not hasattr(
        kv_args, "mla_compression_ratios"
    ):
        kv_args.mla_compression_ratios = None
    return kv_args


def _window_layout() -> str:
    """As SGLang's pools of K and V choose it (`MHATokenToKVPool.__init__`)."""
    if envs.SGLANG_USE_HND_KVCACHE.get():
        return "hnd"
    return "vectorized_5d" if has_vectorized_pools() else "nhd"


def has_vectorized_pools() -> bool:
    """Whether pools of K and V have ROCm's layout, in which heads come before tokens."""
    vectorized = envs.SGLANG_AITER_KV_CACHE_LAYOUT.get().lower() == "vectorized_5d"
    return vectorized and bool(envs.SGLANG_USE_AITER.get()) and bool(is_hip())


def spec_layout(kv_args: Any) -> Any:
    """What DeepSeek-V4.1's drafts must have alike on both sides; None for everything else."""
    if not hasattr(utils, "get_dsv41_spec_layout"):
        return None
    return utils.get_dsv41_spec_layout(kv_args)


def conventions(states: tuple[str, ...]) -> tuple[str, ...]:
    """What this release means by the lists of a request where their names do not tell: both sides
    of a hand-over must mean the same."""
    has_prefix = not hasattr(utils, "filter_kv_indices_for_shard_rank")
    said = []
    for name in dict.fromkeys(states):
        if name in _LISTS_FROM_PREFIX:
            said += [] if has_prefix else [f"{name} from the prefix on"]
        elif name not in _ALIKE_LISTS:
            said.append(f"{name} as in {release()}")
    return tuple(said)


def release() -> str:
    """Of what runs in this process, for sentences."""
    return f"SGLang {__version__}"


# --- Mooncake's own engine ---


def asks_for_pd(init: Callable[..., Any]) -> bool:
    """Whether `call_without_pd` can call it."""
    init = inspect.unwrap(init)
    return "get_disagg" in init.__code__.co_names or _takes_server_args(init)


def call_without_pd(init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `maybe_init_shared_mooncake_transfer_engine` as for a server without PD."""
    if _takes_server_args(inspect.unwrap(init)):
        kwargs["server_args"] = _WithoutPD(kwargs["server_args"])
        return init(*args, **kwargs)
    names = inspect.unwrap(init).__globals__
    get_disagg = names["get_disagg"]
    names["get_disagg"] = lambda: _WithoutPD(get_disagg())
    try:
        return init(*args, **kwargs)
    finally:
        names["get_disagg"] = get_disagg


def _takes_server_args(init: Callable[..., Any]) -> bool:
    return "server_args" in inspect.signature(init).parameters


class _WithoutPD:
    """SGLang's settings, with prefill and decode in one server."""

    disaggregation_mode = "null"

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


# --- ranks and stages ---


def servers_alike(parallel: Any) -> int:
    """Over how many servers that are alike the requests of this one are dealt out (system DP).

    Args:
        parallel: SGLang's parallel context.
    """
    if hasattr(parallel, "num_dp_ranks") or not parallel.enable_dp_attention:
        return int(parallel.dp_size)
    return 1


def dp_ranks(parallel: Any) -> int:
    """Among how many DP ranks, of whatever kind, a request is dispatched."""
    has_new_name = hasattr(parallel, "num_dp_ranks")
    return int(parallel.num_dp_ranks if has_new_name else parallel.dp_size)


def stages_vote() -> bool:
    """Whether the stages of a pipelined prefill server tell each other by SGLang's own messages
    which requests may start."""
    return importlib.util.find_spec("sglang.srt.disaggregation.pp_consensus_store") is None


# --- pages of failed requests ---


def deferred_release_enabled() -> bool:
    """Whether the decode scheduler keeps a failed request's pages until we call them safe."""
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    return hasattr(envs, name) and bool(getattr(envs, name).get())


def ranks_must_agree() -> bool:
    """Whether this is one of several ranks of a decode server of which SGLang lets each decide by
    itself when it holds the pages of a failed request, and when these are free again. What a rank
    admits, and with how many requests it takes part in SGLang's collectives, depends on it."""
    return not _ranks_agree_by_themselves() and dist.get_world_size(_step_group()) > 1


def agreed(flag: bool) -> bool:
    """Whether all ranks that SGLang's decode queues keep in step say so. Every one of them must ask
    at the same place; it waits for the others, as SGLang's own polls do."""
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=_step_group())
    return bool(flags.item())


def hook_deferred_releases(must_agree: bool) -> None:
    """For a decode rank whose SGLang holds the pages of failed requests, before 0.5.23. What is
    held has been given up, whether SGLang has said so or not. Where the ranks must agree, SGLang's
    deadline is off, at which ranks with different clocks would part. Idempotent.

    Raises:
        LookupError: this SGLang holds pages otherwise.
    """
    if _ranks_agree_by_themselves():
        return
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    original = getattr(DecodeTransferQueue, _DEFER, None)
    if getattr(original, "of_sglang_mooncake", False):
        return
    if original is None or _DEADLINE not in original.__code__.co_names:
        raise LookupError(
            f"this version of SGLang has no DecodeTransferQueue.{_DEFER} that uses {_DEADLINE}"
        )

    @functools.wraps(original)
    def defer_release(queue: Any, decode_req: Any) -> Any:
        decode_req.kv_receiver.ensure_abort_notified()
        if must_agree:
            setattr(queue, _DEADLINE, math.inf)
        return original(queue, decode_req)

    defer_release.of_sglang_mooncake = True  # type: ignore[attr-defined]
    setattr(DecodeTransferQueue, _DEFER, defer_release)


def _ranks_agree_by_themselves() -> bool:
    return hasattr(utils, "all_reduce_flags")


def _step_group() -> Any:
    """The process group of SGLang's decode queues (`gloo_group`)."""
    return get_parallel().attn_tp_group.cpu_group
