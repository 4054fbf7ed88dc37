# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler asks of a connector, with several TP ranks on either side. Whoever computes
a token looks whether the keys and values before it are right (`servers.Worker.compute`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from sglang_mooncake.rooms.room import Room
from sglang_mooncake.vllm import pd_rank
from sglang_mooncake.vllm.facts import check_server
from sglang_mooncake.vllm.pd_connector import PDConnector
from sglang_mooncake.vllm.pd_sides import DecodeRank
from vllm_rules.servers import (
    BLOCK,
    HEADS,
    NUMBERS,
    Answer,
    Server,
    Worker,
    caches,
    config_of,
    following,
    until,
)

#: TP ranks of the prefill and of the decode server; the model has two KV heads.
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)]
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
PREFILL = {"do_remote_decode": True}


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(2, 502), k=tokens)


def expected(tokens: Sequence[int], count: int) -> list[int]:
    """The model's answer."""
    all_of_them = list(tokens)
    for _ in range(count):
        all_of_them.append(following(all_of_them))
    return all_of_them[len(tokens) :]


def room_of(worker: Worker, name: str) -> Room:
    """Of a request that a decode rank loads."""
    rank = worker.connector._rank
    assert isinstance(rank, DecodeRank)
    return rank.worker._loads[name].room


@dataclass
class Pair:
    prefill: Server
    decode: Server

    def step(self) -> None:
        self.prefill.step()
        self.decode.step()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        until(lambda: self.step() or condition(), what)

    def prefilled(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The prefill server's word for the decode server."""
        name = self.prefill.add(tokens, 1, PREFILL)
        answers = self.prefill.answers
        self.until(lambda: answers[name].finish_reason, "the prompt is computed")
        params = answers[name].params
        assert params is not None
        return params

    def decoded(self, tokens: Sequence[int], new_tokens: int = 4) -> str:
        """A request that the decode server has been sent."""
        return self.decode.add(tokens, new_tokens, self.prefilled(tokens))

    def decoded_while_frozen(
        self, tokens: Sequence[int], ranks: Sequence[Worker], new_tokens: int = 4
    ) -> str:
        """As `decoded`. These ranks of the prefill server stand still once they have computed."""
        params = self.prefilled(tokens)
        for one in ranks:
            one.is_frozen = True
        self.step()
        return self.decode.add(tokens, new_tokens, params)

    def answer(self, name: str) -> Answer:
        self.until(lambda: self.decode.answers[name].finish_reason, "the answer is there")
        return self.decode.answers[name]

    def until_asked(self, name: str) -> None:
        """All decode ranks have asked for their parts of this request."""
        self.until(lambda: self.decode.status(name) is LOADING, "it loads")
        rooms = [room_of(one, name) for one in self.decode.workers]
        # One whose part has come is not REQUESTED any more.
        self.until(lambda: all(one.view.exposed for one in rooms), "all have asked")

    def until_empty(self) -> None:
        """Nothing is left of any request on either server."""
        servers = (self.prefill, self.decode)
        self.until(lambda: all(one.is_empty for one in servers), "nothing is left")

    def ended(self) -> list[int]:
        """How many loads have ended on each decode rank."""
        return [one.ended for one in self.decode.workers]


@contextmanager
def pair(
    sizes: tuple[int, int] = (2, 2),
    policy: str = "recompute",
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> Iterator[Pair]:
    """``prefill``, ``decode``: see ``Server``."""
    more = {"registry_port": 0, **(prefill or {})}
    with ExitStack() as stack:
        first = stack.enter_context(Server("kv_producer", sizes[0], **more))
        second = stack.enter_context(Server("kv_consumer", sizes[1], policy, **(decode or {})))
        yield Pair(first, second)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_pair_answers_as_one_server(sizes: tuple[int, int]) -> None:
    with pair(sizes) as two:
        prompts = [prompt(seed, tokens) for seed, tokens in enumerate((3, 16, 33, 70, 150))]
        prompts.append(prompts[-1][:100] + prompt(9, 20))  # the decode server has its beginning
        for tokens in prompts:
            name = two.decoded(tokens, 20)
            assert two.answer(name).tokens == expected(tokens, 20)
        two.until_empty()


def test_a_prompt_is_held_until_it_is_sent() -> None:
    with pair() as two:
        tokens = prompt(1, 70)
        params = two.prefilled(tokens)
        for _ in range(5):
            two.step()
        assert two.prefill.used_blocks == 5
        name = two.decode.add(tokens, 2, params)
        assert two.answer(name).tokens == expected(tokens, 2)
        two.until_empty()


def test_a_prompt_of_which_a_client_leaves_is_not_held() -> None:
    with pair() as two:
        name = two.prefill.add(prompt(1, 200), 1, PREFILL)
        two.step()
        two.prefill.abort(name)
        two.step()
        assert two.prefill.answers[name].params is None
        assert two.prefill.is_empty


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)])
def test_a_request_of_which_one_ranks_part_fails_waits_for_the_others(
    sizes: tuple[int, int], policy: str
) -> None:
    """The rank that fails first names blocks into which another one still loads."""
    with pair(sizes, policy) as two:
        tokens = prompt(1, 70)
        name = two.decoded_while_frozen(tokens, two.prefill.workers)
        two.until_asked(name)
        *others, last = two.decode.workers
        for one in others:
            one.connector._rank._side.fail(room_of(one, name), "a part that does not come")
        two.until(lambda: others[0].ended, "the first rank has told")
        assert two.decode.used_blocks >= 5, "blocks into which the last rank loads are kept"
        assert not last.ended
        if policy == "fail":
            assert two.decode.answers[name].finish_reason == "error"
        for one in two.prefill.workers:
            one.is_frozen = False
        if policy == "recompute":
            assert two.answer(name).tokens == expected(tokens, 4)
        two.until_empty()


def test_a_prefill_rank_that_is_gone_fails_the_request_alone() -> None:
    with pair() as two:
        waits = prompt(1, 70)
        name = two.decoded_while_frozen(waits, two.prefill.workers[1:])
        two.until(lambda: two.decode.workers[0].ended, "the first rank has its part")
        assert two.decode.status(name) is LOADING
        two.prefill.workers[1].connector.shutdown()
        assert two.answer(name).tokens == expected(waits, 4)
        other = two.decode.add(prompt(2, 40), 3)
        assert two.answer(other).tokens == expected(prompt(2, 40), 3)
        until(lambda: two.decode.step() or two.decode.is_empty, "nothing is left")


@pytest.mark.parametrize("sizes", SIZES)
def test_a_request_that_ends_while_it_loads_leaves_nothing(sizes: tuple[int, int]) -> None:
    with pair(sizes) as two:
        tokens = prompt(1, 70)
        name = two.decoded_while_frozen(tokens, two.prefill.workers)
        two.until_asked(name)
        two.decode.abort(name)
        for one in two.prefill.workers:
            one.is_frozen = False
        two.until_empty()


def test_a_request_that_ends_between_ranks_leaves_nothing() -> None:
    """One rank has its part, the other one not."""
    with pair() as two:
        tokens = prompt(1, 70)
        name = two.decoded_while_frozen(tokens, two.prefill.workers[1:])
        two.until(lambda: two.decode.workers[0].ended, "the first rank has its part")
        two.decode.abort(name)
        two.step()
        assert two.decode.status(name) is RequestStatus.FINISHED_ABORTED
        two.until(lambda: two.decode.is_empty, "the second rank has given up")
        two.prefill.workers[1].is_frozen = False
        two.until_empty()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_a_prompt_of_which_no_use_is_made_is_let_go(sizes: tuple[int, int]) -> None:
    """The decode server's blocks are all in use, and the client leaves."""
    with pair(sizes, decode={"blocks": 9}) as two:
        tokens = prompt(1, 70)
        params = two.prefilled(tokens)
        first = two.decode.add(prompt(2, 100), 20)
        two.decode.step()
        name = two.decode.add(tokens, 4, params)
        two.decode.step()
        assert two.decode.status(name) is RequestStatus.WAITING
        two.decode.abort(name)
        assert two.answer(first).tokens == expected(prompt(2, 100), 20)
        two.until_empty()


def test_requests_that_are_preempted_are_right_and_do_not_load_again() -> None:
    with pair((2, 1), decode={"blocks": 20}) as two:
        prompts = [prompt(seed, 60) for seed in range(3)]
        names = [two.decode.add(one, 40, two.prefilled(one)) for one in prompts]
        for name, tokens in zip(names, prompts, strict=True):
            assert two.answer(name).tokens == expected(tokens, 40)
        assert two.decode.preemptions
        assert two.ended() == [len(prompts)], "each was loaded once"
        two.until_empty()


def test_blocks_of_a_load_that_failed_are_used_again() -> None:
    with pair(decode={"blocks": 12}) as two:
        first, second = prompt(1, 140), prompt(2, 140)
        params = two.prefilled(first), two.prefilled(second)
        two.prefill.workers[1].is_frozen = True
        two.step()
        names = [two.decode.add(first, 4, params[0])]
        two.until_asked(names[0])
        two.decode.abort(names[0])
        names.append(two.decode.add(second, 4, params[1]))
        two.prefill.workers[1].is_frozen = False
        assert two.answer(names[1]).tokens == expected(second, 4)
        two.until_empty()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_answers_are_right_and_nothing_is_left(seed: int) -> None:
    """Requests come and go, ranks stand still for some steps, and there are too few blocks."""
    dice = random.Random(seed)
    with pair(dice.choice(SIZES[1:]), prefill={"blocks": 40}, decode={"blocks": 30}) as two:
        clients = Clients(two)
        workers = [*two.prefill.workers, *two.decode.workers]
        common = prompt(seed, 64)
        for _ in range(150):
            if dice.random() < 0.3:
                head = common[: dice.choice((0, 0, 32, 64))]
                clients.ask(head + prompt(dice.randrange(10**6), dice.randrange(1, 90)))
            if clients.waiting and dice.random() < 0.1:
                clients.leave(dice.choice(clients.waiting))
            for one in workers:
                one.is_frozen = dice.random() < 0.1
            clients.step()
        for one in workers:
            one.is_frozen = False
        until(lambda: clients.step() or not (clients.prefilled or clients.waiting), "all answers")
        two.until_empty()
        assert len(clients.decoded) > 20
        for name, tokens in clients.decoded.items():
            if name not in clients.left:
                assert two.decode.answers[name].tokens == expected(tokens, clients.NEW_TOKENS)


class Clients:
    """And the proxy between them and a pair."""

    NEW_TOKENS = 12

    def __init__(self, two: Pair) -> None:
        self._two = two
        #: The prompts of requests, by their names on the server that has them.
        self.prefilled: dict[str, list[int]] = {}
        self.decoded: dict[str, list[int]] = {}
        self.left: set[str] = set()

    def ask(self, tokens: list[int]) -> None:
        self.prefilled[self._two.prefill.add(tokens, 1, PREFILL)] = tokens

    @property
    def waiting(self) -> list[str]:
        """Requests that the decode server has not answered."""
        answers = self._two.decode.answers
        return [one for one in self.decoded if not (one in self.left or answers[one].finish_reason)]

    def leave(self, name: str) -> None:
        self.left.add(name)
        self._two.decode.abort(name)

    def step(self) -> None:
        self._two.step()
        for name in list(self.prefilled):
            answer = self._two.prefill.answers[name]
            if answer.finish_reason:
                tokens = self.prefilled.pop(name)
                added = self._two.decode.add(tokens, self.NEW_TOKENS, answer.params)
                self.decoded[added] = tokens


WINDOW = {
    "block_size": BLOCK,
    "num_kv_heads": HEADS,
    "head_size": NUMBERS,
    "dtype": torch.float32,
    "sliding_window": 64,
}


def test_a_model_with_windows_in_all_layers_is_refused() -> None:
    """vLLM has them in one group, too."""
    windows = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], SlidingWindowSpec(**WINDOW))],
    )
    config = config_of("kv_consumer", 1)
    with pytest.raises(ValueError, match="vLLM's kind SlidingWindowSpec"):
        PDConnector(config, KVConnectorRole.SCHEDULER, windows)
    with pytest.raises(ValueError, match="vLLM's kind SlidingWindowSpec"):
        check_server(config, windows)
    check_server(config, caches(8))


def test_a_latent_is_served() -> None:
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)
    latent = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    pd_rank.check_pair_server(config_of("kv_consumer", 1), latent)


def test_a_server_that_may_sleep_is_refused() -> None:
    config = config_of("kv_consumer", 1)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ValueError, match="--enable-sleep-mode is not supported"):
        PDConnector(config, KVConnectorRole.SCHEDULER, caches(8))
