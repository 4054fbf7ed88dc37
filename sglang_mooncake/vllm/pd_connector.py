# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode servers of vLLM: a prompt's blocks go from the server that has computed them
into blocks of the one that generates, by the same hand-over as between SGLang's servers.

    --kv-transfer-config '{"kv_connector": "PDConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "sglang_mooncake.vllm.pd_connector"}'

The prefill server answers a request of one token with ``kv_transfer_params``, which a proxy gives
to the decode server with the same prompt. Written against vLLM's
`vllm/distributed/kv_transfer/kv_connector/v1/base.py`. vLLM makes one connector in the
scheduler's process, and one in each TP worker's; each is asked its own half of the methods. A
request is sent or loaded once all workers have named it, and a block has failed if one of them says
so (`KVOutputAggregator` in `kv_connector/utils.py`).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from bootstrap_server import RankRecord
from sglang_mooncake.links.sockets import numeric_address
from sglang_mooncake.vllm.facts import block_tokens
from sglang_mooncake.vllm.kernels import cache_tensors, kernel_of, plain
from sglang_mooncake.vllm.page_map import PageMap
from sglang_mooncake.vllm.pd_offers import DECODE_ELSEWHERE, PREFILLED, Offer, prompt_digest
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.pd_rank import (
    check_exposure,
    check_pair_server,
    place_of,
    role_of,
    server_facts,
)
from sglang_mooncake.vllm.pd_registry import Registration
from sglang_mooncake.vllm.pd_requests import GivenUp, Load, Loads, Release, Send, send_of
from sglang_mooncake.vllm.pd_sides import DecodeRank, PrefillRank
from sglang_mooncake.vllm.seam import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    RequestStatus,
    SupportsHMA,
    get_ip,
    get_tensor_model_parallel_rank,
    logger,
    release,
)

__all__ = ["PDConnector"]

#: Rooms are numbers that every proxy's JSON can carry.
ROOM_BITS: Final = 53
#: Of a request whose blocks hold its whole prompt.
COMPUTED: Final = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class RankFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler's process as it starts.

    server: see ``Offer.server``.
    record: of a prefill rank, for the registry.
    """

    server: dict[str, str]
    record: RankRecord | None


@dataclass
class StepWork(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler wants of the worker beside one step."""

    sends: list[Send] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    given_up: list[GivenUp] = field(default_factory=list)


class PDConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One process's part."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ``ValueError`` for a server or a setting that cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_pair_server(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._options = PdOptions.of(extra)
        self._is_prefill = role_of(vllm_config) == "prefill"
        self._block_tokens = block_tokens(vllm_config)
        self._host = numeric_address(self._options.host or str(get_ip()))
        warning = check_exposure(self._options, self._host)
        if warning is not None and role == KVConnectorRole.WORKER:
            logger.warning("%s", warning)
        #: The scheduler's half.
        self._registration: Registration | None = None
        self._server: dict[str, str] = {}
        self._requests = Loads(self._block_tokens)
        self._work = StepWork()
        #: A worker's half.
        self._rank: PrefillRank | DecodeRank | None = None
        self._facts: RankFacts | None = None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """vLLM 0.33 and later ask before the server starts. Registrations of the KV cache
        stay for the server's life, and sleep takes the memory away."""
        return False

    # -- the scheduler's process

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankFacts]) -> None:
        """What the TP workers have said, by rank. A prefill server's ranks are known to decode
        servers then."""
        facts = [metadata[rank] for rank in sorted(metadata)]
        self._server = facts[0].server
        records = [one.record for one in facts if one.record is not None]
        if records:
            self._registration = Registration(self._options, self._host, records)

    def on_new_request(self, request: Any) -> None:
        """Whether its prompt is to be had from a prefill server."""
        params = request.kv_transfer_params
        if self._is_prefill or not params or not params.get(PREFILLED):
            return
        name = request.request_id
        try:
            offer = Offer.of(params)
        except ValueError as error:
            logger.warning("request %s: %s; its prompt is computed here", name, error)
            return
        if not self._requests.new(name, offer):
            logger.info("request %s: another one has its prompt's offer", name)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens its prefill server has behind those; they come while others are
        computed."""
        name = request.request_id
        offer = self._requests.to_compare(name)
        refusal = None if offer is None else self._refusal(request, offer)
        if refusal is not None:
            logger.warning("request %s: %s. Its prompt is computed here", name, refusal)
            self._work.releases.append(self._requests.refuse(name, refusal))
        tokens = self._requests.match(name, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks, into which this many tokens are loaded."""
        (numbers,) = blocks.get_block_ids()
        match self._requests.given(request.request_id, numbers, num_external_tokens):
            case Load() as load:
                self._work.loads.append(load)
            case Release() as release:
                self._work.releases.append(release)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:  # noqa: ARG002
        """What the worker is to do beside this step."""
        work, self._work = self._work, StepWork()
        if self._registration is not None:
            work.given_up = self._registration.take_given_up()
        return work

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM keeps its blocks until the worker names it; and the answer for the proxy."""
        release = self._requests.finished(request.request_id)
        if release is not None:
            self._work.releases.append(release)
            return True, None
        params = request.kv_transfer_params
        if not self._is_prefill or not params or not params.get(DECODE_ELSEWHERE):
            return False, None
        prompt = self._digest(request)
        if request.status not in COMPUTED or prompt is None:
            return False, None
        assert self._registration is not None, "vLLM passes on what its workers say first"
        room, tokens = secrets.randbits(ROOM_BITS), request.num_prompt_tokens
        self._work.sends.append(
            send_of(request.request_id, room, tokens, block_ids, self._block_tokens)
        )
        offer = Offer(self._registration.address, room, tokens, prompt, self._server)
        return True, offer.params()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``; there is one group."""
        return self.request_finished(request, block_ids[0])

    def _refusal(self, request: Any, offer: Offer) -> str | None:
        """Why it cannot be taken."""
        prompt = self._digest(request)
        if prompt is None:
            return "a prompt of embeddings is not handed over"
        return offer.refusal(request.num_prompt_tokens, prompt, self._server)

    def _digest(self, request: Any) -> str | None:
        """Of its prompt; None where that has no tokens."""
        tokens = request.prompt_token_ids
        if tokens is None or request.prompt_embeds is not None:
            return None
        others = [str(one.identifier) for one in request.mm_features]
        if request.lora_request is not None:
            others.append(f"LoRA {request.lora_request.lora_name}")
        return prompt_digest(tokens, self._block_tokens, request.block_hashes, others)

    # -- a worker's process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's KV cache, by the names of layers: it is what is sent, or written."""
        config, options = self._vllm_config, self._options
        tensors = cache_tensors(kv_caches)
        caches = [plain(one) for one in tensors]
        pages = PageMap(caches, self._kv_cache_config.num_blocks)
        kernel = kernel_of(config)
        server = server_facts(config, pages, kernel, options.weights, release)
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
        memory = [(address, one.nbytes()) for address, one in storages.items()]
        place = place_of(config, get_tensor_model_parallel_rank())
        kind = PrefillRank if self._is_prefill else DecodeRank
        self._rank = kind(config, options, self._host, caches, kernel, memory, place)
        self._facts = RankFacts(server, self._rank.record)
        logger.info("%s hands over: %s", self._rank.name, server)

    def get_handshake_metadata(self) -> RankFacts | None:
        """For the scheduler's process."""
        return self._facts

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Leaves the step's work to the hand-over's threads."""
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        if isinstance(self._rank, PrefillRank):
            for send in work.sends:
                self._rank.worker.send(send)
            for prompt in work.given_up:
                self._rank.worker.give_up(prompt)
        elif isinstance(self._rank, DecodeRank):
            for load in work.loads:
                self._rank.worker.load(load)
            for release in work.releases:
                self._rank.worker.release(release)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are computed once all of their blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are sent once all of the prompt is computed."""

    def wait_for_save(self) -> None:
        """Blocks are sent behind the step, while vLLM keeps them."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are not read any more, and those whose blocks are filled."""
        if isinstance(self._rank, PrefillRank):
            return self._rank.worker.take_sent(), None
        if isinstance(self._rank, DecodeRank):
            worker = self._rank.worker
            worker.abort(finished_req_ids)
            return worker.take_released(), worker.take_loaded()
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come; vLLM computes them, or fails their request."""
        return self._rank.worker.take_failed() if isinstance(self._rank, DecodeRank) else set()

    # -- both

    def shutdown(self) -> None:
        """Nothing reads or writes the KV cache after this."""
        if self._registration is not None:
            self._registration.close()
        if self._rank is not None:
            self._rank.close()
