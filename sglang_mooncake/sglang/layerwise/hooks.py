# SPDX-License-Identifier: Apache-2.0
"""The hooks on a prefill server's forwards: its KV leaves in groups of layers while the forward
still runs. What does not go so goes with `send()` after it, as without these hooks."""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from sglang.version import __version__

from sglang_mooncake.layer_groups import ForwardPace, borders
from sglang_mooncake.sglang.layerwise.forward import Figures, Forward, LayerSink, Part, Streams
from sglang_mooncake.sglang.layerwise.internals import (
    EXTEND,
    KNOWN_POOLS,
    missing,
    mode_in_the_way,
)
from sglang_mooncake.sglang.layerwise.patch import Patches
from sglang_mooncake.sglang.layerwise.spans import LeftOut, Span, gather, span_of
from sglang_mooncake.sglang.releases import Mode, lacking

__all__ = ["Layerwise"]

logger = logging.getLogger(__name__)

#: Forwards whose time is not known yet: overlap scheduling has two under way.
_UNTIMED_MAX = 8


class Layerwise:
    """One per manager of a prefill rank. All of it runs in the scheduler's thread and never waits.

    Args:
        page_nbytes: bytes of one page in all layers of this rank.
        kv_layers: numbers that the rank's layout gives to its layers.
        by_position: SGLang gives no numbers: they are positions among the buffers.
        has_streams: whether forwards run on a device's streams (`seam.pins_host_memory`).
    """

    def __init__(
        self,
        sink: LayerSink,
        figures: Figures,
        page_nbytes: int,
        kv_layers: Iterable[int],
        *,
        by_position: bool,
        has_streams: bool,
    ) -> None:
        self._sink, self._figures, self._page_nbytes = sink, figures, page_nbytes
        self._kv_layers, self._by_position = frozenset(kv_layers), by_position
        self._streams = Streams() if has_streams else None
        self._patches = Patches()
        self._pace = ForwardPace()
        self._untimed: deque[Forward] = deque(maxlen=_UNTIMED_MAX)
        self._said: set[str] = set()
        #: The model's layers, rising, as one forward has run them; none before. And those of them
        #: that have KV: with linear attention a part has none.
        self._numbers: tuple[int, ...] = ()
        self._with_kv: tuple[int, ...] = ()
        #: Classes of attention backends whose `forward` is hooked.
        self._backends: set[type] = set()
        #: What is under way in this thread: a batch of prompts (scheduler, batch), its forward.
        self._batch: tuple[Any, Any] | None = None
        self._forward: Forward | None = None
        #: Why nothing goes early any more.
        self.off: str | None = None

    def install(self) -> bool:
        """Hooks SGLang's classes; False, with a line in the log, where that cannot be."""
        reason = lacking(Mode.LAYERWISE, __version__) or missing() or mode_in_the_way()
        if reason is None and not self._sink.by_layers:
            reason = "the caches of this rank are not told apart by layers"
        if reason is not None:
            self._turn_off(reason)
            return False
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.model_executor.model_runner import ModelRunner

        self._patches.around(Scheduler, "run_batch", self._run_batch)
        self._patches.around(ModelRunner, "forward", self._model_forward)
        return True

    def close(self) -> None:
        """Undoes the hooks. Idempotent."""
        self.off = self.off or "closed"
        self._patches.undo()

    # --- the hooks ---

    def _run_batch(
        self, original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.off is None and batch.reqs and batch.forward_mode.name == EXTEND:
            self._batch = (scheduler, batch)
        try:
            return original(scheduler, batch, *args, **kwargs)
        finally:
            self._batch = None

    def _model_forward(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang sends cached prefixes within `run_batch`, so that spans are known only here."""
        if self._batch is None or runner.is_draft_worker:
            return original(runner, *args, **kwargs)
        batch, self._batch = self._batch, None  # the model itself runs once for a batch
        try:
            self._forward = self._begin(*batch, runner)
        except Exception as error:  # noqa: BLE001 - whatever it is, see _give_up
            self._give_up(error)
        if self._forward is None:
            return original(runner, *args, **kwargs)
        try:
            result = original(runner, *args, **kwargs)
        except BaseException:
            self._forward = None
            raise
        forward, self._forward = self._forward, None
        try:
            if forward is not None:
                self._end(forward)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
        return result

    def _attention(
        self, layer_at: int, original: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._forward is not None:
            layer = kwargs.get("layer")
            if layer is None and len(args) > layer_at:
                layer = args[layer_at]
            if layer is not None:
                try:
                    self._forward.begins(layer.layer_id)
                except Exception as error:  # noqa: BLE001
                    self._give_up(error)
        return original(backend, *args, **kwargs)

    def _give_up(self, error: Exception) -> None:
        """A mistake in here must not end SGLang's scheduler: what has not gone early goes with
        `send()`."""
        logger.error("a forward whose KV was to go layer by layer", exc_info=error)
        self._forward = None
        self._turn_off("an internal error, logged above")

    # --- a forward ---

    def _begin(self, scheduler: Any, batch: Any, runner: Any) -> Forward | None:
        began_s = time.perf_counter()
        allocator, streams = scheduler.token_to_kv_pool_allocator, self._streams
        if not self._hooked(runner, allocator):
            return None
        tokens = int(batch.extend_num_tokens)
        if not self._numbers:
            self._fall_back("a server's first forward", len(batch.reqs))
            return Forward(self._sink, (), (), streams, tokens)
        self._learn()
        spans = self._spans(batch, allocator.page_size)
        if not spans:
            return None
        pages = sum(-(-(span.end - span.start) // allocator.page_size) for span in spans)
        at = borders(
            len(self._with_kv),
            pages * self._page_nbytes // len(self._with_kv),
            self._sink.bytes_per_s,
            self._pace.forward_s(tokens),
            self._pace.hand_over_s * len(spans),
        )
        if not at:
            self._pace.nothing_went()
            self._fall_back("forwards too short to gain anything", len(spans))
        parts = []
        for span in spans if at else ():
            parts.append(Part(span, gather(scheduler, span, streams is not None)))
            span.sender.told_tokens = span.end
        numbers = [self._with_kv[border] for border in at]
        forward = Forward(self._sink, parts, numbers, streams, tokens)
        forward.hook_s = time.perf_counter() - began_s
        return forward

    def _spans(self, batch: Any, page_size: int) -> list[Span]:
        """Of the requests whose KV can go early."""
        if batch.hicache_consumer_index >= 0:
            self._fall_back("batches with pages that HiCache loads back", len(batch.reqs))
            return []
        spans = []
        for request in batch.reqs:
            span = span_of(request, page_size)
            if isinstance(span, LeftOut):
                self._fall_back(span.reason)
            else:
                spans.append(span)
        return spans

    def _end(self, forward: Forward) -> None:
        if not self._numbers:
            self._look(forward.numbers)
        forward.ends(self._numbers[-1] if self._numbers else 0)
        self._untimed.append(forward)
        if forward.broken:
            self._turn_off("the model runs layers more than once")
        elif forward.hand_overs:
            each_s = forward.hand_over_s / (forward.hand_overs * len(forward.parts))
            self._pace.hand_over_took(each_s)
        elif forward.parts:
            self._fall_back("forwards whose layers the hooks do not see", len(forward.parts))
        if forward.parts:
            self._figures.forward_hooked(forward.hook_s * 1e6)

    def _look(self, numbers: list[int]) -> None:
        """The first forward is only looked at. Its layers must rise, for what follows from one's
        beginning to be true of those below it. And attention must count them as the layout does:
        where that counts buffers, each layer must have some (with sliding windows a part has)."""
        seen = set(numbers)
        if len(seen) < 2:
            return
        if numbers != sorted(numbers):
            self._turn_off("the model does not run its layers in their order")
        elif not self._kv_layers <= seen or (self._by_position and seen != self._kv_layers):
            self._turn_off(
                f"attention runs in {len(seen)} layers, and its caches are those of "
                f"{len(self._kv_layers)} others"
            )
        else:
            self._numbers = tuple(dict.fromkeys(numbers))
            self._with_kv = tuple(sorted(self._kv_layers))

    def _learn(self) -> None:
        """Takes up the times of forwards that are over by now."""
        while self._untimed and (seconds := self._untimed[0].seconds()) is not None:
            self._pace.forward_took(seconds, self._untimed.popleft().tokens)

    def _hooked(self, runner: Any, allocator: Any) -> bool:
        """Whether the attention backend of this forward tells of its layers, from now on."""
        backend = type(runner.attn_backend)
        if backend in self._backends:
            return True
        pool = type(allocator.get_kvcache())
        parameters = list(inspect.signature(inspect.unwrap(backend.forward)).parameters)
        if f"{pool.__module__}.{pool.__qualname__}" not in KNOWN_POOLS:
            self._turn_off(f"the KV pool is a {pool.__qualname__}")
        elif "layer" not in parameters:
            self._turn_off(f"{backend.__qualname__}.forward takes no layer")
        elif self._streams is None and runner.device != "cpu":
            self._turn_off(f"torch has no pinned memory and events for {runner.device}")
        else:
            self._backends.add(backend)
            layer_at = parameters.index("layer") - 1  # without `self`
            self._patches.around(backend, "forward", partial(self._attention, layer_at))
            return True
        return False

    # --- what does not go early ---

    def _fall_back(self, reason: str, requests: int = 1) -> None:
        for _ in range(requests):
            self._figures.fell_back(reason)
        if reason not in self._said:
            self._said.add(reason)
            logger.info("KV goes after the forward, not layer by layer: %s", reason)

    def _turn_off(self, reason: str) -> None:
        self.off = reason
        self._figures.fell_back(reason)
        logger.warning("KV does not go layer by layer: %s", reason)
