# SPDX-License-Identifier: Apache-2.0
"""The prefill side at work: hellos from decode ranks, chunks from the scheduler, transfers of the
engine. What is to be done is decided in `rooms/prefill.py`; here it is done, on the loop thread."""

from __future__ import annotations

import errno
import logging
import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

import te
from bootstrap_server import BootstrapClient, BootstrapError
from sglang_mooncake import messages
from sglang_mooncake.context import RankContext
from sglang_mooncake.control import ControlLoop
from sglang_mooncake.destinations import Destination, Destinations
from sglang_mooncake.executor import Executor
from sglang_mooncake.layout import Layout, LayoutMismatch, Plan
from sglang_mooncake.links import PortsTaken, open_router
from sglang_mooncake.messages import (
    Hello,
    HelloReply,
    LinkReset,
    Message,
    MessageError,
    RoomAbort,
    RoomFailed,
    RoomRequest,
    RoomWait,
)
from sglang_mooncake.outgoing import Outgoing, TransferEnded
from sglang_mooncake.rooms import prefill as rooms
from sglang_mooncake.rooms.states import RoomState, RoomView
from sglang_mooncake.side import Side, broken
from sglang_mooncake.stats import Recorder
from sglang_mooncake.stream_order import StreamEvent, StreamOrder, Waited

__all__ = ["PrefillSide"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 10.0
#: A peer that floods us must not keep the loop from everybody else's rooms.
MESSAGES_PER_TURN = 256
#: Hellos whose data path is being made.
GREETINGS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class _Connected:
    """A worker's result: the data path to a decode rank, or why there is none."""

    identity: bytes
    rank: str
    plan: Plan
    peer: te.Peer | str


@dataclass(frozen=True, slots=True)
class _SentAfter:
    """A chunk whose pages the GPU has yet to fill."""

    sent: rooms.ChunkSent
    events: Sequence[StreamEvent]


class Stages(Protocol):
    """The other pipeline stages of this server (`seam.StageBoard`). Called on the loop thread."""

    def ready(self, view: RoomView) -> None: ...
    def failed(self, view: RoomView) -> None: ...
    def forget(self, view: RoomView) -> None: ...


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
        self._context, self._engine = context, engine
        self._layout, self._recorder, self._stages = layout, recorder, stages
        self._rooms = rooms.PrefillRooms(
            context.deadlines.bootstrap_s,
            2 * context.deadlines.waiting_s,
            context.waits_for_prompt,
            layout.pages_dealt,
        )
        self._executor = Executor(self._rooms.handle, self._perform, self._failed)
        self._destinations = Destinations()
        self._greeting: set[bytes] = set()
        self._next_probe_s = 0.0
        self._loop = ControlLoop("kv-prefill", self)
        self._outgoing = Outgoing(engine, recorder, lambda ended: self._loop.post(ended))
        self._order = StreamOrder(
            self._executor.submit,
            lambda view, reason: self._executor.submit(rooms.Broken(view, reason)),
            lambda waited: self._loop.post(waited),
            context.deadlines.waiting_s,
        )
        self._router: zmq.Socket[bytes] | None = None
        self._ports: tuple[int, int] | None = None
        self._port: queue.Queue[int | Exception] = queue.Queue(1)
        #: Rooms (by serial) that the scheduler polls in every step. Its thread alone uses this.
        self._polled: set[int] = set()

    # --- for the manager and the scheduler ---

    def start(self, ports: tuple[int, int] | None = None) -> int:
        """Starts the loop; returns the port where decode ranks say hello.

        Args:
            ports: the first and the last of those of which it is one (default: any).

        Raises:
            zmq.ZMQError: the address of this rank cannot be bound.
            PortsTaken: none of `ports` is free.
        """
        self._ports = ports
        self._order.start()
        self._loop.start()
        port = self._port.get(timeout=_START_TIMEOUT_S)
        if isinstance(port, Exception):
            raise port
        return port

    def open_room(self, room: int, register_dp_rank: bool) -> RoomView:
        """`register_dp_rank`: let the registry know that this DP rank has the room."""
        view = self.new_room(room)
        self._polled.add(view.serial)
        if register_dp_rank:
            self._loop.work(
                lambda: self._register_dp_rank(room),
                lambda failure: rooms.Broken(view, failure) if failure else None,
            )
        return view

    def send_chunk(
        self, view: RoomView, chunk: rooms.Chunk, events: Sequence[StreamEvent] = ()
    ) -> None:
        """Leaves the chunk for the loop. Waking the loop is a system call, and one at which a
        crowded kernel takes the core from the scheduler (on two cores with four schedulers, 11 of
        14 calls that took over 1 ms lost it there). SGLang sends the chunks of a whole batch in a
        row and then polls: one wake-up in `polled` serves them all, unless nothing is polled.

        events: nothing of the chunk is read before these have happened. Chunks keep their order.
        """
        sent = rooms.ChunkSent(view, chunk)
        self._loop.leave(_SentAfter(sent, events) if events else sent)
        if chunk.is_last:
            self._polled.add(view.serial)
        if not self._polled:
            self._loop.wake()

    def computed(self, view: RoomView) -> None:
        """The whole prompt is computed. The next `polled` wakes the loop, as after `send_chunk`."""
        self._loop.leave(rooms.Computed(view))

    def polled(self, view: RoomView, sent: bool) -> None:
        """The scheduler asks for the state of a room. It does so in every step for rooms that wait
        for their decode ranks and for those whose last chunk is `sent`, until they are over."""
        self._loop.wake()
        if view.over or (view.state is not RoomState.OPEN and not sent):
            self._polled.discard(view.serial)

    def abort(self, view: RoomView, reason: str) -> None:
        self._polled.discard(view.serial)
        super().abort(view, reason)

    def close_room(self, view: RoomView) -> None:
        self._polled.discard(view.serial)
        super().close_room(view)

    def close(self) -> None:
        super().close()
        self._order.close()

    # --- control.Handler ------------------------------------------------------------------------

    def started(self, loop: ControlLoop) -> None:
        try:
            self._router, port = open_router(
                loop.zmq_context, self._context.host, messages.MESSAGE_BYTES_MAX, self._ports
            )
        except (zmq.ZMQError, PortsTaken) as error:
            self._port.put(error)
            return
        loop.add_reader(self._router, self._read_peers)
        self._port.put(port)

    def stopped(self) -> None:
        if self._router is not None:
            self._router.close(linger=0)

    def on_stimulus(self, stimulus: Any, now_s: float) -> None:
        match stimulus:
            case None:
                pass  # a worker that went well and has nothing to say
            case _SentAfter(sent, events):
                self._order.submit(sent.view, sent, events)
            case rooms.ChunkSent(view):
                self._order.submit(view, stimulus)
            case Waited():
                self._order.waited(stimulus)
            case rooms.Closed(view):
                self._executor.submit(stimulus)
                if self._stages is not None:
                    self._stages.forget(view)
            case _Connected():
                self._connected(stimulus)
            case TransferEnded():
                self._transfer_ended(stimulus, now_s)
            case _:
                self._executor.submit(stimulus)

    def on_tick(self, now_s: float) -> None:
        self._executor.submit(rooms.Tick())
        for ended in self._outgoing.overlooked():
            self._transfer_ended(ended, now_s)
        for destination in self._destinations:
            if not destination.peer.alive:
                self._reset(destination, f"lost the data path to {destination.rank}")
        if now_s >= self._next_probe_s:
            self._next_probe_s = now_s + self._context.deadlines.heartbeat_s
            self._probe(self._destinations)
        self._recorder.open_rooms(len(self._rooms))

    # --- peers ---

    def _read_peers(self) -> None:
        assert self._router is not None
        for _ in range(MESSAGES_PER_TURN):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise MessageError(f"{len(frames)} frames where one message was expected")
                message = messages.decode(frames[0])
            except MessageError as error:
                logger.warning("refused a message from %s: %s", identity.hex(), error)
                self._reply(identity, HelloReply(refused=str(error)))
                continue
            self._take(identity, message)

    def _take(self, identity: bytes, message: Message) -> None:
        key = identity.hex()
        match message:
            case Hello():
                self._greet(identity, message)
            case RoomAbort():  # welcome from strangers too: a refused rank gives its rooms up
                self._executor.submit(rooms.RoomAborted(key, message))
            case RoomWait() if key in self._destinations:
                self._executor.submit(rooms.Awaited(key, message))
            case RoomRequest() if key in self._destinations:
                self._executor.submit(rooms.Requested(key, message))
            case RoomRequest() | RoomWait():
                self._reply(identity, LinkReset(f"{self._context.name} has no data path to you"))
            case _:
                logger.warning("%s sent a %s to a prefill rank", key, type(message).__name__)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if identity in self._greeting:
            return  # it will be answered
        if len(self._greeting) >= GREETINGS_MAX:
            reason = f"{GREETINGS_MAX} decode ranks are being connected: say hello again later"
            self._reply(identity, HelloReply(refused=f"{self._context.name}: {reason}"))
            return
        try:
            plan = Plan(self._layout, hello.layout, self._context.place, hello.place)
        except LayoutMismatch as error:
            logger.error("refused %s: %s", hello.rank, error)
            self._reply(identity, HelloReply(refused=str(error)))
            return

        def connect() -> te.Peer | str:
            try:
                return self._engine.connect(hello.card)
            except te.Error as error:
                return f"{self._context.name} cannot reach the engine of {hello.rank}: {error}"
            except Exception as error:  # the card is the peer's, who waits for an answer
                logger.exception("the hello of %s", hello.rank)
                return f"{self._context.name} cannot connect {hello.rank}: {error!r}"

        self._greeting.add(identity)
        self._loop.work(connect, lambda peer: _Connected(identity, hello.rank, plan, peer))

    def _connected(self, result: _Connected) -> None:
        self._greeting.discard(result.identity)
        if isinstance(result.peer, str):
            logger.error("%s", result.peer)
            self._reply(result.identity, HelloReply(refused=result.peer))
            return
        made = Destination(result.identity.hex(), result.rank, result.peer, result.plan)
        logger.info("%s writes to %s over %s", self._context.name, result.rank, _way(result.peer))
        for former in self._destinations.add(made):
            self._reset(former, f"has too many links to {former.rank}")
        # First the others: this hello may be the end of one of them.
        self._probe([one for one in self._destinations.of_engine(made) if one is not made])
        self._probe([made])

    def _probe(self, destinations: Iterable[Destination]) -> None:
        """Says that the data path stands. Whoever cannot be told has gone, or has said hello again
        over another connection: nothing else tells us that a control connection has ended."""
        for destination in destinations:
            stands = HelloReply(None, self._engine.id, self._engine.epoch)
            self._reply(bytes.fromhex(destination.key), stands)

    def _reply(self, identity: bytes, message: Message) -> None:
        assert self._router is not None
        try:
            self._router.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EAGAIN: it takes nothing in; it has deadlines of its own.
            destination = self._destinations.get(identity.hex())
            if error.errno != errno.EHOSTUNREACH or destination is None:
                logger.warning("cannot tell %s: %s (%s)", identity.hex(), message, error)
            else:
                self._lose(destination, f"lost the control connection to {destination.rank}")

    def _lose(self, destination: Destination, what: str) -> None:
        """It is no destination any more: its rooms end."""
        self._destinations.remove(destination.key)
        logger.warning("%s %s", self._context.name, what)
        self._executor.submit(rooms.PeerLost(destination.key, f"{self._context.name} {what}"))

    def _reset(self, destination: Destination, what: str) -> None:
        """The same for one that is there still: it is to say hello again."""
        self._lose(destination, what)
        reason = f"{self._context.name} {what}"
        self._reply(bytes.fromhex(destination.key), LinkReset(reason))

    def _register_dp_rank(self, room: int) -> str | None:
        client = BootstrapClient(self._context.bootstrap_address)
        try:
            client.register_dp_rank(room, self._context.coords.dp)
        except BootstrapError as error:
            return f"cannot tell the bootstrap server which DP rank has room {room}: {error}"
        finally:
            client.close()
        return None

    # --- rooms ---

    def _perform(self, instruction: rooms.Instruction) -> None:
        match instruction:
            case rooms.Write(peer=key):
                destination = self._destinations[key]
                self._outgoing.begin(instruction, destination.peer, destination.plan)
            case rooms.CancelWrites(view):
                self._outgoing.cancel(view)
            case rooms.Tell(peer, message):
                self._reply(bytes.fromhex(peer), message)
            case rooms.Met(view):
                if self._stages is not None:
                    self._stages.ready(view)
            case rooms.Over(view):
                self._outgoing.forget(view)
                self._recorder.room_over(view)
                if self._stages is not None:
                    self._tell_stages(view)

    def _failed(
        self, cause: rooms.Event | rooms.Instruction, error: Exception
    ) -> rooms.Event | None:
        match cause:
            case rooms.Write():
                return Outgoing.refused(cause, error)
            case rooms.Requested(peer, request) | rooms.Awaited(peer, request):
                message = RoomFailed(request.room, request.generation, f"internal error: {error!r}")
                self._reply(bytes.fromhex(peer), message)
                return None
            case _:
                return broken(cause, error)

    def _tell_stages(self, view: RoomView) -> None:
        """A room is over. One that a newer use has replaced says nothing of that one."""
        assert self._stages is not None
        if view.state is RoomState.SUPERSEDED:
            self._stages.forget(view)
        elif view.state is not RoomState.DONE:
            self._stages.failed(view)

    def _transfer_ended(self, ended: TransferEnded, now_s: float) -> None:
        outcome = self._outgoing.outcome(ended)
        if outcome is None:
            return
        self._executor.submit(outcome)
        if outcome.view.state is RoomState.DONE:
            self._recorder.handed_over(now_s - ended.write.chunk.sent_s)


def _way(peer: te.Peer) -> str:
    """The transport, what to expect of it, and why it is no better one."""
    rate = f", {peer.bytes_per_s / 1e9:.3g} GB/s at best" if peer.bytes_per_s else ""
    why = f" ({peer.transport_reason})" if peer.transport_reason else ""
    return f"{peer.transport}{rate}{why}"
