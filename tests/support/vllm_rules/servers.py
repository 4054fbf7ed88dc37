# SPDX-License-Identifier: Apache-2.0
"""A server of vLLM without processes and without a model. Its scheduler, its configuration and what
collects the words of its workers are vLLM's own; both halves of the connector, their engines and
sockets are ours. In the place of a model stands a checksum: a token's keys and values follow from
all tokens before it, and whoever computes a token looks whether all of them are there."""

from __future__ import annotations

import itertools
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from cpu_serving.model import make_model
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from sglang_mooncake.vllm import pd_connector
from sglang_mooncake.vllm.pd_connector import PDConnector

__all__ = [
    "BLOCK",
    "HEADS",
    "NUMBERS",
    "Answer",
    "Server",
    "Worker",
    "caches",
    "config_of",
    "following",
    "until",
]

TIMEOUT_S: Final = 60.0
#: On a busy machine any thread may stop for a while.
PATIENCE_S: Final = 500.0
BLOCK: Final = 16
#: Of the tiny model.
LAYERS, HEADS, NUMBERS = 3, 2, 32
VOCABULARY: Final = 500
FIRST_TOKEN: Final = 2

_serial = itertools.count(1)


def until(condition: Callable[[], Any], what: str) -> None:
    """Waits for it."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.001)


def config_of(role: str, tp: int, policy: str = "recompute", **settings: Any) -> VllmConfig:
    """Of a server with the tiny model."""
    model = ModelConfig(model=str(make_model("llama")), dtype="float32", seed=0)
    scheduler = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=1024,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    transfer = KVTransferConfig(
        kv_connector="PDConnector",
        kv_connector_module_path=PDConnector.__module__,
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={
            "host": "127.0.0.1",
            "weights": "these",
            "silence_timeout_s": PATIENCE_S,
            **settings,
        },
    )
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        parallel_config=ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="mp"),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )


def caches(blocks: int, heads: int = HEADS) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=NUMBERS, dtype=torch.float32
    )
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def checksums(tokens: Sequence[int]) -> list[int]:
    """Of each token, one of all up to it."""
    sums = itertools.accumulate(
        tokens, lambda all_before, one: zlib.crc32(b"%d" % one, all_before), initial=0
    )
    return list(sums)[1:]


def following(tokens: Sequence[int]) -> int:
    """The model's next token."""
    return checksums(tokens)[-1] % VOCABULARY + FIRST_TOKEN


class Worker:
    """One TP rank's: its KV cache, and the worker's half of the connector."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, rank: int) -> None:
        tp = config.parallel_config.tensor_parallel_size
        each, first = max(1, HEADS // tp), rank * HEADS // tp
        self.heads = range(first, first + each)
        #: Shape (layers, blocks, heads, tokens, numbers): keys and values side by side.
        self.memory = torch.full((LAYERS, kv.num_blocks, each, BLOCK, 2 * NUMBERS), -1.0)
        self.connector = PDConnector(config, KVConnectorRole.WORKER, kv)
        names = kv.kv_cache_groups[0].layer_names
        pd_connector.get_tensor_model_parallel_rank = lambda: rank  # type: ignore[attr-defined]
        self.connector.register_kv_caches(dict(zip(names, self.memory, strict=True)))
        #: Whether its model runner's thread stands still; its connections do not.
        self.is_frozen = False
        #: How many loads it has told to have ended.
        self.ended = 0
        self._steps: list[Any] = []

    def expected(self, sums: Sequence[int]) -> torch.Tensor:
        """Of tokens with these checksums, shape (layers, heads, tokens, numbers)."""
        layers = torch.arange(LAYERS).view(-1, 1, 1, 1) * 4096
        heads = torch.tensor(self.heads).view(-1, 1, 1) * 256
        tokens = torch.tensor(sums, dtype=torch.int64).view(-1, 1) % 100_003
        return (layers + heads + tokens + torch.arange(2 * NUMBERS)).float()

    def compute(self, sums: Sequence[int], blocks: Sequence[int], first: int) -> None:
        """The tokens from ``first`` on, after a look at those before."""
        expected = self.expected(sums)
        held = self.memory[:, blocks[: -(-first // BLOCK)]].transpose(1, 2).flatten(2, 3)
        is_right = (held[:, :, :first] == expected[:, :, :first]).all(-1).all(0).all(0)
        wrong = (~is_right).nonzero().flatten().tolist()
        assert not wrong, (
            f"tokens {wrong} of {len(sums)} in blocks {blocks} of the rank with heads {self.heads}"
            " are another one's"
        )
        places = torch.arange(first, len(sums))
        where = torch.tensor(blocks)[places // BLOCK]
        self.memory[:, where, :, places % BLOCK] = expected[:, :, first:].permute(2, 0, 1, 3)

    def step(self, output: Any) -> KVConnectorOutput:
        """Behind a forward. A frozen one does nothing, and all of it once it goes on."""
        self._steps.append(output)
        if self.is_frozen:
            return KVConnectorOutput()
        steps, self._steps = self._steps, []
        sent, loaded, failed = set(), set(), set()
        for one in steps:
            said = self._step(one)
            sent |= said.finished_sending or set()
            loaded |= said.finished_recving or set()
            failed |= said.invalid_block_ids
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=loaded, invalid_block_ids=failed
        )

    def _step(self, output: Any) -> KVConnectorOutput:
        meta = output.kv_connector_metadata
        self.connector.handle_preemptions(meta)
        self.connector.bind_connector_metadata(meta)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        sent, loaded = self.connector.get_finished(output.finished_req_ids)
        failed = self.connector.get_block_ids_with_load_errors()
        self.connector.clear_connector_metadata()
        self.ended += len(loaded or ())
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=loaded, invalid_block_ids=failed
        )


@dataclass
class Answer:
    """To one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    params: dict[str, Any] | None = None


class Server:
    """Its ``step`` is one of vLLM's engine."""

    def __init__(
        self, role: str, tp: int = 1, policy: str = "recompute", blocks: int = 64, **settings: Any
    ) -> None:
        init_none_hash(sha256)
        self.config = config_of(role, tp, policy, **settings)
        kv = caches(blocks)
        self.config.cache_config.num_gpu_blocks = blocks
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
        )
        self.connector: PDConnector = self.scheduler.connector
        self.workers = [Worker(self.config, kv, rank) for rank in range(tp)]
        self.connector.set_xfer_handshake_metadata(
            {rank: one.connector.get_handshake_metadata() for rank, one in enumerate(self.workers)}
        )
        self.aggregator = KVOutputAggregator.from_connector(self.connector, tp)
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.preemptions = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self.workers:
            one.connector.shutdown()
        self.connector.shutdown()

    def add(
        self, tokens: Sequence[int], new_tokens: int = 1, params: Mapping[str, Any] | None = None
    ) -> str:
        """A request; returns its name."""
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        request = Request(
            request_id=f"r{next(_serial)}",
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            mm_features=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        request.kv_transfer_params = None if params is None else dict(params)
        self.scheduler.add_request(request)
        return str(request.request_id)

    def abort(self, name: str) -> None:
        """The client leaves."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step of the engine, whether or not there is something to compute."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        names = list(output.num_scheduled_tokens)
        sampled = [self._compute(name, output.num_scheduled_tokens[name]) for name in names]
        said = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=one.step(output),
            )
            for one in self.workers
        ]
        told = self.aggregator.aggregate(said)
        for outputs in self.scheduler.update_from_output(output, told).values():
            for one in outputs.outputs:
                answer = self.answers[one.request_id]
                answer.tokens += one.new_token_ids
                answer.params = one.kv_transfer_params or answer.params
                if one.finish_reason is not None:
                    answer.finish_reason = str(one.finish_reason)

    def _compute(self, name: str, count: int) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        tokens = request.all_token_ids[:end]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        sums = checksums(tokens)
        for one in self.workers:
            one.compute(sums, blocks, end - count)
        return [following(tokens)] if end == request.num_tokens else []

    def status(self, name: str) -> RequestStatus | None:
        """None for a request that has left no trace."""
        request = self.scheduler.requests.get(name)
        return None if request is None else request.status

    @property
    def used_blocks(self) -> int:
        """Of all requests, those that have ended and are being sent among them. vLLM never uses
        the first block."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    @property
    def is_empty(self) -> bool:
        """Nothing is left of any request."""
        connector = self.connector
        return not (
            self.scheduler.requests
            or self.scheduler.finished_recving_kv_req_ids
            or self.scheduler.failed_recving_kv_req_ids
            or self.used_blocks
            or len(connector._requests)
            or any(_work_left(one) for one in self.workers)
        )


def _work_left(worker: Worker) -> bool:
    rank = worker.connector._rank
    assert rank is not None
    found = vars(rank.worker)
    return any(found.get(name) for name in ("_sending", "_loads", "_releases", "_failed"))
