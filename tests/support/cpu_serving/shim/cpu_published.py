# SPDX-License-Identifier: Apache-2.0
"""KV that others see layer by layer: *published* copies of the buffers of a prefill server's pool.

The pool tells the hand-over the addresses of the copies; forwards read and write the pool itself
and are right in any case. A forward fills the slots that it is about to write with garbage as it
begins, in the copies of all layers, so that what an earlier request left there helps nobody. The
KV of a layer replaces the garbage when `Arrive` says so: at once, or when a stream gets there. Who
reads a layer before it is written, or before its event has happened, sends garbage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import torch

__all__ = ["GARBAGE", "Arrive", "Patches", "at_once", "patches", "publish"]

#: Of an ordinary size: it must change tokens, not overflow.
GARBAGE = 7

#: Does a piece of work now, or leaves it to be done later.
Arrive: TypeAlias = Callable[[Callable[[], None]], None]
#: What to do with which module of SGLang's once it is imported.
Patches: TypeAlias = dict[str, Callable[[ModuleType], None]]
#: Is told how many slots, summed over buffers, hold garbage from now on.
Garbled: TypeAlias = Callable[[int], None]


def at_once(action: Callable[[], None]) -> None:
    """For servers without streams: what a forward has written can be seen."""
    action()


class _Publisher:
    """The published copies of the buffers of one pool."""

    def __init__(self, buffers: list[torch.Tensor], arrive: Arrive, garbled: Garbled) -> None:
        self.copies = {buffer.data_ptr(): torch.full_like(buffer, GARBAGE) for buffer in buffers}
        self._arrive, self._garbled = arrive, garbled

    def begin(self, slots: torch.Tensor) -> None:
        """A forward is about to write these slots, in all layers."""
        for copy in self.copies.values():
            copy[slots] = GARBAGE
        self._garbled(len(slots) * len(self.copies))

    def written(self, buffers: list[torch.Tensor], slots: torch.Tensor) -> None:
        """The forward has written these slots of the buffers, as far as it can see."""
        where = slots.clone()  # its memory is used anew
        values = [buffer[where].clone() for buffer in buffers]
        copies = [self.copies[buffer.data_ptr()] for buffer in buffers]
        for copy in copies:
            copy[where] = GARBAGE  # also where no forward of the target model has begun: drafts

        def show() -> None:
            for copy, value in zip(copies, values, strict=True):
                copy[where] = value

        self._arrive(show)


def publish(
    pool_class: type,
    write: str,
    buffers_of: Callable[[Any], list[torch.Tensor]],
    written: Callable[..., tuple[list[torch.Tensor], torch.Tensor]],
    arrive: Arrive,
    garbled: Garbled = lambda _slots: None,
) -> None:
    """Patches a class of pools.

    write: name of the method that writes the KV of one layer.
    buffers_of: the pool's buffers in the order of `get_contiguous_buf_infos`.
    written: given what `write` is given, the buffers that it wrote to and the slots.
    """
    infos, original = pool_class.get_contiguous_buf_infos, getattr(pool_class, write)

    def get_contiguous_buf_infos(pool: Any) -> Any:
        addresses, *rest = infos(pool)
        if not hasattr(pool, "publisher"):
            pool.publisher = _Publisher(buffers_of(pool), arrive, garbled)
        return [pool.publisher.copies[address].data_ptr() for address in addresses], *rest

    @functools.wraps(original)
    def writing(pool: Any, *args: Any, **kwargs: Any) -> None:
        original(pool, *args, **kwargs)
        if hasattr(pool, "publisher"):
            buffers, slots = written(pool, *args, **kwargs)
            pool.publisher.written(buffers, slots)

    pool_class.get_contiguous_buf_infos = get_contiguous_buf_infos
    setattr(pool_class, write, writing)


def patches(arrive: Arrive, garbled: Garbled = lambda _slots: None) -> Patches:
    """For SGLang's pools of keys and values and of latents, and for its forwards."""
    return {
        "sglang.srt.mem_cache.memory_pool": lambda module: _publish_pools(module, arrive, garbled),
        "sglang.srt.model_executor.model_runner": _garble_first,
    }


def _publish_pools(module: ModuleType, arrive: Arrive, garbled: Garbled) -> None:
    def mha_written(
        pool: Any, layer: int, slots: torch.Tensor, *_kv: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [pool.k_buffer[layer], pool.v_buffer[layer]], slots

    def mla_written(
        pool: Any, layer: Any, where: Any, *_kv: Any, layer_id_override: int | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        number = layer.layer_id if layer_id_override is None else layer_id_override
        return [pool.kv_buffer[number - pool.start_layer]], module.unwrap_write_loc(where)[0]

    publish(
        module.MHATokenToKVPool,
        "_store_kv_layer",
        lambda pool: pool.k_buffer + pool.v_buffer,
        mha_written,
        arrive,
        garbled,
    )
    publish(
        module.MLATokenToKVPool,
        "set_kv_buffer",
        lambda pool: list(pool.kv_buffer),
        mla_written,
        arrive,
        garbled,
    )


def _garble_first(module: ModuleType) -> None:
    forward = module.ModelRunner.forward

    @functools.wraps(forward)
    def wrapped(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        # With windows, the pool of the layers without them; slots of the others are other numbers.
        pool = getattr(runner.token_to_kv_pool, "full_kv_pool", runner.token_to_kv_pool)
        slots = forward_batch.out_cache_loc
        if slots is not None and hasattr(pool, "publisher"):
            pool.publisher.begin(slots)
        return forward(runner, forward_batch, *args, **kwargs)

    module.ModelRunner.forward = wrapped
