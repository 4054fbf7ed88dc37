# SPDX-License-Identifier: Apache-2.0
"""LMCache's memory, keys and waits, for tests."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvstore.lmcache.adapter import StoreL2Adapter, StoreL2AdapterConfig

MIB = 1 << 20
TIMEOUT_S = 60.0
SHAPE = (2, 3, 16, 8)
"""Keys and values, layers, tokens, numbers of a token."""

Result = TypeVar("Result")


def key(number: int, **more: Any) -> ObjectKey:
    """One of tensor-parallel rank 1 of 2."""
    given = {
        "chunk_hash": number.to_bytes(32, "big"),
        "model_name": "tiny",
        "kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1),
    }
    return ObjectKey(**given | more)


def keys(count: int, **more: Any) -> list[ObjectKey]:
    return [key(number, **more) for number in range(count)]


def layout(shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size(shape)], [dtype])


class Level1:
    """LMCache's host memory."""

    def __init__(self, nbytes: int = MIB) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)

    @property
    def desc(self) -> L1MemoryDesc:
        return L1MemoryDesc(ptr=self.bytes.data_ptr(), size=self.bytes.numel(), align_bytes=1)

    def objects(
        self,
        count: int,
        at: int = 0,
        seed: int | None = None,
        shape: Sequence[int] = SHAPE,
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[TensorMemoryObj]:
        """Side by side from byte ``at`` on; with a seed, filled with random bytes, else zeroed."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        made = []
        for begin in range(at, at + count * nbytes, nbytes):
            raw = self.bytes[begin : begin + nbytes]
            raw.zero_()
            if seed is not None:
                raw.random_(1, 256, generator=torch.Generator().manual_seed(seed + begin))
            known = MemoryObjMetadata(
                shape=torch.Size(shape),
                dtype=dtype,
                address=begin,
                phy_size=nbytes,
                ref_count=1,
                fmt=MemoryFormat.KV_2LTD,
            )
            made.append(TensorMemoryObj(raw, known, None))
        return made


def config(directory: Path, memory: int | str = 8 * MIB, **more: Any) -> StoreL2AdapterConfig:
    """As LMCache makes it, and with deadlines that a busy machine does not miss."""
    late = {"timeout_s": TIMEOUT_S, "request_timeout_s": TIMEOUT_S}
    given = {"memory": memory, "directory": str(directory), **late, **more}
    return StoreL2AdapterConfig.from_dict(given)


def told(fd: int, ask: Callable[[], Result | None]) -> Result:
    """What ``ask`` answers once the event file descriptor says that there is something."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        assert poller.poll(TIMEOUT_S * 1000), "the event file descriptor tells nothing"
        consume_fd(fd)
        if answer := ask():
            return answer


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def store(adapter: StoreL2Adapter, names: list[ObjectKey], objects: list[Any]) -> Any:
    """Stores, and waits for the result."""
    task = adapter.submit_store_task(names, objects)
    return told(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]


def load(adapter: StoreL2Adapter, names: list[ObjectKey], objects: list[Any]) -> list[int]:
    """The rows that were loaded."""
    task = adapter.submit_load_task(names, objects)
    # A bitmap without a bit is false.
    (found,) = told(
        adapter.get_load_event_fd(),
        lambda: None if (one := adapter.query_load_result(task)) is None else [one],
    )
    return found.get_indices_list()


def look_up(
    adapter: StoreL2Adapter, names: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]
) -> list[int]:
    """The rows that were found, which are locked from now on."""
    task = adapter.submit_lookup_and_lock_task(names, layouts)
    # A bitmap without a bit is false.
    (found,) = told(
        adapter.get_lookup_and_lock_event_fd(),
        lambda: None if (one := adapter.query_lookup_and_lock_result(task)) is None else [one],
    )
    return found.get_indices_list()
