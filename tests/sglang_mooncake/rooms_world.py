# SPDX-License-Identifier: Apache-2.0
"""A state of the small world of `rooms_model`, and what becomes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from rooms_automata import Heard, Token

from sglang_mooncake.layout import CompletionRecord

__all__ = [
    "Place",
    "Source",
    "Transfer",
    "World",
    "as_landed",
    "is_landing",
    "put",
    "spend",
    "with_source",
    "without_tags",
]

#: A layer of a page: (page, layer).
Place = tuple[int, int]


class Transfer(NamedTuple):
    """The `nth` write of a source. `begun`: some of its bytes may be landing."""

    tag: int
    places: tuple[Place, ...]
    nbytes: int
    completion: CompletionRecord | None
    slot: int
    nth: int
    early: bool
    begun: bool = False
    cancelled: bool = False


class Source(NamedTuple):
    """A prefill rank and the way to it and from it."""

    table: int = 0
    opened: bool = False
    computed: bool = False  # said so; only where the decode rank waits for that
    #: What the scheduler says, or has said, and what is still on its way to the loop: of each
    #: chunk, perhaps, that its first layer is filled ("layers"), and that it is sent ("chunk").
    chunks: tuple[tuple[str, int], ...] = (("chunk", 0), ("chunk", 1))
    asked: tuple[Heard, ...] = ()  # messages to it
    told: tuple[Heard, ...] = ()  # messages from it
    transfers: tuple[Transfer, ...] = ()
    landed: frozenset[Place] = frozenset()
    digesting: int | None = None  # of which generation: its pages are being read
    link_up: bool = True
    knows_loss: bool = False
    decode_knows_loss: bool = False


class World(NamedTuple):
    faults: frozenset[str]
    budget: int
    sources: tuple[Source, ...]
    table: int = 0  # of the decode rank
    inbox: tuple[Token, ...] = ()  # of its loop
    tags: tuple[tuple[int, int, int], ...] = ()  # open ones: tag, transfers, bytes
    completions: tuple[CompletionRecord, ...] = ()  # by slot
    fences: tuple[tuple[int, ...], ...] = ()  # to be confirmed
    comparing: tuple[int, ...] = ()  # tags of sources whose digests have come
    given_up: bool = False  # by the decode scheduler
    done: bool = False  # its poll() said so
    #: What another thread has seen on the way here and must not see.
    seen: str | None = None


def with_source(world: World, nth: int, **changes: Any) -> World:
    return put(world, nth, world.sources[nth]._replace(**changes))


def put(world: World, nth: int, one: Source) -> World:
    if one is world.sources[nth]:
        return world
    return world._replace(sources=(*world.sources[:nth], one, *world.sources[nth + 1 :]))


def spend(world: World, fault: str) -> World | None:
    """The world with one fault less to come; None when this one cannot come any more."""
    if fault not in world.faults or not world.budget:
        return None
    left = world.faults - {fault} if world.budget > 1 else frozenset()
    return world._replace(faults=left, budget=world.budget - 1)


def is_landing(world: World, tags: tuple[int, ...]) -> bool:
    return any(
        transfer.begun and transfer.tag in tags
        for one in world.sources
        for transfer in one.transfers
    )


def without_tags(world: World, tags: tuple[int, ...]) -> World:
    return world._replace(tags=tuple(one for one in world.tags if one[0] not in tags))


def as_landed(world: World, nth: int, transfer: Transfer) -> World:
    """Its bytes are in memory; they count when the tag is still open."""
    landed = world.sources[nth].landed | frozenset(transfer.places)
    tags = tuple(
        (tag, count + 1, nbytes + transfer.nbytes) if tag == transfer.tag else (tag, count, nbytes)
        for tag, count, nbytes in world.tags
    )
    completions = world.completions
    if transfer.completion is not None:
        completions = (
            *completions[: transfer.slot],
            transfer.completion,
            *completions[transfer.slot + 1 :],
        )
    return with_source(world, nth, landed=landed)._replace(tags=tags, completions=completions)
