# SPDX-License-Identifier: Apache-2.0
"""What a rank says about its memory: plain values that travel between ranks."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from bootstrap_server import RankCoords, Topology, Why
from bootstrap_server.ranks.matching import holding

__all__ = [
    "ALL",
    "ALONE",
    "COMPLETION_BYTES",
    "Buffers",
    "CompletionRecord",
    "Component",
    "Dealt",
    "Layout",
    "LayoutMismatch",
    "Place",
    "Units",
    "completion_bytes",
    "without_addresses",
]


class LayoutMismatch(ValueError):
    """Two ranks whose caches cannot be copied into each other; names both values and the flag."""

    def __init__(self, sentence: str, why: Why = Why.LAYOUT) -> None:
        self.why = why
        super().__init__(sentence)


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


class Units(msgspec.Struct, frozen=True):
    """`total` equal pieces of `nbytes` bytes, numbered over all TP ranks, which TP deals out: KV
    heads, channels of a convolution. What every rank stores as a whole is one unit."""

    total: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.total < 1 or self.nbytes < 1:
            raise ValueError(f"{self.total} units of {self.nbytes} bytes are no piece of a cache")


class Dealt(msgspec.Struct, frozen=True):
    """Every `of`-th thing: those whose number leaves `index` when it is divided by `of`."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"there is no part {self.index} of {self.of}")


#: Nothing is dealt out.
ALL = Dealt()


class Component(msgspec.Struct, frozen=True):
    """One kind of cached tensor (K, MLA latent, indexer …): a buffer per layer, all alike.

    A buffer is an array of items; an item is what one index names: a page of KV, a request's slot
    of Mamba state, a row of a ring. It consists of `rows` equal rows (the tokens of a page), and a
    row, for each of `cuts`, of the units that this rank holds, in ascending order. So unit u of cut
    c in row r of item i of a layer has one address, which is all that a plan needs.

    kind: components of both sides with the same kind and layer are the same tensor.
    layers: the layer of each buffer. With `numbered` these are numbers in the model; otherwise
        positions on this rank, which mean something only beside a rank of the same pipeline stage.
    elided: layers of the model that have no buffer of this kind here, on purpose.
    state: which of a request's lists of state indices names the items; None: its KV pages.
    slack: by how many items the lists of both sides may differ in length; the longer one's last
        ones are left out. SGLang's own counts differ by a page at times.
    segments: the indices name live parts of one row of a ring, not items (see `indices.py`).
    replicated: TP deals nothing out here: every TP rank of this instance holds all units.
    on_device: beside pages in host memory (HiSparse), the request's device pages name the items.
    """

    kind: str
    layers: tuple[int, ...]
    buffers: Buffers
    cuts: tuple[Units, ...]
    rows: int = 1
    numbered: bool = True
    elided: tuple[int, ...] = ()
    state: int | None = None
    slack: int = 0
    segments: bool = False
    replicated: bool = False
    on_device: bool = False

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.buffers.addresses):
            raise ValueError(
                f"{self.kind}: {len(self.layers)} layers for {len(self.buffers.addresses)} buffers"
            )
        if len({*self.layers, *self.elided}) != len(self.layers) + len(self.elided):
            raise ValueError(f"{self.kind}: a layer comes twice in {self.layers}")
        if self.rows < 1 or not self.cuts or len(set(self.buffers.item_nbytes)) > 1:
            raise ValueError(
                f"{self.kind}: {self.rows} rows of {len(self.cuts)} cuts in items of "
                f"{sorted(set(self.buffers.item_nbytes))} bytes are no regular tensor"
            )

    @property
    def item_nbytes(self) -> int:
        """Bytes of one item, in every layer; 0 when there is no buffer."""
        return self.buffers.item_nbytes[0] if self.buffers.item_nbytes else 0

    def held_nbytes(self, tp_size: int, tp: int) -> int:
        """What an item must have when TP rank `tp` of `tp_size` stores it.

        Raises:
            MismatchError: the units cannot be dealt out to so many ranks.
        """
        return self.rows * sum(
            len(self.holding(cut, tp_size, tp)) * cut.nbytes for cut in self.cuts
        )

    def holding(self, cut: Units, tp_size: int, tp: int) -> range:
        """Which units of a cut TP rank `tp` of `tp_size` stores. Raises as `held_nbytes` does."""
        if self.replicated:
            return range(cut.total)
        return holding(cut.total, tp_size, tp, f"units of {self.kind}")


class Layout(msgspec.Struct, frozen=True):
    """One rank's memory, as far as the hand-over touches it.

    components: all caches of the model; order does not matter.
    states: the kinds of SGLang's state index lists, in their order.
    aux: SGLang's metadata of a request (first token, logprobs, …); items are metadata slots. An
        engine that keeps none has no buffers here.
    draft_aux: which of `aux` holds what the draft model continues from; a server without one has a
        buffer of another size there, and nothing in it. None where SGLang's order is not known.
    pages_dealt: which pages this rank stores of those that its scheduler numbers; number n is its
        n // of-th page (SGLang's KV cache sharding, on prefill).
    tokens_dealt: which tokens of a request this rank stores; a page that its scheduler names holds
        `of` times the tokens of `page_size`, and each rank of them its own (decode context
        parallelism). The draft model's caches hold all of them.
    completions: see `CompletionRecord`; the decode side alone has them.
    release: of what runs here (SGLang 0.5.23), for sentences; empty where nobody says.
    conventions: what this release means by a request's lists where their names do not tell. Both
        sides must mean the same.
    """

    page_size: int  # tokens
    dtype: str
    kv_layout: str | None
    components: tuple[Component, ...]
    aux: Buffers
    completions: Buffers
    states: tuple[str, ...] = ()
    draft_aux: int | None = None
    pages_dealt: Dealt = ALL
    tokens_dealt: Dealt = ALL
    release: str = ""
    conventions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"a page of {self.page_size} tokens")
        for component in self.components:
            if component.state is not None and not 0 <= component.state < len(self.states):
                raise ValueError(
                    f"{component.kind} wants state list {component.state} of {len(self.states)}"
                )


def without_addresses(layout: Layout) -> Layout:
    """For a rank that is to know what is cached, and not where."""
    return msgspec.structs.replace(
        layout,
        components=tuple(
            msgspec.structs.replace(one, buffers=_nowhere(one.buffers)) for one in layout.components
        ),
        aux=_nowhere(layout.aux),
        completions=_nowhere(layout.completions),
    )


def _nowhere(buffers: Buffers) -> Buffers:
    return msgspec.structs.replace(buffers, addresses=(1,) * len(buffers.addresses))


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which instance holds a layout."""

    topology: Topology
    coords: RankCoords

    def __post_init__(self) -> None:
        self.topology.check(self.coords)

    @property
    def stage(self) -> tuple[int, int]:
        """(pipeline rank, pipeline size)"""
        return self.coords.pp, self.topology.pp_size


#: The only rank of its instance.
ALONE = Place(Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0))


#: The fields of `CompletionRecord` in their order, little-endian u64 each.
_COMPLETION = struct.Struct("<8Q")
COMPLETION_BYTES = _COMPLETION.size


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """The last bytes of a room, which say what was sent for it. The sender writes them with the
    last chunk, so that the destination learns from the data path itself when the room is complete:
    when the engine has counted that many transfers and bytes under the room's tag. What was sent
    must be what the destination has asked for.

    generation: that of the request.
    writes: transfers into this target, the one with the completion record included.
    pages: that were written into this target in all.
    page_layers: layers of these pages that were written, each counted once: of whole pages, pages ×
        layers (`HelloReply.layers`).
    states: lists of state indices that were followed.
    aux: 1 when the request's metadata was written, else 0.
    digests: 1 when digests follow over the control link (`messages.RoomDigests`), else 0.
    nbytes: payload of all these transfers, that of the completion record included.
    """

    generation: int
    writes: int
    pages: int
    page_layers: int
    states: int
    aux: int
    digests: int
    nbytes: int

    @staticmethod
    def unpack(data: bytes) -> CompletionRecord:
        return CompletionRecord(*_COMPLETION.unpack(data))


def completion_bytes(completion: CompletionRecord) -> bytes:
    one = completion
    return _COMPLETION.pack(
        one.generation,
        one.writes,
        one.pages,
        one.page_layers,
        one.states,
        one.aux,
        one.digests,
        one.nbytes,
    )
