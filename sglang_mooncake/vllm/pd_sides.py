# SPDX-License-Identifier: Apache-2.0
"""A rank's engine, its memory there, and its side of the hand-over."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import te
from bootstrap_server import Rank, RankRecord
from sglang_mooncake.context import RankContext, engine_label
from sglang_mooncake.decode_side import CompletionBuffer, DecodeSide
from sglang_mooncake.explain.questions import answers
from sglang_mooncake.layout import Place
from sglang_mooncake.prefill_side import PrefillSide
from sglang_mooncake.stats import Recorder
from sglang_mooncake.vllm.facts import block_tokens
from sglang_mooncake.vllm.page_map import CacheTensor
from sglang_mooncake.vllm.pd_decode import DecodeWorker
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.pd_prefill import PrefillWorker
from sglang_mooncake.vllm.pd_rank import context_of, layout_of
from te.config import TRANSPORTS
from te.memory import Remote

__all__ = ["DecodeRank", "PrefillRank"]

#: Far more than prompts that one server holds.
TRANSFERS_MAX: Final = 16_384

#: (address, bytes) of each range.
Memory = Sequence[tuple[int, int]]


def _who(context: RankContext) -> str:
    """For `te top`."""
    part = f" (tp {context.coords.tp})" if context.config.topology.tp_size > 1 else ""
    return f"vLLM {context.role}{part}"


class _Rank:
    """What both have. ``close`` ends its threads and connections."""

    context: RankContext

    def __init__(
        self, config: Any, options: PdOptions, host: str, memory: Memory, remote: Remote
    ) -> None:
        self.engine = te.Engine(
            te.Config(
                host=host,
                keys=options.keys.data,
                transports=options.transports or TRANSPORTS,
                nics=options.nics,
                stall_timeout_s=options.stall_timeout_s,
                max_queued_transfers=TRANSFERS_MAX,
                label=engine_label(_who(self.context), str(config.model_config.model)),
            )
        )
        try:
            for address, nbytes in memory:
                self.engine.register(address, nbytes, remote=remote)
        except BaseException:
            self.engine.close()
            raise

    @property
    def name(self) -> str:
        """For sentences."""
        return self.context.name

    def _record_rooms(self, options: PdOptions) -> Recorder:
        recorder = Recorder(self.context, {}, self.engine.stats, options.stats_dir)
        self.engine.add_answers(answers(recorder, self.context))
        return recorder


class PrefillRank(_Rank):
    """Peers read and write nothing of its KV cache."""

    def __init__(
        self,
        config: Any,
        options: PdOptions,
        host: str,
        caches: Sequence[CacheTensor],
        kernel: str,
        memory: Memory,
        place: Place,
    ) -> None:
        """``place``: which of the server's ranks this is. Raises ``te.Error``, ``zmq.ZMQError`` or
        ``ValueError`` for what cannot be opened."""
        layout = layout_of(config, caches, kernel, place)
        self.context = context_of("prefill", options, layout, place, host)
        super().__init__(config, options, host, memory, "none")
        self._side = PrefillSide(self.context, self.engine, layout, self._record_rooms(options))
        port = self._side.start()
        self.record: RankRecord | None = RankRecord(
            self.context.config,
            Rank(place.coords, host, port, self.engine.epoch, control_key=self._side.control_key),
        )
        self.worker = PrefillWorker(self._side, block_tokens(config))

    def close(self) -> None:
        """Idempotent."""
        self._side.close()
        self.engine.close()


class DecodeRank(_Rank):
    """Its KV cache is open for the prefill ranks that it has asked, for each request anew."""

    record: RankRecord | None = None

    def __init__(
        self,
        config: Any,
        options: PdOptions,
        host: str,
        caches: Sequence[CacheTensor],
        kernel: str,
        memory: Memory,
        place: Place,
    ) -> None:
        """As of ``PrefillRank``."""
        layout = functools.partial(layout_of, config, caches, kernel, place)
        self.context = context_of("decode", options, layout(), place, host)
        super().__init__(config, options, host, memory, "tagged")
        completions = CompletionBuffer(self.engine)
        self._side = DecodeSide(
            self.context,
            self.engine,
            layout(completions.buffers),
            completions,
            self._record_rooms(options),
            options.registries,
            options.link_timeout_s,
        )
        self._side.start()
        self.worker = DecodeWorker(self._side)

    def close(self) -> None:
        """Idempotent."""
        self._side.close()
        self.engine.close()
