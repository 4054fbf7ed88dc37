# SPDX-License-Identifier: Apache-2.0
"""Forwards of SGLang's own classes, with a model of nothing but layers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mooncake.layer_groups import ForwardPace

PAGE = 4
LAYERS = 16
#: What the forwards of these tests seem to take: long enough for a group of each layer.
SLOW_S = 10.0


class Seeming(ForwardPace):
    """Whatever is measured, forwards seem to take so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seems_s = seconds

    def forward_s(self, tokens: int) -> float:
        return self.seems_s


class Sink:
    """What takes layers, and what counts."""

    by_layers = True
    bytes_per_s = 0.0

    def __init__(self) -> None:
        #: Of each call: use, pages as they were then, first, below, number of events.
        self.sent: list[tuple[Any, list[int], int, int, int]] = []
        #: The same, as they were given: pages and events.
        self.given: list[tuple[Any, Any]] = []
        #: Whether it was to wake the loop.
        self.wakes: list[bool] = []
        self.failed: list[tuple[Any, str]] = []
        self.fallbacks: Counter[str] = Counter()
        self.hooked: list[float] = []
        self.error: Exception | None = None

    def send_layers(self, room, pages, first, below, events=(), wake=True) -> None:
        if self.error is not None:
            raise self.error
        self.wakes.append(wake)
        self.sent.append((room, pages.tolist(), first, below, len(events)))
        self.given.append((pages, events))

    def fail(self, room, reason) -> None:
        self.failed.append((room, reason))

    def fell_back(self, reason: str) -> None:
        self.fallbacks[reason] += 1

    def forward_hooked(self, hooks_us: float) -> None:
        self.hooked.append(hooks_us)


def sender(next_page: int = 0, aux_slot: int | None = 0) -> Any:
    """A sender after `init`, in no room."""
    from sglang_mooncake.sglang.sender import KVSender

    made = KVSender.__new__(KVSender)
    made.room, made.next_page, made.aux_slot, made.told_tokens = object(), next_page, aux_slot, 0
    return made


def request(
    tokens: int, end: int | None = None, sent: int = 0, row: int = 0, prefix: int = 0, **more: Any
) -> Any:
    """As much of a `Req` as the hooks read; it has `tokens` tokens, and the forward that is about
    to be launched computes those from `prefix` up to `end`."""
    fields = {
        "disagg_kv_sender": sender(next_page=sent // PAGE),
        "pending_bootstrap": False,
        "to_finish": None,
        "finished_reason": None,
        "origin_input_ids": list(range(tokens)),
        "start_send_idx": sent,
        "prefix_len": prefix,
        "extend_end": tokens if end is None else end,
        "kv": SimpleNamespace(req_pool_idx=row),
    }
    return SimpleNamespace(**fields | more)


class Model:
    """A scheduler, a runner and an attention backend of SGLang's classes, without a model: what
    `forward` runs is a list of layers."""

    def __init__(self, sink: Sink, has_streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch
        from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.model_executor.model_runner import ModelRunner

        from sglang_mooncake.sglang.layerwise import Layerwise, hooks

        monkeypatch.setattr(hooks, "mode_in_the_way", lambda: None)

        class Backend(AttentionBackend):
            def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
                model.ran.append(layer.layer_id)

        self.ran: list[int] = []
        self.layers = list(range(LAYERS))
        self.is_draft_worker = False
        self.at_layer: Any = None
        model = self

        def raw(runner: Any, forward_batch: Any, *_args: Any) -> Any:
            mode = SimpleNamespace(is_idle=bool, is_decode=bool, is_mixed=bool)
            for number in model.layers:
                if model.at_layer is not None:
                    model.at_layer(number)
                layer = SimpleNamespace(layer_id=number)
                call = {"layer": layer} if number % 2 else {}
                args = (None, None, None) if call else (None, None, None, layer)
                runner.attn_backend.forward(
                    *args, forward_batch=SimpleNamespace(forward_mode=mode), **call
                )
            return "logits"

        monkeypatch.setattr(ModelRunner, "forward", raw)

        def run_batch(scheduler: Any, batch: Any, pp_proxy_tensors: Any = None) -> Any:
            for runner in model.runners:
                result = runner.forward(batch)
            return result

        monkeypatch.setattr(Scheduler, "run_batch", run_batch)
        self.runner = ModelRunner.__new__(ModelRunner)
        self.runner.is_draft_worker = False
        self.runner.attn_backend = Backend()
        self.runner.device = "cpu"
        self.runners = [self.runner]
        self.backend = Backend
        self.pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
        rows = torch.arange(4 * 64, dtype=torch.int32).reshape(4, 64)
        self.scheduler = Scheduler.__new__(Scheduler)
        self.scheduler.req_to_token_pool = SimpleNamespace(req_to_token=rows)
        self.scheduler.token_to_kv_pool_allocator = SimpleNamespace(
            page_size=PAGE,
            translate_kv_indices_for_transfer=lambda slots: slots,
            get_kvcache=lambda: self.pool,
        )
        self.originals = (run_batch, raw)
        self.layerwise = Layerwise(
            sink, sink, 1 << 20, range(LAYERS), by_position=True, has_streams=has_streams
        )
        # A forward of this model is over in microseconds.
        self.layerwise._pace = Seeming(SLOW_S)
        self.sink = sink

    def run(self, *requests: Any, mode: str = "EXTEND", load: int = -1) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch = SimpleNamespace(
            reqs=list(requests),
            forward_mode=ForwardMode[mode],
            extend_num_tokens=sum(r.extend_end for r in requests),
            hicache_consumer_index=load,
        )
        self.ran.clear()
        return self.scheduler.run_batch(batch)
