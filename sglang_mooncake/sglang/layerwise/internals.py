# SPDX-License-Identifier: Apache-2.0
"""The part of the seam that layer by layer needs: what it relies on within SGLang 0.5.23, in one
table, and whether the installed SGLang has it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import Any

from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_parallel

__all__ = [
    "EXTEND",
    "INTERNALS",
    "KNOWN_POOLS",
    "MODES",
    "Internal",
    "Mode",
    "missing",
    "mode_in_the_way",
]

#: `ForwardMode.name` of a batch that computes prompts and nothing else.
EXTEND = "EXTEND"


@dataclass(frozen=True, slots=True)
class Internal:
    """A function, class or value of SGLang's.

    parameters: that the function has.
    uses: names that its code uses, of attributes above all. SGLang's objects get their attributes
        in code, so that code that reads or writes one is the only proof that it is there.
    fields: of the dataclass.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module.removeprefix('sglang.srt.')}.{self.name}"


INTERNALS = (
    Internal(
        "sglang.srt.managers.scheduler",
        "Scheduler.run_batch",
        parameters=("batch",),
        uses=("maybe_send_cached_prefix_chunk", "hicache_consumer_index", "reqs"),
    ),
    Internal(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch",
        fields=("reqs", "forward_mode", "extend_num_tokens", "hicache_consumer_index"),
    ),
    Internal(
        "sglang.srt.managers.schedule_batch", "Req.__init__", uses=("to_finish", "finished_reason")
    ),
    Internal("sglang.srt.model_executor.forward_batch_info", f"ForwardMode.{EXTEND}"),
    Internal(
        "sglang.srt.disaggregation.prefill",
        "SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        uses=("pending_bootstrap", "start_send_idx", "prefix_len"),
    ),
    # What is sent after the forward, and so what may be told during it.
    Internal(
        "sglang.srt.disaggregation.prefill",
        "SchedulerDisaggregationPrefillMixin._send_kv_chunk",
        uses=(
            "token_to_kv_pool_allocator",
            "page_size",
            "start_send_idx",
            "extend_end",
            "origin_input_ids",
            "req_to_token_pool",
            "req_to_token",
            "kv",
            "req_pool_idx",
            "translate_kv_indices_for_transfer",
            "get_kvcache",
            "disagg_kv_sender",
        ),
    ),
    Internal(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.__init__",
        uses=("is_draft_worker", "device"),
    ),
    Internal(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.forward",
        parameters=("forward_batch",),
        uses=("_forward_raw",),
    ),
    Internal(
        "sglang.srt.model_executor.model_runner", "ModelRunner._forward_raw", uses=("attn_backend",)
    ),
    Internal(
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.forward",
        parameters=("layer",),
    ),
    Internal(
        "sglang.srt.layers.radix_attention",
        "RadixAttention.forward",
        uses=("get_attn_backend", "forward"),
    ),
    Internal("sglang.srt.layers.radix_attention", "RadixAttention.__init__", uses=("layer_id",)),
)

#: Pools whose layers are written in the order of the model and lie still while a forward runs, and
#: have the model's numbers in a layout. Those of a pool with windows have not: `kv_layer_ids` is
#: empty for it (`build_kv_layer_ids`, disaggregation/utils.py), and its full layers count from 0.
KNOWN_POOLS = frozenset(
    {
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
        "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool",
        "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
    }
)


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of the server in which an early write could carry wrong bytes, or gains nothing."""

    what: str
    is_on: Callable[[], bool]


MODES = (
    Mode("pipeline stages", lambda: get_parallel().pp_size > 1),
    # Two half batches take turns: a layer of one says nothing of the other.
    Mode("two-batch overlap", lambda: bool(get_exec().overlap.enable_two_batch_overlap)),
    Mode("PD multiplexing", lambda: bool(get_disagg().enable_pdmux)),
    # Compaction moves pages.
    Mode("unified memory", lambda: bool(get_memory().enable_unified_memory)),
    Mode("HiSparse", lambda: bool(get_memory().enable_hisparse)),
    Mode("a cache split by layers", lambda: bool(get_parallel().enable_dsa_cache_layer_split)),
    # After a fault of a rank the forward runs again, over layers that are sent already.
    Mode("elastic EP", lambda: get_exec().moe.elastic_ep_backend is not None),
    Mode("diffusion", lambda: get_exec().dllm.dllm_algorithm is not None),
    # No Python runs between the layers.
    Mode("full prefill CUDA graphs", lambda: _prefill_graph() == "full"),
)


def _prefill_graph() -> str | None:
    config = get_exec().graph.cuda_graph_config
    return None if config is None else str(config.prefill.backend)


def mode_in_the_way() -> str | None:
    """The first of `MODES` that is on, or whose setting this SGLang does not have."""
    for mode in MODES:
        try:
            if mode.is_on():
                return f"it does not go together with {mode.what}"
        except AttributeError as error:
            return f"this SGLang does not say whether it runs with {mode.what} ({error})"
    return None


def missing() -> str | None:
    """The first of `INTERNALS` that the installed SGLang lacks, in words; None if it has all."""
    for internal in INTERNALS:
        problem = _problem(internal)
        if problem is not None:
            return f"this SGLang has no {internal}{problem}"
    return None


def _problem(internal: Internal) -> str | None:
    """What follows its name in a sentence that says what is missing."""
    try:
        found: Any = importlib.import_module(internal.module)
        for part in internal.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return ""
    if internal.fields:
        has = {field.name for field in fields(found)} if is_dataclass(found) else set()
        return _lacks("field", internal.fields, has)
    if not internal.parameters and not internal.uses:
        return None
    function = inspect.unwrap(found)
    code = getattr(function, "__code__", None)
    if code is None:
        return " that is a function"
    parameters = inspect.signature(function).parameters
    return _lacks("parameter", internal.parameters, parameters.keys()) or _lacks(
        "use of", internal.uses, set(_names(code))
    )


def _lacks(kind: str, wanted: tuple[str, ...], has: Any) -> str | None:
    lacking = [name for name in wanted if name not in has]
    return f" with {kind} {lacking[0]}" if lacking else None


def _names(code: CodeType) -> Iterator[str]:
    """All that a function's code names, and that of the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
