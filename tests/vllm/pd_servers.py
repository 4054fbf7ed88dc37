# SPDX-License-Identifier: Apache-2.0
"""Servers of vLLM on the CPU: a prefill server with two TP ranks and decode servers with other
numbers, and what one ordinary server has answered to the same requests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.traffic import Answer, Request, compare
from cpu_serving.vllm_proxy import Proxy
from cpu_serving.vllm_servers import (
    VllmServer,
    ask,
    counters,
    handed_over,
    pair_flags,
    start_vllm,
)

PREFILL_TP = 2
#: No server takes one for dead that a busy machine has not run for some seconds.
PATIENT = {"link_timeout_s": 30, "silence_timeout_s": 30, "stall_timeout_s": 30}


@dataclass
class Servers:
    prefill: VllmServer
    #: By their TP ranks.
    decodes: dict[int, VllmServer]
    stats: Path
    requests: list[Request]
    #: What an ordinary server has answered.
    expected: list[Answer]

    def check_answers(self, decode_tp: int) -> None:
        """The prefill server with that decode server answers as the ordinary one, and the prompts
        were handed over."""
        decode, before = self.decodes[decode_tp], counters(self.stats, "prefill")
        with Proxy(self.prefill.url, decode.url) as proxy:
            answers = ask(proxy, self.requests)
        assert not compare(self.expected, answers)
        label = 'source="external_kv_transfer"'
        came = decode.metric("vllm:prompt_tokens_by_source_total", label)
        tokens = sum(len(one.input_ids) for one in self.requests)
        # A last token of each is computed on the decode server.
        assert tokens - came <= len(self.requests), f"{came:g} of {tokens} came\n{self.warnings()}"
        rooms = before.get("done", 0) + len(self.requests) * PREFILL_TP
        assert handed_over(self.stats, rooms) > before.get("bytes", 0)

    def warnings(self) -> str:
        """The lines of the servers' logs about prompts that did not come, and about errors."""
        lines = [
            line
            for server in (self.prefill, *self.decodes.values())
            for line in server.process.log_text().splitlines()
            if any(word in line for word in ("[pd_", "KV load", "ERROR"))
        ]
        return "\n".join(lines)


@contextmanager
def started(
    directories: pytest.TempPathFactory,
    nursery: Nursery | None,
    model: str,
    requests: list[Request],
    decode_tps: Sequence[int],
    more: Sequence[str] = (),
) -> Iterator[Servers]:
    """``nursery``: without one they start as programs. ``model``: a name of `make_model`. ``more``:
    flags of all servers."""
    path, stats = make_model(model), directories.mktemp("stats")
    with (
        tempfile.TemporaryDirectory(prefix="kv") as runtime,
        Fleet(directories.mktemp("vllm"), nursery) as fleet,
    ):
        place = Path(runtime)
        alone = start_vllm(fleet, "alone", path, place, more)
        flags = pair_flags(
            "kv_producer", registry_port=fleet.port(), stats_dir=str(stats), **PATIENT
        )
        prefill = start_vllm(fleet, "prefill", path, place, [*more, *flags], tp=PREFILL_TP)
        flags = [*more, *pair_flags("kv_consumer", **PATIENT)]
        decodes = {
            tp: start_vllm(fleet, f"decode-{tp}", path, place, flags, core=1, tp=tp)
            for tp in decode_tps
        }
        wait_ready([alone, prefill, *decodes.values()])
        expected = ask(alone, requests)
        alone.stop()
        yield Servers(prefill, decodes, stats, requests, expected)
