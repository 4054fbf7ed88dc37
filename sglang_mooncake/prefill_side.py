# SPDX-License-Identifier: Apache-2.0
"""The prefill side at work: hellos from decode ranks, chunks from the scheduler, transfers of the
engine. What is to be done is decided in `rooms/prefill.py`; here it is done, on the loop thread."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import zmq

import te
from bootstrap_server import BootstrapClient, BootstrapError
from sglang_mooncake import messages
from sglang_mooncake.config import Config
from sglang_mooncake.context import RankContext
from sglang_mooncake.control import ControlLoop, open_router
from sglang_mooncake.layout import SEAL_BYTES, Layout, LayoutMismatch, Plan, Seal, seal_bytes
from sglang_mooncake.messages import (
    Hello,
    HelloReply,
    LinkReset,
    Message,
    MessageError,
    RoomAbort,
    RoomRequest,
)
from sglang_mooncake.rooms import prefill as rooms
from sglang_mooncake.rooms.states import RoomState, RoomView
from sglang_mooncake.side import Side
from sglang_mooncake.stats import Recorder

__all__ = ["PrefillSide"]

logger = logging.getLogger(__name__)

#: One seal is needed per transfer of a last chunk that is under way.
SEAL_SLOTS = 16_384
_START_TIMEOUT_S = 10.0
#: A peer that floods us must not keep the loop from everybody else's rooms.
MESSAGES_PER_TURN = 256


@dataclass(frozen=True, slots=True)
class _Destination:
    """A decode rank that said hello, and to which a data path stands."""

    name: str
    peer: te.Peer
    plan: Plan


@dataclass(frozen=True, slots=True)
class _Connected:
    """A worker's result: the data path to a decode rank, or why there is none."""

    identity: bytes
    name: str
    plan: Plan
    peer: te.Peer | str


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """What one room has under way, and the payload that it has had for each decode rank."""

    transfers: list[te.Transfer] = field(default_factory=list)
    nbytes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _TransferEnded:
    view: RoomView
    write: rooms.Write
    transfer: te.Transfer
    seal_slot: int | None


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
        config: Config,
        engine: te.Engine,
        layout: Layout,
        recorder: Recorder,
        stages: Stages | None = None,
    ) -> None:
        self._context, self._config, self._engine = context, config, engine
        self._layout, self._recorder, self._stages = layout, recorder, stages
        self._rooms = rooms.PrefillRooms(context.deadlines.bootstrap_s)
        self._destinations: dict[str, _Destination] = {}
        self._outgoing: dict[int, _Outgoing] = {}  # by serial of the room
        self._seals = np.zeros(SEAL_SLOTS * SEAL_BYTES, dtype=np.uint8)
        self._seal_region = engine.register(self._seals)
        self._free_seals = list(range(SEAL_SLOTS))
        self._loop = ControlLoop("kv-prefill", self)
        self._router: zmq.Socket[bytes] | None = None
        self._port: queue.Queue[int | Exception] = queue.Queue(1)
        #: Rooms (by serial) that the scheduler polls in every step. Its thread alone uses this.
        self._polled: set[int] = set()

    # --- for the manager and the scheduler ---

    def start(self) -> int:
        """Starts the loop; returns the port where decode ranks say hello.

        Raises:
            zmq.ZMQError: the address of this rank cannot be bound.
        """
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

    def send_chunk(self, view: RoomView, chunk: rooms.Chunk) -> None:
        """Leaves the chunk for the loop. Waking the loop is a system call, and one at which a
        crowded kernel takes the core from the scheduler (on two cores with four schedulers, 11 of
        14 calls that took over 1 ms lost it there). SGLang sends the chunks of a whole batch in a
        row and then polls: one wake-up in `polled` serves them all, unless nothing is polled."""
        self._loop.leave(rooms.ChunkSent(view, chunk))
        if chunk.is_last:
            self._polled.add(view.serial)
        if not self._polled:
            self._loop.wake()

    def polled(self, view: RoomView, sent: bool) -> None:
        """The scheduler asks for the state of a room. It does so in every step for rooms that wait
        for their decode ranks and for those whose last chunk is `sent`, until they are over."""
        self._loop.wake()
        if view.over or (view.state is not RoomState.OPEN and not sent):
            self._polled.discard(view.serial)

    def send_chunk_after(
        self, wait: Callable[[], None], view: RoomView, chunk: rooms.Chunk
    ) -> None:
        """The same once `wait()` (an event on a GPU stream) has returned, in a worker."""
        self._loop.work(wait, lambda _: rooms.ChunkSent(view, chunk))

    def abort(self, view: RoomView, reason: str) -> None:
        self._polled.discard(view.serial)
        super().abort(view, reason)

    def close_room(self, view: RoomView) -> None:
        self._polled.discard(view.serial)
        super().close_room(view)

    # --- control.Handler ------------------------------------------------------------------------

    def started(self, loop: ControlLoop) -> None:
        try:
            self._router, port = open_router(
                loop.zmq_context, self._context.host, messages.MESSAGE_BYTES_MAX
            )
        except zmq.ZMQError as error:
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
            case _Connected():
                self._connected(stimulus)
            case _TransferEnded():
                self._transfer_ended(stimulus, now_s)
            case _:
                self._apply(stimulus, now_s)

    def on_tick(self, now_s: float) -> None:
        self._apply(rooms.Tick(), now_s)
        for key, destination in list(self._destinations.items()):
            if not destination.peer.alive:
                self._lose(key, destination, now_s)
        self._recorder.open_rooms(len(self._rooms))
        self._recorder.write_if_due(now_s)

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
        key, now_s = identity.hex(), time.monotonic()
        match message:
            case Hello():
                self._greet(identity, message)
            case RoomAbort():  # welcome from strangers too: a refused rank gives its rooms up
                self._apply(rooms.RoomAborted(key, message), now_s)
            case RoomRequest() if key in self._destinations:
                self._apply(rooms.Requested(key, message), now_s)
            case RoomRequest():
                self._reply(identity, LinkReset(f"{self._context.name} has no data path to you"))
            case _:
                logger.warning("%s sent a %s to a prefill rank", key, type(message).__name__)

    def _greet(self, identity: bytes, hello: Hello) -> None:
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

        self._loop.work(connect, lambda peer: _Connected(identity, hello.rank, plan, peer))

    def _connected(self, result: _Connected) -> None:
        if isinstance(result.peer, str):
            logger.error("%s", result.peer)
            self._reply(result.identity, HelloReply(refused=result.peer))
            return
        self._destinations[result.identity.hex()] = _Destination(
            result.name, result.peer, result.plan
        )
        self._reply(result.identity, HelloReply(refused=None))

    def _reply(self, identity: bytes, message: Message) -> None:
        assert self._router is not None
        try:
            self._router.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The peer is gone (EHOSTUNREACH) or takes nothing in (EAGAIN): it has deadlines of its
            # own, and its next hello starts afresh.
            logger.warning("cannot tell %s: %s (%s)", identity.hex(), message, error)

    def _lose(self, key: str, destination: _Destination, now_s: float) -> None:
        reason = f"{self._context.name} lost the data path to {destination.name}"
        logger.warning("%s", reason)
        del self._destinations[key]
        self._apply(rooms.PeerLost(key, reason), now_s)
        self._reply(bytes.fromhex(key), LinkReset(reason))

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

    def _apply(self, event: rooms.Event, now_s: float) -> None:
        for instruction in self._rooms.handle(event, now_s):
            match instruction:
                case rooms.Write():
                    self._write(instruction, now_s)
                case rooms.CancelWrites(view):
                    for transfer in self._outgoing[view.serial].transfers:
                        transfer.cancel()
                case rooms.Tell(peer, message):
                    self._reply(bytes.fromhex(peer), message)
                case rooms.Met(view):
                    if self._stages is not None:
                        self._stages.ready(view)
                case rooms.Over(view):
                    self._outgoing.pop(view.serial, None)
                    self._recorder.room_over(view)
                    if self._stages is not None:
                        self._tell_stages(view)
        if self._stages is not None and isinstance(event, rooms.Closed):
            self._stages.forget(event.view)

    def _tell_stages(self, view: RoomView) -> None:
        """A room is over. One that a newer use has replaced says nothing of that one."""
        assert self._stages is not None
        if view.state is RoomState.SUPERSEDED:
            self._stages.forget(view)
        elif view.state is not RoomState.DONE:
            self._stages.failed(view)

    def _write(self, write: rooms.Write, now_s: float) -> None:
        seal_slot = None
        outgoing = self._outgoing.setdefault(write.view.serial, _Outgoing())
        try:
            destination = self._destinations[write.peer]
            blocks = self._blocks(write, destination.plan)
            if write.chunk.is_last:
                seal_slot = self._free_seals.pop()
                nbytes = outgoing.nbytes[write.peer] + blocks.total_nbytes
                blocks = self._sealed(write, destination.plan, blocks, nbytes, seal_slot)
            transfer = destination.peer.write(blocks, tag=write.target.tag)
        except (KeyError, IndexError, ValueError, te.Error) as error:
            if seal_slot is not None:
                self._free_seals.append(seal_slot)
            reason = f"could not hand {len(write.chunk.pages)} pages to the engine: {error!r}"
            self._apply(rooms.WriteEnded(write.view, reason), now_s)
            return
        outgoing.transfers.append(transfer)
        outgoing.nbytes[write.peer] += blocks.total_nbytes
        self._recorder.transfer_began(now_s)
        transfer.add_done_callback(
            lambda ended: self._loop.post(_TransferEnded(write.view, write, ended, seal_slot))
        )

    def _blocks(self, write: rooms.Write, plan: Plan) -> te.Blocks:
        chunk, target, span = write.chunk, write.target, write.span
        ours = chunk.pages[span.start - chunk.first : span.stop - chunk.first]
        theirs = messages.indices_from_bytes(target.pages[4 * span.start : 4 * span.stop])
        parts = [plan.kv(ours, theirs)]
        if chunk.is_last:
            parts.append(plan.state(chunk.states, messages.states_from_bytes(target.states)))
        if self._config.test_suppress_payload:
            parts.clear()
        if chunk.aux_slot is not None and target.aux_slot is not None:
            parts.append(plan.aux(chunk.aux_slot, target.aux_slot))
        return te.Blocks.concat(parts)

    def _sealed(
        self, write: rooms.Write, plan: Plan, blocks: te.Blocks, nbytes: int, seal_slot: int
    ) -> te.Blocks:
        """The blocks of a last chunk with the seal behind them. `nbytes`: the payload that the
        destination has had, with these blocks and without the seal."""
        target = write.target
        lists = zip(write.chunk.states, target.states, strict=False)
        seal = Seal(
            write.generation,
            write.sent.writes,
            write.sent.pages,
            states=sum(ours is not None and theirs is not None for ours, theirs in lists),
            aux=int(target.aux_slot is not None),
            nbytes=nbytes + SEAL_BYTES,
        )
        begin = seal_slot * SEAL_BYTES
        self._seals[begin : begin + SEAL_BYTES] = np.frombuffer(seal_bytes(seal), np.uint8)
        place = plan.seal(self._seal_region.address + begin, target.seal_slot)
        return te.Blocks.concat([blocks, place])

    def _transfer_ended(self, ended: _TransferEnded, now_s: float) -> None:
        view, transfer = ended.view, ended.transfer
        if ended.seal_slot is not None:
            self._free_seals.append(ended.seal_slot)
        self._outgoing[view.serial].transfers.remove(transfer)
        self._recorder.transfer_ended(transfer.nbytes, now_s)
        failure = None
        if transfer.poll() is not te.Status.DONE:
            failure = f"a transfer was {transfer.poll().value}: {transfer.reason}"
        self._apply(rooms.WriteEnded(view, failure), now_s)
        if view.state is RoomState.DONE:
            self._recorder.handed_over(now_s - ended.write.chunk.sent_s)
