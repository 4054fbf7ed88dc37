# SPDX-License-Identifier: Apache-2.0
"""How a rank's KV cache lies in memory, and which bytes of it go where on another rank.

A `Layout` is a plain description that travels in the hello between ranks. `Plan` compares two of
them once per pair of ranks, and then makes blocks for each request by broadcasting. So far both
sides must be laid out alike: then the plan is whole pages, for MHA (K and V per layer) as for MLA
(one latent per layer), and for anything else that SGLang keeps in one buffer per layer and page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

import te

__all__ = ["SEAL_BYTES", "Buffers", "Layout", "LayoutMismatch", "Plan", "Seal", "seal_bytes"]


class LayoutMismatch(ValueError):
    """Two ranks whose caches cannot be copied into each other; names both values and the flag."""


class Buffers(msgspec.Struct, frozen=True):
    """Buffers of equal role, each an array of equally long items.

    addresses, item_nbytes, nbytes: one entry per buffer; item i of buffer b lies at
    addresses[b] + i * item_nbytes[b], and must end before addresses[b] + nbytes[b].
    """

    addresses: tuple[int, ...]
    item_nbytes: tuple[int, ...]
    nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.addresses) == len(self.item_nbytes) == len(self.nbytes):
            raise ValueError(
                f"{len(self.addresses)} addresses, {len(self.item_nbytes)} item lengths and "
                f"{len(self.nbytes)} lengths describe no list of buffers"
            )
        for address, item, nbytes in zip(
            self.addresses, self.item_nbytes, self.nbytes, strict=True
        ):
            if address <= 0 or item <= 0 or nbytes < item:
                raise ValueError(
                    f"a buffer of {nbytes} bytes at {address:#x} holds no item of {item} bytes"
                )

    @property
    def items(self) -> int:
        """How many items every buffer holds: an index below this is inside all of them."""
        return min(
            (n // item for n, item in zip(self.nbytes, self.item_nbytes, strict=True)), default=0
        )


class Layout(msgspec.Struct, frozen=True):
    """One rank's memory, as far as the hand-over touches it.

    kv: items are pages; MHA has all K layers, then all V layers; MLA one latent per layer.
    layer_ids: the model layer of each kv buffer.
    aux: SGLang's metadata of a request (first token, logprobs, …); items are metadata slots.
    seals: see `Seal`; the decode side alone has them.
    """

    page_size: int  # tokens
    dtype: str
    kv_layout: str | None
    is_mla: bool
    layer_ids: tuple[int, ...]
    kv: Buffers
    aux: Buffers
    seals: Buffers


#: generation, number of transfers that belong to the room, pages: little-endian u64 each
_SEAL = struct.Struct("<QQQ")
SEAL_BYTES = _SEAL.size


@dataclass(frozen=True, slots=True)
class Seal:
    """The last bytes of a room. The sender writes them with the last chunk, so that the destination
    learns from the data path itself how many transfers make the room complete: the room has arrived
    when the engine has counted that many for the room's tag."""

    generation: int
    writes: int
    pages: int

    @staticmethod
    def unpack(data: bytes) -> Seal:
        return Seal(*_SEAL.unpack(data))


def seal_bytes(seal: Seal) -> bytes:
    return _SEAL.pack(seal.generation, seal.writes, seal.pages)


def _check_alike(source: Layout, target: Layout) -> None:
    def differ(what: str, ours: object, theirs: object, flag: str) -> None:
        if ours != theirs:
            raise LayoutMismatch(
                f"{what}: the prefill server has {ours}, the decode server has {theirs}: {flag}"
            )

    same = "use the same {} on both servers".format
    differ("page size", source.page_size, target.page_size, same("--page-size"))
    differ(
        "KV cache dtype",
        source.dtype,
        target.dtype,
        same("--kv-cache-dtype, or --dtype where that is auto"),
    )
    differ("KV layout", source.kv_layout, target.kv_layout, same("--attention-backend"))
    differ("MLA", source.is_mla, target.is_mla, "serve the same model on both servers")
    differ("layers of the KV buffers", source.layer_ids, target.layer_ids, same("model and PP"))
    differ(
        "number of KV buffers", len(source.kv.addresses), len(target.kv.addresses), same("model")
    )
    differ(
        "bytes per page and buffer",
        sorted(set(source.kv.item_nbytes)),
        sorted(set(target.kv.item_nbytes)),
        same("model, --tp-size and --dp-size"),
    )
    if source.kv.item_nbytes != target.kv.item_nbytes:
        raise LayoutMismatch("the KV buffers of both servers come in a different order")
    differ(
        "bytes per request of metadata buffers",
        source.aux.item_nbytes,
        target.aux.item_nbytes,
        same("version of SGLang and the same model"),
    )


class Plan:
    """The copy from one prefill rank to one decode rank; made once per pair.

    Raises:
        LayoutMismatch: the two cannot be copied into each other.
    """

    def __init__(self, source: Layout, target: Layout) -> None:
        _check_alike(source, target)
        self._source, self._target = source, target
        self._kv_source = np.array(source.kv.addresses, dtype=np.uint64)
        self._kv_target = np.array(target.kv.addresses, dtype=np.uint64)
        self._kv_item = np.array(source.kv.item_nbytes, dtype=np.uint64)

    def kv(
        self, source_pages: npt.NDArray[np.integer], target_pages: npt.NDArray[np.integer]
    ) -> te.Blocks:
        """Blocks that copy source_pages[i] to target_pages[i] in every buffer, runs merged.

        Raises:
            ValueError: lengths differ, or a page lies outside the buffers of its side.
        """
        _check_indices("prefill page", source_pages, self._source.kv.items)
        _check_indices("decode page", target_pages, self._target.kv.items)
        return te.Blocks.pages(
            self._kv_source,
            source_pages,
            self._kv_item,
            self._kv_target,
            target_pages,
            self._kv_item,
            self._kv_item,
        ).merged()

    def aux(self, source_slot: int, target_slot: int) -> te.Blocks:
        """Blocks that copy one request's metadata."""
        source, target = self._source.aux, self._target.aux
        _check_indices("prefill metadata slot", np.array([source_slot]), source.items)
        _check_indices("decode metadata slot", np.array([target_slot]), target.items)
        item = np.array(source.item_nbytes, dtype=np.uint64)
        return te.Blocks.of(
            np.array(source.addresses, dtype=np.uint64) + item * np.uint64(source_slot),
            np.array(target.addresses, dtype=np.uint64) + item * np.uint64(target_slot),
            item,
        )

    def seal(self, source_address: int, target_slot: int) -> te.Blocks:
        """The block that carries the seal from `source_address` (registered memory)."""
        seals = self._target.seals
        _check_indices("seal slot", np.array([target_slot]), seals.items)
        return te.Blocks.of(
            [source_address], [seals.addresses[0] + target_slot * SEAL_BYTES], [SEAL_BYTES]
        )


def _check_indices(what: str, indices: npt.NDArray[np.integer], items: int) -> None:
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= items):
        raise ValueError(
            f"{what} outside 0..{items - 1}: {int(indices.min())}..{int(indices.max())}"
        )
