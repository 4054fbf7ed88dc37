# SPDX-License-Identifier: Apache-2.0
"""The prefill side at work: chunks from the scheduler, requests from decode ranks, transfers of the
engine. What is to be done is decided in `rooms/prefill.py`; here it is done, on the loop thread, by
`links/`, `gpu_events.py` and `outgoing.py`."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zmq

import te
from bootstrap_server import BootstrapClient
from sglang_mooncake.context import RankContext
from sglang_mooncake.control import ControlLoop
from sglang_mooncake.digesting import digester_of
from sglang_mooncake.dp_ranks import DpRankNotices
from sglang_mooncake.executor import Executor
from sglang_mooncake.gpu_events import EventWaiter
from sglang_mooncake.kept_bytes import KeptBytes
from sglang_mooncake.layout import Layout, Plan, can_go_by_layers, without_addresses
from sglang_mooncake.links.prefill import Connected, PrefillLinks
from sglang_mooncake.links.sockets import PortsTaken
from sglang_mooncake.messages import HelloReply, RoomAbort, RoomFailed
from sglang_mooncake.outgoing import Outgoing, TransferEnded
from sglang_mooncake.rank_report import DecodePeer
from sglang_mooncake.rooms import prefill as rooms
from sglang_mooncake.rooms.prefill_events import StreamEvent
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sent_digests import SentDigests
from sglang_mooncake.side import Side, broken
from sglang_mooncake.stats import Recorder

__all__ = ["PrefillSide"]

_START_TIMEOUT_S = 10.0
#: In the place of a link's key, which is longer: nobody else can use it.
_WITHOUT_LINK = "(no link)"


class Stages(Protocol):
    """The other pipeline stages of this server (`seam.StageBoard`). Called on the loop thread."""

    def ready(self, room: Room) -> None: ...
    def failed(self, room: Room) -> None: ...
    def forget(self, room: Room) -> None: ...


class PrefillSide(Side):
    """See `control.Handler`. `open_room` and `send_chunk…` are for the scheduler thread: they cost
    microseconds and never wait."""

    def __init__(
        self,
        context: RankContext,
        engine: te.Engine,
        layout: Layout,
        recorder: Recorder,
        stages: Stages | None = None,
    ) -> None:
        self._context, self._recorder, self._stages = context, recorder, stages
        digester = digester_of(engine, context.verify)
        self._digests = SentDigests(
            digester,
            recorder,
            context.name,
            lambda made: self._loop.post(made),
            None if context.verify_dir is None else KeptBytes(context.verify_dir, context.name),
        )
        self._rooms = rooms.PrefillRooms(
            self._plan_of,
            context.deadlines.bootstrap_s,
            2 * context.deadlines.waiting_s,
            context.waits_for_prompt,
            layout.pages_dealt,
            context.names,
            lambda: any(self._links),
            context.verify if digester is not None else None,
        )
        #: Whether pages can go some layers at a time.
        self.by_layers = can_go_by_layers(layout)
        self._executor = Executor(self._rooms.handle, self._perform, self._failed)
        self._loop = ControlLoop("kv-prefill", self)
        self._links = PrefillLinks(
            context.name,
            self._loop,
            engine,
            lambda hello: Plan(
                layout, hello.layout, context.place, hello.place, context.names.flags
            ),
            HelloReply(
                None,
                engine.id,
                engine.epoch,
                layout=without_addresses(layout),
                place=context.place,
            ),
            self._executor.submit,
            context.deadlines,
            context.keys.control,
        )
        self._outgoing = Outgoing(engine, recorder, lambda ended: self._loop.post(ended))
        self._gpu_events = EventWaiter(self._happened)
        recorder.open_rooms = lambda: self._rooms.rooms
        self._dp_ranks = DpRankNotices(self._register_dp_rank, self.fail)
        self._ports: tuple[int, int] | None = None
        self._port: queue.Queue[int | Exception] = queue.Queue(1)
        #: Rooms (by serial) that the scheduler polls in every step. Its thread alone uses this.
        self._polled: set[int] = set()

    # --- for the manager and the scheduler ---

    @property
    def control_key(self) -> str:
        """The public key with which decode ranks make sure that they speak to this rank; empty
        without a secret."""
        return self._links.control_key

    def decode_peers(self) -> list[DecodePeer]:
        """The decode ranks that this rank can write to, each once. Any thread may ask."""
        # One that knows our registry by several names has a link for each.
        found = {one.peer.id: one for one in self._links}
        return [DecodePeer(name, one.peer.address[0], one.place) for name, one in found.items()]

    def start(self, ports: tuple[int, int] | None = None) -> int:
        """Starts the loop; returns the port where decode ranks say hello.

        Args:
            ports: the first and the last of those of which it is one (default: any).

        Raises:
            zmq.ZMQError: the address of this rank cannot be bound.
            PortsTaken: none of `ports` is free.
            TimeoutError: the loop did not come so far within 10 s.
        """
        self._ports = ports
        self._gpu_events.start()
        self._digests.start()
        self._loop.start()
        try:
            port = self._port.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(
                f"{self._context.name}: its thread for control messages has not opened its port "
                f"after {_START_TIMEOUT_S:g} s; is the machine overloaded?"
            ) from None
        if isinstance(port, Exception):
            raise port
        return port

    def open_room(self, number: int, register_dp_rank: bool) -> Room:
        """`register_dp_rank`: let the registry know that this DP rank has the room."""
        room = self.new_room(number)
        self._polled.add(room.serial)
        if register_dp_rank:
            self._dp_ranks.tell(room)
        return room

    def send_chunk(
        self, room: Room, chunk: rooms.Chunk, events: Sequence[StreamEvent] = ()
    ) -> None:
        """Leaves the chunk for the loop. Waking the loop is a system call, and one at which a
        crowded kernel takes the core from the scheduler (on two cores with four schedulers, 11 of
        14 calls that took over 1 ms lost it there). SGLang sends the chunks of a whole batch in a
        row and then polls: one wake-up in `polled` serves them all, unless nothing is polled.

        events: nothing of the chunk is read before these have happened. Chunks keep their order.
        """
        self._loop.leave(rooms.ChunkSent(room, chunk, events))
        if chunk.is_last:
            self._polled.add(room.serial)
        if not self._polled:
            self._loop.wake()

    def send_layers(
        self,
        room: Room,
        pages: npt.NDArray[np.integer],
        first: int,
        below: int,
        events: Sequence[StreamEvent] = (),
        wake: bool = True,
    ) -> None:
        """While a forward goes on: of these pages (as in `Chunk`), every layer with a number below
        `below` is filled once `events` have happened. `send_chunk` follows when all are.

        wake: the loop, at once: the scheduler polls nothing before its forward ends. Who says this
            of several rooms leaves it to the last of them.
        """
        now_s = time.monotonic()
        self._loop.leave(rooms.LayersFilled(room, pages, first, below, now_s, events))
        if wake:
            self._loop.wake()

    @property
    def bytes_per_s(self) -> float:
        """At which rate this rank's bytes land, as measured; 0.0 before anything was."""
        return self._recorder.bytes_per_s

    def computed(self, room: Room) -> None:
        """The whole prompt is computed. The next `polled` wakes the loop, as after `send_chunk`."""
        self._loop.leave(rooms.Computed(room))

    def polled(self, room: Room, sent: bool) -> None:
        """The scheduler asks for the state of a room. It does so in every step for rooms that wait
        for their decode ranks and for those whose last chunk is `sent`, until they are over."""
        self._loop.wake()
        if room.view.over or (room.view.state is not RoomState.OPEN and not sent):
            self._polled.discard(room.serial)

    def given_up(self, room: int, reason: str, refused: bool = False) -> None:
        """A decode rank that has no link to this one will never ask for this room. Any thread may
        call; a room that other decode ranks ask for goes on. `refused`: see `RoomAbort`."""
        self._loop.post(rooms.RoomAborted(_WITHOUT_LINK, RoomAbort(room, 0, reason, refused)))

    def misdirect(self, room: Room, reason: str) -> None:
        """The request seems to lead decode ranks to another address than this instance's: the room
        does not wait long for a first decode rank."""
        self._loop.leave(rooms.Misdirected(room, reason))

    def abort(self, room: Room, reason: str) -> None:
        self._polled.discard(room.serial)
        super().abort(room, reason)

    def close_room(self, room: Room) -> None:
        self._polled.discard(room.serial)
        super().close_room(room)

    def close(self) -> None:
        super().close()
        self._dp_ranks.close()
        self._gpu_events.close()
        self._digests.close()

    # --- control.Handler ------------------------------------------------------------------------

    def started(self, loop: ControlLoop) -> None:
        del loop  # the links have it
        try:
            self._port.put(self._links.listen(self._context.host, self._ports))
        except (zmq.ZMQError, PortsTaken) as error:
            self._port.put(error)

    def stopped(self) -> None:
        self._links.close()

    def on_stimulus(self, stimulus: Any, now_s: float) -> None:
        del now_s
        match stimulus:
            case rooms.Closed(room):
                self._executor.submit(stimulus)
                if self._stages is not None:
                    self._stages.forget(room)
            case Connected():
                self._links.connected(stimulus)
            case TransferEnded():
                self._transfer_ended(stimulus)
            case _:
                self._executor.submit(stimulus)

    def on_tick(self, now_s: float) -> None:
        self._executor.submit(rooms.Tick())
        for ended in self._outgoing.overlooked():
            self._transfer_ended(ended)
        self._links.tick(now_s)

    def _register_dp_rank(self, room: int) -> None:
        """In a thread of `DpRankNotices`. Raises BootstrapError."""
        context = self._context
        with BootstrapClient(context.bootstrap_address, keys=context.keys.registry) as client:
            client.register_dp_rank(room, context.coords.dp)

    # --- rooms ---

    def _plan_of(self, key: str) -> Plan:
        """Raises NoDataPath."""
        return self._links[key].plan

    def _perform(self, instruction: rooms.Instruction) -> None:
        match instruction:
            case rooms.Write(room, key):
                began_s = self._outgoing.begin(instruction, self._links[key])
                self._executor.submit(rooms.WriteBegan(room, began_s))
            case rooms.Digest():
                self._digests.make(instruction)
            case rooms.Undigested(room, reason):
                self._digests.gave_up(room, reason)
            case rooms.LookAgain(key):
                self._digests.look_again(instruction, self._links[key].rank)
            case rooms.AwaitEvents():
                self._gpu_events.wait_for(instruction)
            case rooms.CancelWrites(room, keys):
                self._outgoing.cancel(room, keys)
            case rooms.Tell(peer, message):
                self._links.send(peer, message)
            case rooms.FellBack(_, reason):
                self._recorder.fell_back(reason)
            case rooms.Met(room):
                if self._stages is not None:
                    self._stages.ready(room)
            case rooms.Over(room, writes):
                self._recorder.room_over(room, writes)
                if self._stages is not None:
                    self._tell_stages(room)

    def _failed(
        self, cause: rooms.Event | rooms.Instruction, error: Exception
    ) -> rooms.Event | None:
        match cause:
            case rooms.Write():
                return Outgoing.refused(cause, error)
            case rooms.Requested(peer, request) | rooms.WaitsForPrompt(peer, request):
                message = RoomFailed(request.room, request.generation, f"internal error: {error!r}")
                self._links.send(peer, message)
                return None
            case _:
                return broken(cause, error)

    def _happened(self, events: Sequence[rooms.EventsHappened]) -> None:
        """In the thread that waits for the GPU."""
        for event in events:
            self._loop.leave(event)
        self._loop.wake()

    def _tell_stages(self, room: Room) -> None:
        """A room is over. One that a newer use has replaced says nothing of that one."""
        assert self._stages is not None
        if room.view.state is RoomState.SUPERSEDED:
            self._stages.forget(room)
        elif room.view.state is not RoomState.DONE:
            self._stages.failed(room)

    def _transfer_ended(self, ended: TransferEnded) -> None:
        outcome = self._outgoing.outcome(ended)
        if outcome is not None:
            self._executor.submit(outcome)
