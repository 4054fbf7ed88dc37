# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode ranks say to each other beside the data path.

A message on the wire is a header of six bytes (`SGMK`, version as two little-endian bytes) and a
msgpack body: a tagged union, decoded and checked by msgspec. The header is read before the body, so
peers of any two versions can tell each other apart, whatever became of the body in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from bootstrap_server import Why
from bootstrap_server.ranks.matching import PageShare
from sglang_mooncake.layout import Digests, Layout, Place, Verify

__all__ = [
    "MESSAGE_BYTES_MAX",
    "PROTOCOL_VERSION",
    "Hello",
    "HelloReply",
    "LinkReset",
    "ListDigests",
    "Message",
    "MessageError",
    "RoomAbort",
    "RoomComputed",
    "RoomDiffers",
    "RoomDigests",
    "RoomFailed",
    "RoomRequest",
    "RoomWait",
    "Target",
    "VersionMismatch",
    "decode",
    "encode",
    "indices_from_bytes",
    "indices_to_bytes",
    "states_from_bytes",
    "states_to_bytes",
]

#: Raise it with every change that an older peer would misread.
PROTOCOL_VERSION = 18
#: A million-token context at page size 1 is 4 MB of indices; nothing we send is longer than this.
MESSAGE_BYTES_MAX = 64 << 20
#: SGLang counts a prompt's tokens in 32 bits.
TOKENS_MAX = (1 << 31) - 1
#: A reason is one sentence. What it quotes may be long, and it is kept and passed on.
REASON_CHARS_MAX = 1_000
#: How a rank calls itself.
RANK_CHARS_MAX = 200
#: Indices travel as int32.
INDEX_MAX = (1 << 31) - 1
_ENGINE_ID = re.compile("[0-9a-f]{32}")
_MAGIC = b"SGMK"
_HEADER_BYTES = len(_MAGIC) + 2


class MessageError(ValueError):
    """The bytes are no message of this protocol. The sentence says what is wrong with them."""


class VersionMismatch(MessageError):
    """The peer speaks another version of the protocol."""


def _cut(message: msgspec.Struct, name: str, chars_max: int) -> None:
    """What peers say for sentences goes into the log, and on to others."""
    text: str = getattr(message, name)
    if len(text) > chars_max:
        msgspec.structs.force_setattr(message, name, f"{text[: chars_max - 2]} …")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """decode → prefill, once per link: who I am and where my KV cache lies.

    Which part of its own cache a prefill rank sends follows from the places of both.
    """

    rank: str  # for sentences: "decode rank dp0 tp1 at 10.0.0.2"; cut at RANK_CHARS_MAX
    place: Place
    card: bytes  # te.Engine.card()
    layout: Layout

    def __post_init__(self) -> None:
        _cut(self, "rank", RANK_CHARS_MAX)


class HelloReply(msgspec.Struct, frozen=True, tag="hello_reply"):
    """prefill → decode: the data path stands (refused is None), or why not. A prefill rank repeats
    the former as long as that is so, to learn of links that have ended.

    refused: one beyond REASON_CHARS_MAX is cut.
    why: where the prefill rank, in this life, will say so to each hello of that decode rank; None
        where a later hello may be answered otherwise.
    layout, place: of the prefill rank, with the first answer to a hello: both ranks then know which
        cells they have in common (`layout/cells.py`). Its addresses are left out.
    engine_id, engine_epoch: of te; where the data path stands, whom to expect writes from.
    layers: of each page, how many this prefill rank writes to that decode rank: those that both
        have, a draft model's among them.
    """

    refused: str | None
    engine_id: str = ""
    engine_epoch: int = 0
    layers: int = 0
    why: Why | None = None
    layout: Layout | None = None
    place: Place | None = None

    def __post_init__(self) -> None:
        if self.refused is not None:
            _cut(self, "refused", REASON_CHARS_MAX)
            return
        if self.layers < 0:
            raise ValueError(f"{self.layers} layers of a page")
        if not _ENGINE_ID.fullmatch(self.engine_id) or not 0 <= self.engine_epoch < 1 << 64:
            raise ValueError(f"engine {self.engine_id!r} of {self.engine_epoch} is none of te")


class Target(msgspec.Struct, frozen=True):
    """Where a prefill rank writes its part of a room: pages and slots of the rank that asks.

    tag: of te; opened by the destination before this message is sent.
    pages: `num_pages` indices, int32 little-endian.
    share: which part of the pages the rank that is asked sends; the rest comes from others.
    states: as `pages`, a list or None for each of the model's kinds of state (`Layout.states`);
        empty when another rank sends them.
    aux_slot: for SGLang's metadata; None when another rank sends it.
    page_span: how many prefill pages it takes to fill one of `pages` (decode context parallelism).
    device_pages: as `pages`, of buffers on the device where `pages` are of host memory (HiSparse).
    """

    tag: int
    num_pages: int
    pages: bytes
    share: PageShare
    states: tuple[bytes | None, ...]
    aux_slot: int | None
    completion_slot: int
    page_span: int = 1
    device_pages: bytes | None = None

    def __post_init__(self) -> None:
        for pages in (self.pages, self.device_pages):
            if pages is not None and len(pages) != 4 * self.num_pages:
                raise ValueError(f"{len(pages)} bytes of pages for {self.num_pages} pages")
        if not 1 <= self.page_span <= 65_536:
            raise ValueError(f"pages of {self.page_span} prefill pages")
        if any(len(indices or b"") % 4 for indices in self.states):
            raise ValueError("state indices that are no whole number of int32")
        if (self.aux_slot or 0) < 0 or self.completion_slot < 0:
            raise ValueError("negative slot")
        if not 0 < self.tag < 1 << 64:
            raise ValueError(f"tag {self.tag} is no unsigned 64-bit number above 0")


class RoomRequest(msgspec.Struct, frozen=True, tag="room_request"):
    """decode → prefill: write your part of this room's KV into this target of mine.

    Every prefill rank of the request waits until `destinations` decode ranks have asked it, also
    one that has nothing to send to any of them: it is asked with no target, so that its scheduler
    can go on, and nobody waits for an arrival from it.
    """

    room: int
    generation: int
    decode_prefix_len: int  # tokens that the decode rank holds already
    destinations: int  # how many decode ranks will ask the receiving rank for this room
    target: Target | None
    verify: Verify = Verify.OFF  # how much is to be digested, at least

    def __post_init__(self) -> None:
        if not 0 <= self.decode_prefix_len <= TOKENS_MAX:
            raise ValueError(
                f"decode_prefix_len {self.decode_prefix_len}: no prompt has more than {TOKENS_MAX} "
                "tokens"
            )
        if self.generation < 0:
            raise ValueError(f"generation {self.generation}")
        if not 1 <= self.destinations <= 65_536:
            raise ValueError(f"{self.destinations} destinations")


class RoomWait(msgspec.Struct, frozen=True, tag="room_wait"):
    """decode → prefill, with the allocation policy prefill_complete: I make room for this request
    once its prompt is computed, and ask for it then, with this generation. Tell me when it is."""

    room: int
    generation: int

    def __post_init__(self) -> None:
        if self.generation < 0:
            raise ValueError(f"generation {self.generation}")


class RoomComputed(msgspec.Struct, frozen=True, tag="room_computed"):
    """prefill → decode, the answer to `RoomWait`: the prompt is computed."""

    room: int
    generation: int


class RoomAbort(msgspec.Struct, frozen=True, tag="room_abort"):
    """decode → prefill: nobody wants this room any more.

    reason: one beyond REASON_CHARS_MAX is cut.
    refused: this rank and that one do not serve each other, so that no request for the room has
        been made, or will be.
    """

    room: int
    generation: int
    reason: str
    refused: bool = False

    def __post_init__(self) -> None:
        _cut(self, "reason", REASON_CHARS_MAX)


class ListDigests(msgspec.Struct, frozen=True):
    """`Digests` of one index list, as arrays of little-endian words."""

    which: int
    positions: bytes  # int32
    of_items: bytes  # uint64, one for each position
    of_buffers: bytes  # uint64

    def __post_init__(self) -> None:
        if 2 * len(self.positions) != len(self.of_items) or len(self.of_items) % 8:
            raise ValueError(f"{len(self.of_items)} bytes of digests of items")
        if not self.of_buffers or len(self.of_buffers) % 8:
            raise ValueError(f"{len(self.of_buffers)} bytes of digests of buffers")

    @staticmethod
    def of(digests: Digests) -> ListDigests:
        """Raises ValueError as `indices_to_bytes` does."""
        return ListDigests(
            digests.which,
            indices_to_bytes(digests.positions),
            digests.of_items.astype("<u8").tobytes(),
            digests.of_buffers.astype("<u8").tobytes(),
        )

    @property
    def digests(self) -> Digests:
        of_items, of_buffers = (
            np.frombuffer(words, "<u8").astype(np.uint64)
            for words in (self.of_items, self.of_buffers)
        )
        return Digests(self.which, indices_from_bytes(self.positions), of_items, of_buffers)


class RoomDigests(msgspec.Struct, frozen=True, tag="room_digests"):
    """prefill → decode, behind a completion record that announces it: digests of what was sent.

    verify: how much is digested, the stricter of what the two ranks want.
    seed: which cells of a sample they are of, see `chosen_cells`.
    nbytes: of all cells, chosen or not, as the writes that carried them count them.
    failure: why there are none, which is no reason to fail a request that is one of a sample; one
        beyond REASON_CHARS_MAX is cut.
    """

    room: int
    generation: int
    verify: Verify
    seed: int = 0
    nbytes: int = 0
    lists: tuple[ListDigests, ...] = ()
    failure: str | None = None

    def __post_init__(self) -> None:
        if self.verify is Verify.OFF or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"digests of {self.verify.name} by {self.seed}")
        if self.nbytes < 0:
            raise ValueError(f"digests of {self.nbytes} bytes")
        if self.failure is None:
            return
        if self.lists or self.verify is Verify.ALL:
            raise ValueError(f"digests of {self.verify.name} that could not be made")
        _cut(self, "failure", REASON_CHARS_MAX)


class RoomDiffers(msgspec.Struct, frozen=True, tag="room_differs"):
    """decode → prefill: what has arrived has other digests than `RoomDigests` says, namely these of
    the same lists. A `RoomAbort` says that the room has ended."""

    room: int
    generation: int
    lists: tuple[ListDigests, ...]


class RoomFailed(msgspec.Struct, frozen=True, tag="room_failed"):
    """prefill → decode: this room will never arrive.

    reason: one beyond REASON_CHARS_MAX is cut.
    """

    room: int
    generation: int
    reason: str

    def __post_init__(self) -> None:
        _cut(self, "reason", REASON_CHARS_MAX)


class LinkReset(msgspec.Struct, frozen=True, tag="link_reset"):
    """prefill → decode: I no longer have a data path to you; say hello again.

    reason: one beyond REASON_CHARS_MAX is cut.
    """

    reason: str

    def __post_init__(self) -> None:
        _cut(self, "reason", REASON_CHARS_MAX)


Message = (
    Hello
    | HelloReply
    | RoomWait
    | RoomComputed
    | RoomRequest
    | RoomAbort
    | RoomDigests
    | RoomDiffers
    | RoomFailed
    | LinkReset
)

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, version: int = PROTOCOL_VERSION) -> bytes:
    """One frame. `version` is for tests of the refusal alone."""
    return _MAGIC + version.to_bytes(2, "little") + _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message in `frame`.

    Raises:
        VersionMismatch: the header carries another version; the sentence names both.
        MessageError: too long, no magic, or a body that is no known message.
    """
    if len(frame) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message of {len(frame)} bytes; {MESSAGE_BYTES_MAX} are allowed")
    if len(frame) < _HEADER_BYTES or frame[: len(_MAGIC)] != _MAGIC:
        raise MessageError(f"not a hand-over message: it begins with {frame[:8]!r}")
    version = int.from_bytes(frame[len(_MAGIC) : _HEADER_BYTES], "little")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the peer speaks version {version} of the hand-over protocol, this server version "
            f"{PROTOCOL_VERSION}: install the same release of sglang-mooncake on both"
        )
    try:
        return _decoder.decode(memoryview(frame)[_HEADER_BYTES:])
    # The latter two for text that is no UTF-8, and for what nests too deep.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = str(error)[:REASON_CHARS_MAX]  # it may quote what was said
        raise MessageError(f"malformed hand-over message: {what}") from error


def indices_to_bytes(indices: npt.NDArray[np.integer]) -> bytes:
    """Indices as the wire carries them. Raises ValueError when one is no int32 above -1."""
    wide = np.ascontiguousarray(indices, dtype=np.int64)
    # Negative ones are among the largest when read without a sign: one pass finds both.
    if len(wide) and int(np.maximum.reduce(wide.view(np.uint64))) > INDEX_MAX:
        raise ValueError(f"index outside 0..2^31: {indices.min()}..{indices.max()}")
    return wide.astype("<i4").tobytes()


def indices_from_bytes(data: bytes) -> npt.NDArray[np.int64]:
    """The inverse, widened so that offsets (index × bytes) cannot overflow."""
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def states_to_bytes(states: Iterable[npt.NDArray[np.integer] | None]) -> tuple[bytes | None, ...]:
    """`Target.states` of lists of indices. Raises ValueError as `indices_to_bytes` does."""
    return tuple(None if indices is None else indices_to_bytes(indices) for indices in states)


def states_from_bytes(data: Iterable[bytes | None]) -> list[npt.NDArray[np.int64] | None]:
    """The inverse."""
    return [None if indices is None else indices_from_bytes(indices) for indices in data]
