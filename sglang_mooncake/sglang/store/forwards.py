# SPDX-License-Identifier: Apache-2.0
"""How long a rank takes to compute a token of a prompt, from its own forwards.

SGLang tells nobody, so `ModelRunner.forward` is hooked while a store lives. Only forwards over
prompts count that load nothing meanwhile. On a GPU two events of the stream tell the time, and
nobody waits for them.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.model_executor.model_runner import ModelRunner

from kvstore.client.admission import Speed
from sglang_mooncake.sglang.layerwise.forward import Streams
from sglang_mooncake.sglang.layerwise.internals import EXTEND
from sglang_mooncake.sglang.layerwise.patch import Patches

__all__ = ["Forwards"]

logger = logging.getLogger(__name__)

TOKENS_MIN: Final = 64
"""Forwards over fewer take as long as over many, and say nothing of one token."""
UNTIMED_MAX: Final = 8
"""Forwards that a GPU has not ended yet; of more, the oldest are not counted."""


class Forwards:
    """Of one process; for as long as ``close`` was not called. Thread-safe."""

    def __init__(self, *, has_streams: bool) -> None:
        """``has_streams``: whether forwards run on a GPU's streams."""
        self._streams = Streams() if has_streams else None
        self._patches = Patches()
        self._lock = threading.Lock()
        self._speed = Speed()
        self._untimed: deque[tuple[Any, Any, int]] = deque(maxlen=UNTIMED_MAX)
        self._off = False
        if "forward_batch" in inspect.signature(ModelRunner.forward).parameters:
            self._patches.around(ModelRunner, "forward", self._forward)
        else:
            self._give_up("SGLang's ModelRunner.forward takes no forward_batch")

    def close(self) -> None:
        """SGLang's class is as before. Idempotent."""
        self._off = True
        self._patches.undo()

    def seconds_per_token(self) -> float | None:
        """None before some forwards were measured."""
        self._try(self._collect)
        return None if self._off else self._speed.seconds_per_unit

    def _collect(self) -> None:
        """Counts the forwards that have ended."""
        with self._lock:
            while self._untimed:
                began, ended, tokens = self._untimed[0]
                if self._streams is None:
                    took_s = ended - began
                elif ended.query():
                    took_s = began.elapsed_time(ended) / 1000
                else:
                    return
                self._untimed.popleft()
                self._speed.took(took_s, tokens)

    def _forward(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """In SGLang's scheduler thread, which it must never make fail."""
        began: Any = None
        tokens = 0

        def begin() -> None:
            nonlocal began, tokens
            tokens = _tokens(runner, *args, **kwargs)
            began = self._now() if tokens >= TOKENS_MIN else None

        def end() -> None:
            self._untimed.append((began, self._now(), tokens))
            self._collect()

        self._try(begin)
        result = original(runner, *args, **kwargs)
        if began is not None:
            self._try(end)
        return result

    def _try(self, work: Callable[[], None]) -> None:
        """What raises is not tried again."""
        if self._off:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001
            self._give_up(repr(error))

    def _now(self) -> Any:
        """This point of the stream, or of time."""
        return self._streams.event(timing=True) if self._streams else time.perf_counter()

    def _give_up(self, reason: str) -> None:
        self._off = True
        logger.warning(
            "the store loads whatever it finds: how fast this server computes cannot be seen (%s)",
            reason,
        )


def _tokens(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> int:
    """That a forward computes of prompts; 0 if it does something else, too."""
    if runner.is_draft_worker or forward_batch.forward_mode.name != EXTEND:
        return 0
    counter = runner.token_to_kv_pool.layer_transfer_counter
    if counter is not None and counter.consumer_index >= 0:
        return 0  # It waits for pages that are loaded.
    return int(forward_batch.extend_num_tokens or 0)
