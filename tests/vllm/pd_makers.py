# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode rank of vLLM without vLLM: KV caches of numpy, real engines, sockets and
registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm_makers import TIMEOUT_S, server, until

from sglang_mooncake.vllm.page_map import CacheTensor
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.pd_registry import Registration
from sglang_mooncake.vllm.pd_requests import Load, Release, Send
from sglang_mooncake.vllm.pd_sides import DecodeRank, PrefillRank

HOST = "127.0.0.1"
#: Of vllm_makers.server.
TOKENS = 32
LAYERS, BLOCKS, BLOCK_BYTES = 3, 16, 512
CANARY = 0xEE


class Cache:
    """A rank's KV cache, of bytes from a seed, or of canaries."""

    def __init__(self, seed: int | None = None, block_bytes: int = BLOCK_BYTES) -> None:
        shape = (LAYERS, BLOCKS, block_bytes)
        self.bytes = np.full(shape, CANARY, np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

    def tensors(self) -> list[CacheTensor]:
        width = self.bytes.shape[2]
        return [CacheTensor(one.ctypes.data, one.shape, (width, 1), 1) for one in self.bytes]

    def memory(self) -> list[tuple[int, int]]:
        return [(self.bytes.ctypes.data, self.bytes.nbytes)]


@dataclass
class Pair:
    prefill: PrefillRank
    decode: DecodeRank
    #: Of the prefill server's registry.
    address: str
    source: Cache
    target: Cache
    #: What the workers have told.
    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def send(self, name: str, room: int, blocks: list[int], tokens: int | None = None) -> None:
        tokens = len(blocks) * TOKENS if tokens is None else tokens
        self.prefill.worker.send(Send(name, room, tokens, blocks))

    def load(self, name: str, room: int, blocks: list[int], held_tokens: int = 0) -> None:
        self.decode.worker.load(Load(name, self.address, room, held_tokens, blocks))

    def release(self, name: str, room: int, *, holds: bool = True) -> None:
        self.decode.worker.release(Release(name, self.address, room, "not needed", holds))

    def step(self) -> None:
        """One of each server's scheduler."""
        self.sent |= self.prefill.worker.take_sent()
        self.released |= self.decode.worker.take_released()
        self.loaded |= self.decode.worker.take_loaded()
        self.failed |= self.decode.worker.take_failed()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Both servers' schedulers run until then."""
        until(lambda: self.step() or condition(), what)

    def until_sent(self, *names: str) -> None:
        self.until(lambda: self.sent >= set(names), f"{names} are sent")

    def until_loaded(self, *names: str) -> None:
        self.until(lambda: self.loaded >= set(names), f"{names} are loaded")

    def assert_moved(self, sources: list[int], targets: list[int]) -> None:
        """These blocks, and not a byte beside them."""
        expected = np.full_like(self.target.bytes, CANARY)
        expected[:, targets] = self.source.bytes[:, sources]
        np.testing.assert_array_equal(self.target.bytes, expected)


def options(**given: Any) -> PdOptions:
    return PdOptions.of({"host": HOST, "registry_port": 0, "link_timeout_s": TIMEOUT_S, **given})


@contextmanager
def pair(
    source: Cache | None = None,
    target: Cache | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    decode_server: Any = None,
    kernel: str = "K",
) -> Iterator[Pair]:
    """Both, around the prefill server's registry; all of it is gone afterwards.

    prefill, decode: settings.
    decode_server, kernel: the decode server's configuration, and what arranges its blocks.
    """
    source, target = source or Cache(seed=1), target or Cache()
    here, there = options(**(prefill or {})), options(**(decode or {}))
    first = PrefillRank(server(), here, HOST, source.tensors(), "K", source.memory())
    assert first.record is not None
    registration = Registration(here, HOST, first.record)
    config = decode_server or server()
    second = DecodeRank(config, there, HOST, target.tensors(), kernel, target.memory())
    try:
        yield Pair(first, second, registration.address, source, target)
    finally:
        second.close()
        first.close()
        registration.close()
