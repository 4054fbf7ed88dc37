# SPDX-License-Identifier: Apache-2.0
"""The real room tables as automata: a local state is a number, and what an event does to it is
worked out once."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar

import msgspec
import numpy as np
from counted_tags import CountedTags
from plain_plan import places_of, plan_of

from sglang_mooncake.executor import Executor
from sglang_mooncake.layout import COMPLETION_BYTES, CompletionRecord, Verify
from sglang_mooncake.messages import (
    RoomAbort,
    RoomComputed,
    RoomDigests,
    RoomFailed,
    RoomRequest,
    RoomWait,
)
from sglang_mooncake.rooms import decode, prefill
from sglang_mooncake.rooms.events import Aborted, Broken, Opened, Tick
from sglang_mooncake.rooms.room import Room, RoomView
from sglang_mooncake.rooms.states import ENDS, RoomState
from sglang_mooncake.side import broken

ROOM, PAGES, LAYERS = 1, 2, 2
DECODE_RANK = "d"
CHUNKS = (
    prefill.Chunk(np.array([0]), 0, None, 0.0),
    prefill.Chunk(np.array([1]), 1, 0, 0.0),
)
Token = tuple[Any, ...]
#: What SGLang's schedulers expect of a room of which they have named or sent no page.
UNMOVED = {RoomState.OPEN, RoomState.COMPUTING, RoomState.READY} | ENDS - {RoomState.DONE}


class SeenRoom(Room):
    """Shows itself to a second thread whenever another view has been put in its place."""

    __slots__ = ()
    look: ClassVar[Callable[[RoomView], None] | None] = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if SeenRoom.look is not None and name == "view":
            SeenRoom.look(value)


@contextmanager
def another_thread(look: Callable[[RoomView], None]) -> Iterator[None]:
    SeenRoom.look = look
    try:
        yield
    finally:
        SeenRoom.look = None


def oddity(view: RoomView, before: RoomState) -> str | None:
    """What a scheduler may not see of a room; `before`: in which state it was seen last."""
    state = view.state
    if not view.exposed and state not in UNMOVED:
        return f"a room of which nothing can move, {state.value}"
    if state in ENDS - {RoomState.DONE} and view.reason is None:
        return "a room that failed without a reason"
    if state is RoomState.REQUESTED and not view.expected:
        return "a room whose pages are asked for, and which awaits nothing"
    if before in ENDS and state is not before:
        return "a room that goes on when it is over"
    return None


@dataclass
class Local:
    """A room table with its one room."""

    rooms: Any
    room: Room


def _frozen(value: Any) -> Any:
    """A value to compare states by. Sentences and figures, which decide nothing, are all alike."""
    return _way_to_freeze(type(value))(value)


@cache
def _way_to_freeze(kind: type) -> Callable[[Any], Any]:
    if issubclass(kind, str):
        return lambda one: one if len(one) <= 3 else "…"
    if issubclass(kind, dict):
        return lambda one: frozenset((_frozen(key), _frozen(entry)) for key, entry in one.items())
    if issubclass(kind, list | tuple | deque):
        return lambda one: tuple(map(_frozen, one))
    if issubclass(kind, set | frozenset):
        return lambda one: frozenset(map(_frozen, one))
    if issubclass(kind, prefill.Write):
        return lambda one: (one.key, one.early)
    if issubclass(kind, np.ndarray):
        return lambda one: tuple(one.tolist())
    if issubclass(kind, int | float | bytes | range | Enum | None):
        return lambda one: one
    if issubclass(kind, msgspec.Struct):
        left_out = {"landed_nbytes"} if kind is RoomView else set()
        names = [one for one in kind.__struct_fields__ if one not in left_out]
        return lambda one: (kind.__name__, *(_frozen(getattr(one, name)) for name in names))
    if is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        return lambda one: tuple(_frozen(getattr(one, name)) for name in names)
    return lambda one: _frozen(vars(one))


class Automaton:
    """A room table whose states are numbers; 0 is the first one.

    Args:
        side: whose table it is.
        event: makes the rules' event of a token, for a room.
        output: makes a token of an instruction.
        failed: what the rules are told of an event or instruction that raised.
    """

    def __init__(
        self,
        side: str,
        first: Local,
        event: Callable[[Token, Room], Any],
        output: Callable[[Any], Token | None],
        failed: Callable[[Any, Exception], Any],
    ) -> None:
        self._side, self._event, self._output, self._failed = side, event, output, failed
        #: What a second thread has seen and must not see, by state and event.
        self.oddities: dict[tuple[int, Token], str] = {}
        self._numbers: dict[Any, int] = {}
        #: Of what was frozen before: that takes ten times as long.
        self._known: dict[bytes, int] = {}
        self._states: list[bytes] = []
        self._add(first)
        # Each is worked out once, for all states of the world in which it happens.
        self.step = cache(self._step)
        self.room = cache(lambda state: self._local(state).room)
        self.rooms = cache(lambda state: len(self._local(state).rooms))

    def _local(self, state: int) -> Local:
        local: Local = pickle.loads(self._states[state])
        return local

    def _add(self, local: Local) -> int:
        pickled = pickle.dumps(local)
        if pickled not in self._known:
            number = self._numbers.setdefault(_frozen(local), len(self._states))
            if number == len(self._states):
                self._states.append(pickled)
            self._known[pickled] = number
        return self._known[pickled]

    def _step(self, state: int, token: Token) -> tuple[int, tuple[Token, ...]]:
        """The state after an event, and what the rules want done."""
        local = self._local(state)
        outputs: list[Token] = []

        def perform(instruction: Any) -> None:
            output = self._output(instruction)
            if output is not None:
                outputs.append(output)

        now_s = token[1] if token[0] == "tick" else 0.0
        executor: Executor[Any, Any] = Executor(
            local.rooms.handle, perform, self._failed, clock=lambda: now_s
        )
        event = self._event(token, local.room)
        if event is not None:
            before = local.room.view.state

            def look(view: RoomView) -> None:
                nonlocal before
                if odd := oddity(view, before):
                    self.oddities.setdefault((state, token), f"{self._side} shows {odd}")
                before = view.state

            with another_thread(look):
                executor.submit(event)
        return self._add(local), tuple(outputs)


@dataclass(frozen=True, eq=False)
class Heard:
    """A message. There is one object of each, so that states are compared quickly."""

    message: RoomWait | RoomComputed | RoomRequest | RoomAbort | RoomDigests | RoomFailed


heard = cache(Heard)


class Record(CompletionRecord):
    """A completion record. There is one object of each: a hash of eight figures takes long."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@cache
def recorded(completion: CompletionRecord | None) -> Record | None:
    return None if completion is None else Record(*astuple(completion))


def unworded(message: Any) -> Heard:
    """Reasons make no difference to the rules."""
    if isinstance(message, RoomAbort | RoomFailed):
        message = msgspec.structs.replace(message, reason="")
    return heard(message)


def _decode_event(token: Token, room: Room) -> Any:
    match token:
        case ("name",):  # the scheduler's own thread, before the loop can hear of it
            room.named = True
        case ("withdraw",):
            room.withdrawn = True
        case ("named",):
            return decode.PagesNamed(room, np.arange(PAGES), 0, 0)
        case ("aborted",):
            return Aborted(room, "")
        case ("broken",):
            return Broken(room, "")
        case ("arrived",):
            return decode.Arrived(room)
        case ("fenced",):
            return decode.Fenced(room)
        case ("link down", link):
            return decode.LinkDown(link, "")
        case ("told", link, Heard(RoomComputed() as message)):
            return decode.PeerComputed(link, message)
        case ("told", link, Heard(RoomDigests() as message)):
            return decode.PeerDigested(link, message)
        case ("verified", tag, is_equal):
            return decode.Verified(room, tag, None if is_equal else "")
        case ("told", link, heard):
            return decode.PeerFailed(link, heard.message)
        case ("tick", _):
            return Tick()
        case _:
            raise ValueError(token)
    return None


def _decode_output(instruction: Any) -> Token | None:
    match instruction:
        case decode.Expect(tag=tag, slot=slot):
            return "expect", tag, slot
        case decode.Tell(link, message):
            return "tell", link, unworded(message)
        case decode.Fence(_, tags):
            return "fence", tags
        case decode.Compare(expected=expected):
            return "compare", expected.tag
    return None


def _plan_of(peer: str) -> Any:
    return plan_of(peer, LAYERS)


def _prefill_event(token: Token, room: Room) -> Any:
    match token:
        case ("open",):
            return Opened(room)
        case ("chunk", number):
            return prefill.ChunkSent(room, CHUNKS[number])
        case ("layers", number):  # of one chunk, the first of its two
            chunk = CHUNKS[number]
            return prefill.LayersFilled(room, chunk.pages, chunk.first, LAYERS - 1, 0.0)
        case ("aborted",):
            return Aborted(room, "")
        case ("computed",):
            return prefill.Computed(room)
        case ("message", Heard(RoomWait() as message)):
            return prefill.WaitsForPrompt(DECODE_RANK, message)
        case ("message", Heard(RoomRequest() as message)):
            return prefill.Requested(DECODE_RANK, message)
        case ("message", heard):
            return prefill.RoomAborted(DECODE_RANK, heard.message)
        case ("ended", is_done, nth):
            return prefill.WriteEnded(room, DECODE_RANK, nth, None if is_done else "")
        case ("digested", generation, True):
            message = RoomDigests(ROOM, generation, Verify.ALL)
            return prefill.Digested(room, DECODE_RANK, message)
        case ("digested", _, False):
            return prefill.Digested(room, DECODE_RANK, None, "")
        case ("lost",):
            return prefill.PeerLost(DECODE_RANK, "")
        case ("tick", _):
            return Tick()
    raise ValueError(token)


def _prefill_output(instruction: Any) -> Token | None:
    match instruction:
        case prefill.Write() as write:
            tag, slot = write.target.tag, write.target.completion_slot
            nbytes = write.blocks.total_nbytes + (COMPLETION_BYTES if write.completion else 0)
            places = tuple(places_of(write))
            completion = recorded(write.completion)
            return "write", tag, places, nbytes, completion, slot, write.nth, write.early
        case prefill.CancelWrites():
            return ("cancel",)
        case prefill.Digest(generation=generation):
            return "digest", generation
        case prefill.Tell(_, message):
            return "tell", unworded(message)
    return None


def decode_automaton(
    links: tuple[str, ...], computed_first: bool = False, verify: Verify = Verify.OFF
) -> tuple[Automaton, tuple[Token, ...]]:
    """The table with its links up, and what it has said by then."""
    deadlines, tags = decode.DecodeDeadlines(10.0, 20.0), CountedTags(200)
    rooms = decode.DecodeRooms(deadlines, 2 * len(links), 100, tags, computed_first, verify=verify)
    room = SeenRoom(ROOM, 0.0, serial=1)
    sources = tuple(decode.RoomSource(link, aux=not nth) for nth, link in enumerate(links))
    rooms.handle(Opened(room), 0.0)
    rooms.handle(decode.SourcesChosen(room, sources), 0.0)
    said = [out for link in links for out in rooms.handle(decode.LinkUp(link, LAYERS), 0.0)]
    assert room.view.state is (RoomState.COMPUTING if computed_first else RoomState.READY)
    made = Automaton(
        "decode", Local(rooms, room), _decode_event, _decode_output, decode.after_failure
    )
    return made, tuple(token for token in map(_decode_output, said) if token is not None)


def prefill_automaton(computed_first: bool = False) -> Automaton:
    rooms = prefill.PrefillRooms(_plan_of, 10.0, 40.0, computed_first)
    local = Local(rooms, SeenRoom(ROOM, 0.0, serial=1))
    return Automaton("prefill", local, _prefill_event, _prefill_output, broken)
