# SPDX-License-Identifier: Apache-2.0
"""The decode side at work: instances and links to their prefill ranks, pages opened for writing,
fences. What is to be done is decided in `rooms/decode.py`; here it is done, on the loop thread."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

import te
from bootstrap_server import Instance, MismatchError, Rank, matching
from sglang_mooncake import messages
from sglang_mooncake.config import Config
from sglang_mooncake.context import RankContext
from sglang_mooncake.control import ControlLoop, open_dealer
from sglang_mooncake.instances import PrefillInstances
from sglang_mooncake.layout import SEAL_BYTES, Buffers, Layout, Seal
from sglang_mooncake.messages import Hello, HelloReply, LinkReset, MessageError, RoomFailed
from sglang_mooncake.rooms import decode as rooms
from sglang_mooncake.rooms.states import RoomView
from sglang_mooncake.side import Side
from sglang_mooncake.sources import sources_of
from sglang_mooncake.stats import Recorder

__all__ = ["DecodeSide", "SealBuffer"]

logger = logging.getLogger(__name__)

#: Rooms × sources that may be open on one rank at once.
SEAL_SLOTS = 16_384
#: A rank that has refused us is still told which rooms it need not wait for.
FAREWELL_MS = 1_000


class SealBuffer:
    """Registered memory where sources leave the seals of the rooms of this rank."""

    def __init__(self, engine: te.Engine) -> None:
        self._memory = np.zeros(SEAL_SLOTS * SEAL_BYTES, dtype=np.uint8)
        self._region = engine.register(self._memory)
        self.buffers = Buffers((self._region.address,), (SEAL_BYTES,), (SEAL_SLOTS * SEAL_BYTES,))

    def read(self, slot: int) -> Seal:
        """What lies in the slot now, which may be the first half of a seal that is landing."""
        return Seal.unpack(self._memory[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES].tobytes())

    def clear(self, slot: int) -> None:
        """Zeroes a slot for its next room: a seal counts once its generation and its number of
        writes are there, and neither may come from the slot's former room."""
        self._memory[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES] = 0


@dataclass(frozen=True, slots=True)
class _LinkKey:
    """One life of one prefill rank; `address` is that of its instance's registry."""

    address: str
    rank: Rank

    def __str__(self) -> str:
        return f"prefill rank ({self.rank.coords}) at {self.rank.host}:{self.rank.port}"


@dataclass(slots=True, eq=False)
class _Link:
    """A connection to one prefill rank."""

    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    opened_s: float
    up: bool = False


@dataclass(frozen=True, slots=True)
class _Sources:
    """Whom to ask for rooms of one life of an instance."""

    instance: Instance
    by_dp_rank: dict[int, tuple[rooms.RoomSource, ...]] = field(default_factory=dict)


class DecodeSide(Side):
    """See `control.Handler`. `instances` and the calls on rooms are for the scheduler thread: they
    cost microseconds and never wait."""

    def __init__(
        self,
        context: RankContext,
        config: Config,
        engine: te.Engine,
        layout: Layout,
        seals: SealBuffer,
        recorder: Recorder,
    ) -> None:
        self._context, self._config, self._engine = context, config, engine
        self._layout, self._seals, self._recorder = layout, seals, recorder
        self._rooms = rooms.DecodeRooms(
            rooms.DecodeDeadlines(context.deadlines.bootstrap_s, context.deadlines.waiting_s),
            SEAL_SLOTS,
            first_tag=secrets.randbits(62) + 1,
        )
        self.instances = PrefillInstances(config.registries)
        self._sources_of: dict[str, _Sources] = {}  # of the scheduler thread alone
        self._links: dict[_LinkKey, _Link] = {}
        self._loop = ControlLoop("kv-decode", self)

    # --- for the manager and the scheduler ---

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        super().close()
        self.instances.close()

    def choose_sources(self, view: RoomView, address: str, prefill_dp_rank: int) -> None:
        """Finds the prefill ranks that feed this rank for this room, and has them linked."""
        instance = self.instances.get(address)
        if instance is None:
            known = self.instances.problem(address) or "it has not answered yet"
            self.fail(view, f"prefill instance at {address} is not known: {known}")
            return
        try:
            sources = self._sources(address, instance, prefill_dp_rank)
        except MismatchError as error:
            coords = [c for c in instance.config.topology.coords() if c.dp == prefill_dp_rank]
            links = tuple(_LinkKey(address, instance.rank(c)) for c in coords)
            reason = f"the prefill server at {address} does not fit this one: {error}"
            self._loop.post(rooms.NotServed(view, links, reason))
            return
        self._loop.post(rooms.SourcesChosen(view, sources))

    def _sources(
        self, address: str, instance: Instance, prefill_dp_rank: int
    ) -> tuple[rooms.RoomSource, ...]:
        """The prefill ranks to ask for any room of this DP rank; worked out once per instance.

        Raises:
            MismatchError: the two instances cannot hand over KV.
        """
        known = self._sources_of.get(address)
        if known is None or known.instance is not instance:
            matching.check_configs(instance.config, self._context.config)
            known = self._sources_of[address] = _Sources(instance)
        found = known.by_dp_rank.get(prefill_dp_rank)
        if found is None:
            asked = sources_of(
                instance.config,
                prefill_dp_rank,
                self._context.place,
                self._layout,
                self._context.all_cp_ranks,
            )
            found = known.by_dp_rank[prefill_dp_rank] = tuple(
                rooms.RoomSource(
                    _LinkKey(address, instance.rank(source.coords)),
                    source.destinations,
                    sends,
                    source.aux,
                    source.state,
                    source.pages,
                )
                for source, sends in asked
            )
        return found

    def name_pages(
        self,
        view: RoomView,
        pages: npt.NDArray[np.integer],
        aux_slot: int,
        decode_prefix_len: int,
        states: tuple[npt.NDArray[np.integer] | None, ...] = (),
    ) -> None:
        self._loop.post(rooms.PagesNamed(view, pages, aux_slot, decode_prefix_len, states))

    def has_arrived(self, view: RoomView) -> bool:
        """Whether every source's seal is there, and every transfer that the seals count."""
        for tag, slot in view.seals:
            arrived = self._engine.arrived(tag)
            if not arrived:
                return False
            seal = self._seals.read(slot)
            if seal.generation != view.generation or not 0 < seal.writes <= arrived:
                return False
        return bool(view.seals)

    def arrived(self, view: RoomView) -> None:
        """The scheduler takes the room: its tags can be closed."""
        self._loop.post(rooms.Arrived(view))

    def fence_now(self, view: RoomView) -> None:
        """For a scheduler that frees pages at once: after this nothing of the room can land."""
        for tag, _ in view.seals:
            self._engine.fence(tag)

    # --- control.Handler ------------------------------------------------------------------------

    def started(self, loop: ControlLoop) -> None:
        pass

    def stopped(self) -> None:
        for link in self._links.values():
            _close_sockets(link)

    def on_stimulus(self, stimulus: Any, now_s: float) -> None:
        self._apply(stimulus, now_s)

    def on_tick(self, now_s: float) -> None:
        self._apply(rooms.Tick(), now_s)
        for key, link in list(self._links.items()):
            if not link.up and now_s - link.opened_s >= self._config.link_timeout_s:
                self._drop_link(
                    key,
                    f"{key} did not answer the hello within {self._config.link_timeout_s:g} s"
                    " (SGLANG_MOONCAKE_LINK_TIMEOUT_S)",
                    forget_instance=True,
                )
        self._recorder.open_rooms(len(self._rooms))
        self._recorder.write_if_due(now_s)

    # --- links ---

    def _open_link(self, key: _LinkKey) -> None:
        deadlines = self._context.deadlines
        dealer, monitor = open_dealer(
            self._loop.zmq_context,
            key.rank.host,
            key.rank.port,
            deadlines.heartbeat_s,
            deadlines.heartbeat_failures_max,
            messages.MESSAGE_BYTES_MAX,
        )
        self._links[key] = _Link(dealer, monitor, time.monotonic())
        self._loop.add_reader(dealer, lambda: self._read_link(key))
        self._loop.add_reader(monitor, lambda: self._lost_link(key))
        hello = Hello(self._context.name, self._context.place, self._engine.card(), self._layout)
        self._send(key, hello)

    def _send(self, key: _LinkKey, message: messages.Message) -> None:
        link = self._links.get(key)
        if link is None:
            return  # its rooms have just been told
        try:
            link.dealer.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._drop_link(key, f"{key} takes no messages in", forget_instance=True)

    def _read_link(self, key: _LinkKey) -> None:
        while (link := self._links.get(key)) is not None:
            try:
                frame = link.dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = messages.decode(frame)
            except MessageError as error:
                self._drop_link(key, f"{key}: {error}", forget_instance=True)
                return
            match message:
                case HelloReply(refused=None):
                    link.up = True
                    self._apply(rooms.LinkUp(key), time.monotonic())
                case HelloReply(refused=reason):
                    self._apply(
                        rooms.LinkRefused(key, f"{key} refused: {reason}"), time.monotonic()
                    )
                    self._close_link(key)
                case LinkReset(reason):
                    self._drop_link(key, f"{key}: {reason}", forget_instance=False)
                case RoomFailed():
                    self._apply(rooms.PeerFailed(key, message), time.monotonic())
                case _:
                    logger.warning("%s sent a %s", key, type(message).__name__)

    def _lost_link(self, key: _LinkKey) -> None:
        self._drop_link(key, f"lost the connection to {key}", forget_instance=True)

    def _drop_link(self, key: _LinkKey, reason: str, forget_instance: bool) -> None:
        """Closes a link; the next room opens it again, after a fresh look at the registry when the
        rank may have been restarted elsewhere."""
        logger.warning("%s", reason)
        self._close_link(key)
        if forget_instance:
            self.instances.forget(key.address)
        self._apply(rooms.LinkDown(key, reason), time.monotonic())

    def _close_link(self, key: _LinkKey) -> None:
        link = self._links.pop(key)
        self._loop.remove_reader(link.dealer)
        self._loop.remove_reader(link.monitor)
        _close_sockets(link)

    # --- rooms ---

    def _apply(self, event: rooms.Event, now_s: float) -> None:
        for instruction in self._rooms.handle(event, now_s):
            match instruction:
                case rooms.OpenLink(_LinkKey() as key):
                    self._open_link(key)
                case rooms.Expect(tag, slot):
                    self._seals.clear(slot)
                    self._engine.expect(tag)
                case rooms.Tell(_LinkKey() as key, message):
                    self._send(key, message)
                case rooms.Fence(view, tags):
                    for tag in tags:
                        self._engine.fence(tag)
                    self._apply(rooms.Fenced(view), now_s)
                case rooms.Over(view):
                    self._recorder.room_over(view)


def _close_sockets(link: _Link) -> None:
    link.dealer.disable_monitor()
    link.monitor.close(linger=0)
    link.dealer.close(linger=FAREWELL_MS)
