# SPDX-License-Identifier: Apache-2.0
"""A small world around the real room tables, of which every interleaving can be looked at.

One room: a decode rank and one or two prefill ranks, each of which sends the room's two pages in
two chunks. Between them is a link that delays everything by any time and may, a bounded number of
times, reorder chunks, say or send something twice, lose it, or break; and schedulers that may
abort. A state of the world is a value (`World`); the tables in it are numbers of local states, and
what an event does to a table is worked out by the real rules, once (`Automaton`).

`Model.explore` goes through all states breadth first and checks what must hold in each of them.
What must hold for other threads is checked between any two effects of an event, too: each change
of a room, each instruction.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rooms_automata import (
    LAYERS,
    PAGES,
    Heard,
    Token,
    decode_automaton,
    prefill_automaton,
    recorded,
)
from rooms_world import (
    Source,
    Transfer,
    World,
    as_landed,
    is_landing,
    put,
    spend,
    with_source,
    without_tags,
)

from sglang_mooncake.layout import CompletionRecord, Verify
from sglang_mooncake.rooms import prefill_room
from sglang_mooncake.rooms.arrival import CompletionDisagrees, Expected, has_arrived
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

__all__ = ["FAULTS", "Found", "Model"]

FOREVER_S = 1e9
NO_COMPLETION = recorded(CompletionRecord(0, 0, 0, 0, 0, 0, 0, 0))
#: What may happen once each, besides delay: to chunks between a prefill scheduler and its loop, to
#: messages, to transfers, and by a scheduler's doing.
FAULTS = frozenset({"reorder", "twice", "drop", "loss", "failure", "decode abort", "prefill abort"})


Step = tuple[str, World]


@dataclass(frozen=True)
class Found:
    """What an exploration came through.

    ends: how often both sides were in these states when nothing could happen any more.
    problems: what must never be and can be, each with the shortest way to it.
    """

    states: int
    ends: Counter[tuple[str, str]]
    problems: dict[str, list[str]]


class Model:
    """
    Args:
        sources: prefill ranks.
        faults: what may go wrong, `budget` times in all, each kind once.
        lands_at_once: a transfer's bytes land in one step, so that no fence ever waits. The world
            is a third as large.
        compare_completions: False looks at the number of transfers alone (finding A1).
        computed_first: the policy prefill_complete: the room is ready once its prompt is computed.
        by_layers: each chunk is announced when the first of its two layers is filled.
        digests: all is compared before the decode room is done.
        drop_after_fence: True fences in the loop, and a fence that does not end drops the other
            instructions of its batch (finding A4).
    """

    def __init__(
        self,
        sources: int,
        faults: frozenset[str] = FAULTS,
        budget: int = 1,
        lands_at_once: bool = False,
        compare_completions: bool = True,
        drop_after_fence: bool = False,
        computed_first: bool = False,
        by_layers: bool = False,
        digests: bool = False,
    ) -> None:
        self.links = tuple(f"p{nth}" for nth in range(sources))
        verify = Verify.ALL if digests else Verify.OFF
        self.decode, said = decode_automaton(self.links, computed_first, verify)
        self.prefill = prefill_automaton(computed_first)
        self._computed_first = computed_first
        self._lands_at_once = lands_at_once
        self._compare_completions, self._drop_after_fence = compare_completions, drop_after_fence
        asked = [tuple(word for _, link, word in said if link == to) for to in self.links]
        said_of = ("layers", "chunk") if by_layers else ("chunk",)
        chunks = tuple((what, number) for number in range(PAGES) for what in said_of)
        ranks = tuple(Source(asked=words, chunks=chunks) for words in asked)
        self.first = World(faults, budget, ranks, completions=(NO_COMPLETION,) * 2 * sources)
        self._of_decode = cache(self._of_decode_uncached)
        self._of_prefill = cache(self._of_prefill_uncached)
        self._decode_ends = cache(self._decode_ends_uncached)
        self._prefill_ends = cache(self._prefill_ends_uncached)

    def explore(self) -> Found:
        """Goes through all states, breadth first."""
        came_from: dict[World, tuple[World, str] | None] = {self.first: None}
        ends: Counter[tuple[str, str]] = Counter()
        problems: dict[str, list[str]] = {}
        waiting = deque([self.first])
        while waiting:
            world = waiting.popleft()
            steps = list(self.steps(world))
            for label, after in steps:
                if after.seen is not None:
                    problems.setdefault(after.seen, [*_way(came_from, world), label])
                    after = after._replace(seen=None)
                step = world, label
                if came_from.setdefault(after, step) is not step:
                    continue
                waiting.append(after)
                problem = self.problem(after)
                if problem and problem not in problems:
                    problems[problem] = _way(came_from, after)
            if not steps:
                ends[self._ends(world)] += 1
        return Found(len(came_from), ends, problems)

    def _ends(self, world: World) -> tuple[str, str]:
        sources = "/".join(self.prefill.room(one.table).view.state.value for one in world.sources)
        return self.decode.room(world.table).view.state.value, sources

    # --- what must hold ---

    def problem(self, world: World) -> str | None:
        """What is wrong with a state of the world."""
        if unsafe := self._unsafe(world):
            return unsafe
        if not self._decode_ends(world.table, world.inbox, world.fences):
            return "the decode room never ends"
        for one in world.sources:
            under_way = _under_way(one.transfers)
            if not self._prefill_ends(one.table, one.opened, under_way, one.digesting):
                return "a prefill room never ends"
        return None

    def _unsafe(self, world: World) -> str | None:
        """What another thread must never find, also between two instructions of one event."""
        is_done, has_failed, is_releasable = self._of_decode(world.table)
        if world.done or is_done:
            if any(len(one.landed) < PAGES * LAYERS for one in world.sources):
                return "the decode room is done with a page missing"
            if any(one.transfers for one in world.sources):
                return "the decode room is done while something of it moves"
        if (has_failed or world.given_up) and is_releasable:
            if world.tags:
                return "pages can be released while they are open for writing"
            if any(transfer.begun for one in world.sources for transfer in one.transfers):
                return "pages can be released while a transfer lands in them"
        for one in world.sources:
            is_over, is_done = self._of_prefill(one.table)
            if is_over and one.transfers:
                return "a prefill room is over while a transfer reads its pages"
            if is_over and one.digesting is not None:
                return "a prefill room is over while digests are made of its pages"
            if is_done and len(one.landed) < PAGES * LAYERS:
                return "a prefill room is done with a page missing"
        return None

    def _of_decode_uncached(self, table: int) -> tuple[bool, bool, bool]:
        """Of the room: whether it is done, has failed, and has pages that can be released."""
        room = self.decode.room(table)
        is_done = room.view.state is RoomState.DONE
        return is_done, room.view.over and not is_done, room.releasable

    def _of_prefill_uncached(self, table: int) -> tuple[bool, bool]:
        """Of the room: whether it is over, and whether it is done."""
        view = self.prefill.room(table).view
        return view.over, view.state is RoomState.DONE

    def _seen(self, world: World, odd: str | None) -> World:
        """The world, with the first thing in it that another thread must not see."""
        if world.seen is None and (odd := odd or self._unsafe(world)):
            return world._replace(seen=odd)
        return world

    def _decode_ends_uncached(
        self, table: int, inbox: tuple[Token, ...], fences: tuple[tuple[int, ...], ...]
    ) -> bool:
        """Whether the room ends, and is forgotten, when nobody says anything any more."""
        world = self.first._replace(table=table, inbox=inbox, fences=fences, tags=())
        for _ in range(3):
            while world.inbox or world.fences:
                token = world.inbox[0] if world.inbox else ("fenced",)
                left = world.inbox[1:], world.fences if world.inbox else world.fences[1:]
                world = self._to_decode(world._replace(inbox=left[0], fences=left[1]), token)
            world = self._to_decode(world, ("tick", FOREVER_S))
        return self.decode.room(world.table).view.over and not self.decode.rooms(world.table)

    def _prefill_ends_uncached(
        self, table: int, opened: bool, under_way: tuple[int, ...], digesting: int | None
    ) -> bool:
        """The same for a prefill room: its transfers have outcomes, for the engine bounds them."""
        # Where the clock starts with the computed prompt, its scheduler computes it or gives up.
        computed = [("computed",)] * self._computed_first
        for token in [
            *(("ended", False, nth) for nth in under_way),
            *([] if digesting is None else [("digested", digesting, True)]),
            *computed,
            ("tick", FOREVER_S),
        ]:
            table, _ = self.prefill.step(table, token)
        return not opened or (self.prefill.room(table).view.over and not self.prefill.rooms(table))

    # --- what can happen ---

    def steps(self, world: World) -> Iterator[Step]:
        """All states that can follow, each with what led there."""
        yield from self._decode_steps(world)
        for nth in range(len(world.sources)):
            for label, after in self._source_steps(world, nth):
                yield f"{self.links[nth]}: {label}", after

    def _decode_steps(self, world: World) -> Iterator[Step]:
        room = self.decode.room(world.table)
        idle = not (world.given_up or world.done)
        if room.view.state is RoomState.READY and not room.named and idle:
            named = self._to_decode(world, ("name",))
            yield "names its pages", named._replace(inbox=(*named.inbox, ("named",)))
        if idle and (after := spend(world, "decode abort")):
            yield "decode aborts", self._give_up(after, ("aborted",))
        if world.inbox:
            rest = world._replace(inbox=world.inbox[1:])
            yield f"decode loop: {world.inbox[0]}", self._to_decode(rest, world.inbox[0])
        if room.view.state is RoomState.REQUESTED and idle:
            yield from self._poll(world, room)
        yield from self._compare_steps(world, room)
        for job in world.fences[:1]:
            closed = without_tags(world, job)
            if not is_landing(world, job):
                closed = closed._replace(fences=world.fences[1:], inbox=(*world.inbox, ("fenced",)))
            if closed != world:
                yield "fence", closed

    def _compare_steps(self, world: World, room: Room) -> Iterator[Step]:
        """Of the thread that compares digests, once it has something to compare."""
        for tag in world.comparing:
            rest = world._replace(comparing=tuple(one for one in world.comparing if one != tag))
            if room.view.decided:
                yield "compares nothing", rest
                continue
            expected = next(one for one in room.view.expected if one.tag == tag)
            try:
                is_here = self._is_here(world, expected)
            except CompletionDisagrees:
                is_here = False
            if is_here:
                yield "digests are equal", self._to_decode(rest, ("verified", tag, True))
            if is_here and (after := spend(rest, "failure")):
                yield "digests differ", self._to_decode(after, ("verified", tag, False))

    def _poll(self, world: World, room: Room) -> Iterator[Step]:
        try:
            if all(self._has_arrived(world, room, one) for one in room.view.expected):
                inbox = (*world.inbox, ("arrived",))
                yield "poll: success", world._replace(done=True, inbox=inbox)
        except CompletionDisagrees:
            yield "poll: the completion record disagrees", self._give_up(world, ("broken",))

    def _has_arrived(self, world: World, room: Room, expected: Expected) -> bool:
        """As `DecodeSide.has_arrived` does."""
        if not self._is_here(world, expected):
            return False
        digests = world.completions[expected.slot].digests
        return not digests or expected.tag in room.view.verified

    def _is_here(self, world: World, expected: Expected) -> bool:
        writes, nbytes = next(
            (count, nbytes) for tag, count, nbytes in world.tags if tag == expected.tag
        )
        completion = world.completions[expected.slot]
        if not self._compare_completions:
            return completion.generation == expected.generation and 0 < completion.writes <= writes
        return writes > 0 and has_arrived(expected, completion, writes, nbytes)

    def _give_up(self, world: World, token: Token) -> World:
        after = self._to_decode(world, ("withdraw",))
        return after._replace(given_up=True, inbox=(*after.inbox, token))

    def _source_steps(self, world: World, nth: int) -> Iterator[Step]:
        one = world.sources[nth]
        state = self.prefill.room(one.table).view.state
        if not one.opened:
            yield "opens", self._to_prefill(with_source(world, nth, opened=True), nth, ("open",))
        elif not self._of_prefill(one.table)[0]:
            if after := spend(world, "prefill abort"):
                yield "aborts", self._to_prefill(after, nth, ("aborted",))
            if self._computed_first and not one.computed:
                said = with_source(world, nth, computed=True)
                yield "has computed", self._to_prefill(said, nth, ("computed",))
            if state is RoomState.OPEN:
                waited = self._to_prefill(world, nth, ("tick", prefill_room.ABORT_GRACE_S))
                if waited != world:
                    yield "no newer request came", waited
        if one.opened and state is not RoomState.OPEN:
            yield from self._chunk_steps(world, nth, one.chunks)
        yield from self._message_steps(world, nth, one)
        if (generation := one.digesting) is not None:
            rest = with_source(world, nth, digesting=None)
            yield "has digests", self._to_prefill(rest, nth, ("digested", generation, True))
            if after := spend(rest, "failure"):
                failed = self._to_prefill(after, nth, ("digested", generation, False))
                yield "cannot make digests", failed
        for at in range(len(one.transfers)):
            yield from self._transfer_steps(world, nth, at)

    def _chunk_steps(
        self, world: World, nth: int, chunks: tuple[tuple[str, int], ...]
    ) -> Iterator[Step]:
        for at, (what, number) in enumerate(chunks):
            rest = with_source(world, nth, chunks=chunks[:at] + chunks[at + 1 :])
            in_order = rest if at == 0 else spend(rest, "reorder")
            if in_order:
                yield f"{what} {number}", self._to_prefill(in_order, nth, (what, number))
            if at == 0 and (again := spend(world, "twice")):
                yield f"{what} {number}, twice", self._to_prefill(again, nth, (what, number))
            if lost := spend(rest, "drop"):
                yield f"{what} {number} is lost", lost

    def _message_steps(self, world: World, nth: int, one: Source) -> Iterator[Step]:
        for way in ("asked", "told"):
            queue = getattr(one, way)
            if not queue:
                continue
            rest = with_source(world, nth, **{way: queue[1:]})
            name = type(queue[0].message).__name__
            yield f"hears {way}: {name}", self._deliver(rest, nth, way, queue[0])
            if again := spend(world, "twice"):
                yield f"hears {way}, twice: {name}", self._deliver(again, nth, way, queue[0])
            if lost := spend(rest, "drop"):
                yield f"{way}: {name} is lost", lost
        if one.link_up and (after := spend(world, "loss")):
            yield "the link breaks", with_source(after, nth, link_up=False, asked=(), told=())
        if not one.link_up and not one.knows_loss:
            knows = with_source(world, nth, knows_loss=True)
            yield "sees the loss", self._to_prefill(knows, nth, ("lost",))
        if not one.link_up and not one.decode_knows_loss:
            knows = with_source(world, nth, decode_knows_loss=True)
            yield "decode sees the loss", self._to_decode(knows, ("link down", self.links[nth]))

    def _deliver(self, world: World, nth: int, way: str, message: Heard) -> World:
        if way == "asked":
            return self._to_prefill(world, nth, ("message", message))
        return self._to_decode(world, ("told", self.links[nth], message))

    def _transfer_steps(self, world: World, nth: int, at: int) -> Iterator[Step]:
        one = world.sources[nth]
        transfer = one.transfers[at]
        others = one.transfers[:at] + one.transfers[at + 1 :]
        gone, name = with_source(world, nth, transfers=others), transfer.places
        succeeds, fails = (("ended", is_done, transfer.nth) for is_done in (True, False))
        is_open = any(tag == transfer.tag for tag, _, _ in world.tags)
        if transfer.begun or (is_open and self._lands_at_once):
            landed = as_landed(gone, nth, transfer)
            yield (
                f"{name} land",
                self._to_prefill(landed, nth, succeeds if is_open else fails),
            )
        elif is_open:
            begun = (*others, transfer._replace(begun=True))
            yield f"{name} begin to land", with_source(world, nth, transfers=begun)
        else:
            yield (
                f"{name} are refused",
                self._to_prefill(gone, nth, fails),
            )
        if transfer.cancelled and not transfer.begun and is_open:
            yield (
                f"{name} are cancelled",
                self._to_prefill(gone, nth, fails),
            )
        if after := spend(gone, "failure"):
            yield (
                f"{name} fail",
                self._to_prefill(after, nth, fails),
            )

    # --- events to the tables, and what they want done ---

    def _to_decode(self, world: World, token: Token) -> World:
        at = world.table, token
        table, outputs = self.decode.step(*at)
        world = world._replace(table=table)
        for output in outputs:
            world = self._seen(world, self.decode.oddities.get(at))
            match output:
                case ("expect", tag, slot):
                    completions = (
                        *world.completions[:slot],
                        NO_COMPLETION,
                        *world.completions[slot + 1 :],
                    )
                    world = world._replace(tags=(*world.tags, (tag, 0, 0)), completions=completions)
                case ("tell", link, message):
                    nth = self.links.index(link)
                    if world.sources[nth].link_up:
                        asked = (*world.sources[nth].asked, message)
                        world = with_source(world, nth, asked=asked)
                case ("compare", tag):
                    world = world._replace(comparing=(*world.comparing, tag))
                case ("fence", tags) if not self._drop_after_fence:
                    world = world._replace(fences=(*world.fences, tags))
                case ("fence", tags):
                    is_late = is_landing(world, tags)
                    world = without_tags(world, tags)
                    if is_late:
                        return world
                    world = self._to_decode(world, ("fenced",))
        return self._seen(world, self.decode.oddities.get(at))

    def _to_prefill(self, world: World, nth: int, token: Token) -> World:
        one = world.sources[nth]
        at = one.table, token
        table, outputs = self.prefill.step(*at)
        if table != one.table:
            one = one._replace(table=table)
        for output in outputs:
            world = self._seen(put(world, nth, one), self.prefill.oddities.get(at))
            match output:
                case ("write", *what):
                    one = one._replace(transfers=(*one.transfers, Transfer(*what)))
                case ("digest", generation):
                    one = one._replace(digesting=generation)
                case ("cancel",):
                    transfers = tuple(each._replace(cancelled=True) for each in one.transfers)
                    one = one._replace(transfers=transfers)
                case ("tell", message) if one.link_up:
                    one = one._replace(told=(*one.told, message))
        return self._seen(put(world, nth, one), self.prefill.oddities.get(at))


def _under_way(transfers: tuple[Transfer, ...]) -> tuple[int, ...]:
    return tuple(sorted(transfer.nth for transfer in transfers))


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    labels: list[str] = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return labels[::-1]
