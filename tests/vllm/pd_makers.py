# SPDX-License-Identifier: Apache-2.0
"""The ranks of a prefill and a decode server of vLLM without vLLM: KV caches of numpy, real
engines, sockets and registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from vllm_makers import TIMEOUT_S, server, until

from sglang_mooncake.layout import Place
from sglang_mooncake.vllm.facts import total_heads
from sglang_mooncake.vllm.page_map import CacheTensor
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.pd_rank import place_of
from sglang_mooncake.vllm.pd_registry import Registration
from sglang_mooncake.vllm.pd_requests import Load, Release, Send
from sglang_mooncake.vllm.pd_sides import DecodeRank, PrefillRank

HOST = "127.0.0.1"
#: Of vllm_makers.server.
TOKENS, HEADS = 32, 2
LAYERS, BLOCKS, NUMBERS = 3, 16, 8
BLOCK_BYTES = HEADS * TOKENS * NUMBERS
CANARY = 0xEE


class Cache:
    """A KV cache of one byte for each number, from a seed, or of canaries.

    heads_first: a block has one head after the other, instead of one token after the other.
    """

    def __init__(
        self,
        seed: int | None = None,
        heads: int = HEADS,
        numbers: int = NUMBERS,
        *,
        heads_first: bool = True,
    ) -> None:
        self._heads_first = heads_first
        inner = (heads, TOKENS) if heads_first else (TOKENS, heads)
        self._memory = np.full((LAYERS, BLOCKS, *inner, numbers), CANARY, np.uint8)
        #: Shape (layers, blocks, heads, tokens, numbers).
        self.bytes = self._memory if heads_first else self._memory.swapaxes(2, 3)
        if seed is not None:
            shape = self.bytes.shape
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

    def part(self, heads: Sequence[int]) -> Self:
        """Of a rank that has these heads."""
        one = type(self)(None, len(heads), self.bytes.shape[-1], heads_first=self._heads_first)
        one.bytes[:] = self.bytes[:, :, heads]
        return one

    def tensors(self) -> list[CacheTensor]:
        return [CacheTensor(one.ctypes.data, one.shape, one.strides, 1) for one in self.bytes]

    def memory(self) -> list[tuple[int, int]]:
        return [(self._memory.ctypes.data, self._memory.nbytes)]


def heads_of(config: Any, place: Place) -> list[int]:
    """Those that vLLM gives a rank: a share, or one that several ranks have."""
    total, size, rank = total_heads(config), place.topology.tp_size, place.coords.tp
    each = max(1, total // size)
    first = rank * total // size
    return list(range(first, first + each))


@dataclass
class Pair:
    """Of servers with one rank each, or more."""

    prefills: list[PrefillRank]
    decodes: list[DecodeRank]
    #: Of the prefill server's registry.
    address: str
    registration: Registration
    #: Of the whole model, and of the decode server's ranks.
    source: Cache
    targets: list[Cache]
    #: Of each decode rank.
    heads: list[list[int]]
    #: What vLLM has been told: a request once all workers of a server have named it.
    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    #: Has the prefill server start anew, behind the same address.
    restart: Callable[[], None] = lambda: None
    _named: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def prefill(self) -> PrefillRank:
        return self.prefills[0]

    @property
    def decode(self) -> DecodeRank:
        return self.decodes[0]

    @property
    def target(self) -> Cache:
        return self.targets[0]

    def send(self, name: str, room: int, blocks: list[int], tokens: int | None = None) -> None:
        tokens = len(blocks) * TOKENS if tokens is None else tokens
        for one in self.prefills:
            one.worker.send(Send(name, room, tokens, blocks))

    def load(self, name: str, room: int, blocks: list[int], held_tokens: int = 0) -> None:
        for one in self.decodes:
            one.worker.load(Load(name, self.address, room, held_tokens, blocks))

    def release(self, name: str, room: int, *, holds: bool = True) -> None:
        for one in self.decodes:
            one.worker.release(Release(name, self.address, room, "not needed", holds))

    def abort(self, *names: str) -> None:
        for one in self.decodes:
            one.worker.abort(set(names))

    def step(self) -> None:
        """One of each server's scheduler."""
        given_up = self.registration.take_given_up()
        for prefill in self.prefills:
            for prompt in given_up:
                prefill.worker.give_up(prompt)
            self._count("sent", prefill.worker.take_sent(), len(self.prefills), self.sent)
        for decode in self.decodes:
            worker, ranks = decode.worker, len(self.decodes)
            self._count("released", worker.take_released(), ranks, self.released)
            self._count("loaded", worker.take_loaded(), ranks, self.loaded)
            self.failed |= worker.take_failed()

    def _count(self, what: str, names: set[str], ranks: int, all_named: set[str]) -> None:
        for name in names:
            self._named[what, name] += 1
            assert self._named[what, name] <= ranks, f"{name} is {what} once on each rank"
            if self._named[what, name] == ranks:
                all_named.add(name)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Both servers' schedulers run until then."""
        until(lambda: self.step() or condition(), what)

    def until_sent(self, *names: str) -> None:
        self.until(lambda: self.sent >= set(names), f"{names} are sent")

    def until_loaded(self, *names: str) -> None:
        self.until(lambda: self.loaded >= set(names), f"{names} are loaded")

    def assert_moved(self, sources: list[int], targets: list[int]) -> None:
        """These blocks, and not a byte beside them."""
        expected = np.full_like(self.source.bytes, CANARY)
        expected[:, targets] = self.source.bytes[:, sources]
        for target, heads in zip(self.targets, self.heads, strict=True):
            np.testing.assert_array_equal(target.bytes, expected[:, :, heads])


def reasons(rank: Any) -> str:
    """Why rooms of a rank have failed."""
    return " ".join(one.reason for one in rank._side._recorder.failures.last())


def options(**given: Any) -> PdOptions:
    """``given``: beside settings with which no rank takes another for gone because it is silent for
    some seconds: on a busy machine any thread may stop for a while."""
    patient = {"link_timeout_s": TIMEOUT_S, "silence_timeout_s": 500.0}
    return PdOptions.of({"host": HOST, "registry_port": 0, **patient, **given})


def with_tp(ranks: int, **changed: Any) -> Any:
    """A server's configuration."""
    return server(parallel_config__tensor_parallel_size=ranks, **changed)


@contextmanager
def pair(
    source: Cache | None = None,
    target: Cache | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    prefill_server: Any = None,
    decode_server: Any = None,
    kernel: str = "K",
) -> Iterator[Pair]:
    """Both, around the prefill server's registry; all of it is gone afterwards.

    source, target: what a rank with all heads would have.
    prefill, decode: settings.
    prefill_server, decode_server, kernel: the servers' configurations, and what arranges the decode
        server's blocks.
    """
    source, target = source or Cache(seed=1), target or Cache()
    here, there = options(**(prefill or {})), options(**(decode or {}))
    senders, takers = prefill_server or server(), decode_server or server()
    with ExitStack() as stack:
        ports = stack.enter_context(ExitStack())
        prefills, registration = _start_prefill(ports, senders, here, source)
        decodes, targets, heads = [], [], []
        for place in _places(takers):
            heads.append(heads_of(takers, place))
            targets.append(target.part(heads[-1]))
            tensors, memory = targets[-1].tensors(), targets[-1].memory()
            decodes.append(DecodeRank(takers, there, HOST, tensors, kernel, memory, place))
            stack.callback(decodes[-1].close)
        address = registration.address
        two = Pair(prefills, decodes, address, registration, source, targets, heads)

        def restart() -> None:
            ports.close()
            again = replace(here, registry_port=int(address.rpartition(":")[2]))
            two.prefills, two.registration = _start_prefill(ports, senders, again, source)

        two.restart = restart
        yield two


def _start_prefill(
    stack: ExitStack, config: Any, settings: PdOptions, source: Cache
) -> tuple[list[PrefillRank], Registration]:
    prefills: list[PrefillRank] = []
    for place in _places(config):
        cache = source.part(heads_of(config, place))
        one = PrefillRank(config, settings, HOST, cache.tensors(), "K", cache.memory(), place)
        stack.callback(one.close)
        stack.callback(cache.memory)  # it lives until then
        prefills.append(one)
    records = [one.record for one in prefills if one.record is not None]
    registration = Registration(settings, HOST, records)
    stack.callback(registration.close)
    return prefills, registration


def _places(config: Any) -> list[Place]:
    return [place_of(config, one) for one in range(config.parallel_config.tensor_parallel_size)]
