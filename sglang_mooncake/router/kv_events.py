# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV events: which pages a server's cache has, told by the server itself. Pure.

A server publishes batches of events with consecutive numbers, and repeats its last ones when it is
asked. Nothing is published while nothing changes, so a lost stream looks like an idle one. What
tells them apart is a prompt that was computed and of which no page was told (`EventStream.expect`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from sglang_mooncake.router.known import first_of, without_gap

__all__ = [
    "EXTERNAL",
    "NEVER",
    "PAGES_MAX",
    "SILENCE_S",
    "STATES",
    "AllBlocksCleared",
    "BlockRemoved",
    "EventStream",
    "Room",
    "State",
]

#: Events of a prompt leave with the scheduler's next step after it.
SILENCE_S: Final = 3.0
#: Prompts that the cache had a page of and events none, one after another, before events are taken
#: for those of other pages.
NEVER: Final = 50
PAGES_MAX: Final = 1 << 22
"""As many tokens with pages of one, which is a server's whole GPU memory. 0.4 GB at most."""
#: Batches that have come while earlier ones are asked for again.
HELD_MAX: Final = 10_000
EXTERNAL: Final = "EXTERNAL"
"""What SGLang's events call a store beside its servers: the one medium that is no tree."""
#: The medium of events that name none.
_GPU: Final = "GPU"
_MEDIA_MAX: Final = 8

State: TypeAlias = Literal["live", "waiting", "silent", "never hits"]
STATES: Final[tuple[State, ...]] = get_args(State)


class _BlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    at: float
    events: list[_BlockStored | BlockRemoved | AllBlocksCleared]


class _OldBlockStored(msgspec.Struct, tag="BlockStored", array_like=True):
    """Before SGLang 0.5.20 events were arrays."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _OldBlockRemoved(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _OldAllBlocksCleared(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class _OldBatch(msgspec.Struct, array_like=True):
    at: float
    events: list[_OldBlockStored | _OldBlockRemoved | _OldAllBlocksCleared]


_Stored: TypeAlias = _BlockStored | _OldBlockStored
_Event: TypeAlias = _Stored | BlockRemoved | AllBlocksCleared
_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_OLD_BATCH: Final = msgspec.msgpack.Decoder(_OldBatch)


class Room:
    """How many pages more may be known, of one stream or of several together."""

    def __init__(self, pages: int) -> None:
        self.pages = pages


class EventStream:
    """The pages of one cache as its events tell them.

    ``take`` gets each batch that is published; ``missing`` then says from which number on batches
    have to be asked for again, and ``replayed`` gets what was repeated. ``close`` gives its room
    back.
    """

    def __init__(self, room: Room | None = None) -> None:
        """``room``: which it shares with others; None: one of its own, for ``PAGES_MAX``."""
        self._room = Room(PAGES_MAX) if room is None else room
        #: By name, which media have the page, a bit for each.
        self._pages: dict[int, int] = {}
        #: Pages that were told of when there was no room for them, since all that was known went.
        self.left_out = 0
        self._media: dict[str, int] = {}
        self._next = 0
        #: The number of the last batch that was published, and not repeated.
        self._last = -1
        #: Batches behind a gap, by number.
        self._held: dict[int, bytes] = {}
        self._heard_s: float | None = None
        #: When an event is due at the latest, and whether one was missed.
        self._due_s: float | None = None
        self._is_silent = False
        #: Prompts of which the cache had a page and events none, since one that they had.
        self._unfound = 0
        #: Whether there was one that they had.
        self._has_found = False
        self.batches = 0
        #: Gaps, and those of which batches were lost for ever.
        self.gaps = self.losses = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def missing(self) -> int | None:
        """The number of the first batch that is missing; None while none is."""
        return self._next if self._held else None

    def state(self, now_s: float) -> State:
        """``live``: the pages are those of the cache. ``waiting``: nothing was told yet, or some
        batches are missing. ``silent``: an event was due, and did not come. ``never hits``: the
        server finds prompts in its cache whose pages events have never named."""
        if self._due_s is not None and now_s >= self._due_s:
            self._is_silent = True
        if self._is_silent:
            return "silent"
        if self._held or not self.batches:
            return "waiting"
        return "live" if self._unfound < NEVER else "never hits"

    def age_s(self, now_s: float) -> float | None:
        """Time since the last batch; None if there was none."""
        return None if self._heard_s is None else now_s - self._heard_s

    def expect(self, since_s: float, now_s: float, page: int | None = None) -> None:
        """Since then the server has computed pages that its cache did not have. An event of them
        has come, or must come soon. ``page`` is the name of one of them: once events have named
        pages as they were expected to, those of other prompts do not count for it."""
        if page is None or not self._has_found or self.left_out:
            has_come = self._heard_s is not None and self._heard_s >= since_s
        else:
            has_come = page in self._pages
        if not has_come and self._due_s is None:
            self._due_s = now_s + SILENCE_S

    def found(self, is_known: bool) -> None:
        """The server had a beginning of a prompt in its cache, a page at least: whether events had
        named it as the prompt was sent."""
        self._unfound = 0 if is_known else self._unfound + 1
        self._has_found = self._has_found or is_known

    def take(self, number: int, payload: bytes, now_s: float) -> None:
        """A batch was published. A number that is not above the last one is that of a new process;
        one that was repeated already says nothing new."""
        self._heard_s, self._due_s, self._is_silent = now_s, None, False
        if number <= self._last:
            self.restart()
        self._last = number
        if number < self._next:
            return
        if number != self._next or self._held:
            if not self._held:
                self.gaps += 1
            self._held[number] = payload
            if len(self._held) > HELD_MAX:
                self.lose()
            return
        self._apply(number, payload)

    def replayed(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """What the server has repeated. If that does not close the gap, the rest is lost."""
        for number, payload in batches:
            if number >= self._next:
                self._held.setdefault(number, payload)
        self.lose()

    def lose(self) -> None:
        """What is still missing before batches that have come is lost: pages may have gone that
        were told before, so that none of those counts any more."""
        for number in sorted(self._held):
            if number != self._next:
                self.losses += 1
                self._forget()
            self._apply(number, self._held.pop(number))

    def restart(self) -> None:
        """The cache is that of a new process."""
        self._forget()
        self._held.clear()
        self._next, self._last, self._unfound, self._has_found = 0, -1, 0, False

    def close(self) -> None:
        """Nothing of the cache is known any more. Idempotent."""
        self._forget()

    def first_of(self, names: Sequence[int]) -> int:
        """How many of ``names``, from the first on, the cache has."""
        find = without_gap if EXTERNAL in self._media else first_of
        return find(self._pages, names)

    def by_medium(self, names: Sequence[int]) -> dict[str, int]:
        """The same of each medium that events have named. One of several need not be a tree: what a
        host has was moved there from the ends of the GPU's."""
        if len(self._media) == 1:
            return dict.fromkeys(self._media, self.first_of(names))
        counts = {}
        for medium, number in self._media.items():
            bit = 1 << number
            lacks = (n for n, name in enumerate(names) if not self._pages.get(name, 0) & bit)
            counts[medium] = next(lacks, len(names))
        return counts

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self.batches += 1
        try:
            events = _events(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Of another form than any that is known: what it was about is not known either.
            self.losses += 1
            self._forget()
            return
        for event in events:
            match event:
                case _BlockStored() | _OldBlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    self._forget()

    def _forget(self) -> None:
        self._room.pages += len(self._pages)
        self._pages.clear()
        self.left_out = 0

    def _stored(self, event: _Stored) -> None:
        """Where there is no room the new ones are left out: the first to be told of are those that
        most prompts begin with."""
        pages, room, bit = self._pages, self._room, self._bit(event.medium)
        for name in event.block_hashes:
            media = pages.get(name, 0)
            if media:
                pages[name] = media | bit
            elif room.pages > 0:
                pages[name] = bit
                room.pages -= 1
            else:
                self.left_out += 1

    def _removed(self, event: BlockRemoved) -> None:
        bit = self._bit(event.medium)
        for name in event.block_hashes:
            left = self._pages.get(name, 0) & ~bit
            if left:
                self._pages[name] = left
            elif self._pages.pop(name, 0):
                self._room.pages += 1

    def _bit(self, medium: str | None) -> int:
        name = medium or _GPU
        if name not in self._media and len(self._media) >= _MEDIA_MAX:
            name = _GPU
        return 1 << self._media.setdefault(name, len(self._media))


def _events(payload: bytes) -> Sequence[_Event]:
    try:
        return _BATCH.decode(payload).events
    except msgspec.ValidationError:
        return _OLD_BATCH.decode(payload).events
