# SPDX-License-Identifier: Apache-2.0
"""The decode side at work: pages opened for writing, prefill ranks asked, arrival seen. What is to
be done is decided in `rooms/decode.py`; here it is done, on the loop thread, and by `links/` and
`fences.py`."""

from __future__ import annotations

import functools
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import te
from bootstrap_server import (
    Instance,
    MismatchError,
    RankCoords,
    Why,
    instance_name_of,
)
from bootstrap_server.admission.signatures import key_index
from bootstrap_server.ranks import matching
from bootstrap_server.ranks.records import DEFAULT_INSTANCE
from sglang_mooncake.context import RankContext
from sglang_mooncake.control import ControlLoop
from sglang_mooncake.digesting import digester_of
from sglang_mooncake.executor import Executor
from sglang_mooncake.fences import Fencer
from sglang_mooncake.fetching import fetch_instance
from sglang_mooncake.given_up import GivenUpNotices
from sglang_mooncake.instances import KNOWN_MAX, PrefillInstances
from sglang_mooncake.kept_bytes import KeptBytes
from sglang_mooncake.landed_digests import LandedDigests
from sglang_mooncake.layout import COMPLETION_BYTES, Buffers, CompletionRecord, Layout
from sglang_mooncake.layout.pairing import DRAFT
from sglang_mooncake.links.decode import DecodeLinks, LinkKey
from sglang_mooncake.messages import Hello
from sglang_mooncake.registries import Registries
from sglang_mooncake.registry_check import RegistryCheck
from sglang_mooncake.rooms import decode as rooms
from sglang_mooncake.rooms.arrival import (
    CompletionDisagrees,
    Expected,
    check_dealt,
    has_arrived,
)
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.side import Side
from sglang_mooncake.sources import sources_of
from sglang_mooncake.stats import Recorder

__all__ = ["FENCE_NOW_TIMEOUT_S", "CompletionBuffer", "DecodeSide"]

#: Rooms × sources that may be open on one rank at once.
COMPLETION_SLOTS = 16_384
#: SGLang keeps the pages of a failed request for 30 s before it uses them again unasked; with that
#: switched off, its scheduler waits for us this long before it does.
FENCE_NOW_TIMEOUT_S = 5.0


class CompletionBuffer:
    """Registered memory where sources leave the completion records of the rooms of this rank."""

    def __init__(self, engine: te.Engine) -> None:
        self._memory = np.zeros(COMPLETION_SLOTS * COMPLETION_BYTES, dtype=np.uint8)
        self._region = engine.register(self._memory, remote="tagged")
        self.buffers = Buffers(
            (self._region.address,), (COMPLETION_BYTES,), (COMPLETION_SLOTS * COMPLETION_BYTES,)
        )

    def read(self, slot: int) -> CompletionRecord:
        """What lies in the slot now, which may be the first half of a record that is landing."""
        return CompletionRecord.unpack(
            self._memory[slot * COMPLETION_BYTES : (slot + 1) * COMPLETION_BYTES].tobytes()
        )

    def clear(self, slot: int) -> None:
        """Zeroes a slot for its next room: a record counts once its generation and its number of
        writes are there, and neither may come from the slot's former room."""
        self._memory[slot * COMPLETION_BYTES : (slot + 1) * COMPLETION_BYTES] = 0


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
        engine: te.Engine,
        layout: Layout,
        completions: CompletionBuffer,
        recorder: Recorder,
        registries: Registries,
        link_timeout_s: float,
        registry: tuple[str, ...] = (),
    ) -> None:
        """``registry``: those that are asked for an instance whose own does not answer."""
        self._context, self._engine = context, engine
        self._layout, self._completions, self._recorder = layout, completions, recorder
        self._rooms = rooms.DecodeRooms(
            rooms.DecodeDeadlines(context.deadlines.bootstrap_s, context.deadlines.waiting_s),
            COMPLETION_SLOTS,
            first_generation=secrets.randbits(62) + 1,
            new_tag=te.new_tag,
            computed_first=context.waits_for_prompt,
            names=context.names,
            verify=context.verify,
        )
        self.instances = PrefillInstances(
            registries,
            functools.partial(
                fetch_instance,
                keys=context.keys,
                beside=registry,
                protocol=context.config.protocol,
            ),
            fits=self.check_fits,
        )
        recorder.open_rooms = lambda: self._rooms.rooms
        recorder.refused = self.instances.refused
        self._registries = registries
        self._given_up = GivenUpNotices()
        coords = context.coords
        self._check = RegistryCheck(
            registry if coords.is_first_of_dp and not coords.dp else (),
            context.keys,
            context.config.protocol,
            self.check_fits,
        )
        #: By address, the oldest first; of the scheduler thread alone.
        self._sources_of: dict[str, _Sources] = {}
        self._optional_states = _optional_states(layout)
        self._executor: Executor[rooms.Event, rooms.Instruction] = Executor(
            self._rooms.handle, self._perform, rooms.after_failure
        )
        self._loop = ControlLoop("kv-decode", self)
        self._links = DecodeLinks(
            self._loop,
            self._hello,
            context.deadlines,
            link_timeout_s,
            context.names.link,
            self._executor.submit,
            self.instances.forget,
            self._refused_by,
            context.keys.control,
        )
        self._digests = LandedDigests(
            digester_of(engine, context.verify),
            recorder,
            layout,
            context.place,
            context.name,
            lambda compare: self._landed(compare.expected),
            lambda found: self._loop.post(found),
            None if context.verify_dir is None else KeptBytes(context.verify_dir, context.name),
        )
        self._fencer = Fencer(
            engine.fence, lambda room: self._loop.post(rooms.Fenced(room)), "kv-decode-fences"
        )

    # --- for the manager and the scheduler ---

    def start(self) -> None:
        self._fencer.start()
        self._digests.start()
        self._loop.start()
        self._check.start()
        for address in self._registries.exact:
            # So that the log says before the first request if one of them refuses this server.
            self.instances.ensure(address)

    def close(self) -> None:
        super().close()
        self._digests.close()
        self._fencer.close()
        self.instances.close()
        self._given_up.close()
        self._check.close()

    def abort(self, room: Room, reason: str) -> None:
        room.withdrawn = True
        super().abort(room, reason)

    def fail(self, room: Room, reason: str) -> None:
        room.withdrawn = True
        super().fail(room, reason)

    def close_room(self, room: Room) -> None:
        room.withdrawn = True
        super().close_room(room)

    def check_served(self, room: Room, address: str) -> None:
        """Fails a room whose prefill instance will not serve this rank however long it waits, and
        has the prefill side told. Costs a look into a table; call it while the room waits for its
        instance."""
        verdict = self.instances.verdict(address, room.opened_s)
        if verdict is None or room.withdrawn:
            return
        room.registry = address
        self.fail(room, f"prefill instance at {address}: {verdict}")

    def choose_sources(self, room: Room, address: str, prefill_dp_rank: int) -> None:
        """Finds the prefill ranks that feed this rank for this room, and has them linked."""
        room.registry = address
        instance = self.instances.get(address)
        if instance is None:
            known = self.instances.problem(address) or "its registry has not answered yet"
            self.fail(room, f"prefill instance at {address} is not known: {known}")
            return
        try:
            sources = self._sources(address, instance, prefill_dp_rank)
        except MismatchError as error:
            coords = [c for c in instance.config.topology.coords() if c.dp == prefill_dp_rank]
            links = tuple(self._link(address, instance, c) for c in coords)
            reason = f"the prefill server at {address} does not fit this one: {error}"
            self._loop.post(rooms.NotServed(room, links, reason))
            return
        # A scheduler's step may take tens of milliseconds: where nothing has to be opened, pages
        # can be named in this one.
        standing = self._rooms.standing
        room.linked = not self._context.waits_for_prompt and all(
            source.link in standing for source in sources
        )
        self._loop.post(rooms.SourcesChosen(room, sources))

    def _sources(
        self, address: str, instance: Instance, prefill_dp_rank: int
    ) -> tuple[rooms.RoomSource, ...]:
        """The prefill ranks to ask for any room of this DP rank; worked out once per instance.

        Raises:
            MismatchError: the two instances cannot hand over KV.
        """
        known = self._sources_of.get(address)
        if known is None or known.instance is not instance:
            self.check_fits(instance)
            self._sources_of.pop(address, None)
            if len(self._sources_of) >= KNOWN_MAX:  # instances move from address to address
                del self._sources_of[next(iter(self._sources_of))]
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
                    self._link(address, instance, source.coords),
                    source.destinations,
                    sends,
                    source.aux,
                    source.state,
                    source.pages,
                    self._required_states(instance) if source.state else frozenset(),
                    self._context.config.dcp_size // instance.config.dcp_size,
                    matching.dealt_over(instance.config),
                )
                for source, sends in asked
            )
        return found

    def check_fits(self, instance: Instance) -> None:
        """Whether this rank can be served by an instance, as far as its record tells; the hello
        shows the rest. Any thread may ask.

        Raises:
            MismatchError: it cannot, and why.
        """
        context = self._context
        matching.check_configs(instance.config, context.config, context.names.flags)
        # Whichever of its DP ranks has a request.
        sources_of(instance.config, 0, context.place, self._layout, context.all_cp_ranks)

    def _link(self, address: str, instance: Instance, coords: RankCoords) -> LinkKey:
        rank, keys = instance.rank(coords), self._context.keys.record
        secret: int | None = 0
        if keys:
            # It came from the instance's own registry, or from one beside it.
            names = DEFAULT_INSTANCE, instance_name_of(address)
            found = (key_index(instance.config, rank, keys, name) for name in names)
            secret = next((one for one in found if one is not None), None)
        assert secret is not None, "checked when the instance was looked up"
        return LinkKey(address, rank, secret)

    def _required_states(self, instance: Instance) -> frozenset[int]:
        """The state lists that a source follows without fail: with pipeline stages of another
        number, a stage may lack a kind of state that others have."""
        theirs, ours = instance.config.topology, self._context.config.topology
        if (theirs.pp_size, theirs.cp_size) != (ours.pp_size, 1):
            return frozenset()
        return frozenset(range(len(self._layout.states))) - self._optional_states

    def name_pages(
        self,
        room: Room,
        pages: npt.NDArray[np.integer],
        aux_slot: int,
        decode_prefix_len: int,
        states: tuple[npt.NDArray[np.integer] | None, ...] = (),
        device_pages: npt.NDArray[np.integer] | None = None,
    ) -> None:
        room.named = True  # before the loop can hear of it: see `Room.named`
        named_s = time.monotonic()
        self._loop.post(
            rooms.PagesNamed(
                room, pages, aux_slot, decode_prefix_len, states, device_pages, named_s
            )
        )

    def has_arrived(self, room: Room) -> bool:
        """Whether all is here that every source was asked for. A room of which a source has ended
        with something else fails at once."""
        view, completions = room.view, []
        arrived = bool(view.expected)
        for expected in view.expected:
            try:
                completion = self._landed(expected)
            except CompletionDisagrees as error:
                self.fail(room, str(error))
                return False
            if completion is None:
                arrived = False
                continue
            # Its digests come over the control link, and are compared in a thread of their own.
            arrived = arrived and (not completion.digests or expected.tag in view.verified)
            completions.append((expected, completion))
        if arrived:
            try:
                check_dealt(completions, view.num_pages)
            except CompletionDisagrees as error:
                self.fail(room, str(error))
                return False
        return arrived

    def _landed(self, expected: Expected) -> CompletionRecord | None:
        """What a source says of all that it was asked for, once that is here. Any thread may ask.
        Raises CompletionDisagrees."""
        writes = self._engine.arrived(expected.tag)
        if not writes:
            return None
        nbytes = self._engine.arrived_nbytes(expected.tag)
        completion = self._completions.read(expected.slot)
        return completion if has_arrived(expected, completion, writes, nbytes) else None

    def arrived(self, room: Room) -> None:
        """The scheduler takes the room, of which all has arrived: its tags can be closed."""
        landed_nbytes = sum(self._engine.arrived_nbytes(one.tag) for one in room.view.expected)
        self._loop.post(rooms.Arrived(room, landed_nbytes, time.monotonic()))

    def wait_until_safe(self, room: Room, timeout_s: float) -> bool:
        """For a scheduler that uses the pages of a room that has been aborted again at once: waits
        until nothing can land in them; False if that is not known after `timeout_s`."""
        waiter = room.waiter = threading.Event()  # before the look: the loop looks the other way
        return room.view.safe or waiter.wait(timeout_s)

    # --- control.Handler ------------------------------------------------------------------------

    def started(self, loop: ControlLoop) -> None:
        pass

    def stopped(self) -> None:
        self._links.close()

    def on_stimulus(self, stimulus: Any, now_s: float) -> None:
        del now_s
        self._executor.submit(stimulus)

    def on_tick(self, now_s: float) -> None:
        self._executor.submit(rooms.Tick())
        self._links.tick(now_s)
        self.instances.tick()
        self._fencer.retry()

    # --- on the loop thread ---

    def _refused_by(self, key: LinkKey, sentence: str, why: Why) -> None:
        instance = self.instances.get(key.address)
        if instance is not None and key.rank in instance.ranks:
            self.instances.refuse(key.address, instance, sentence, why)

    def _tell_registry(self, room: Room) -> None:
        """Of a room that failed before all its prefill ranks were met: there may be one that has
        not been told."""
        if room.view.state is not RoomState.FAILED or room.view.times.met_s or not room.registry:
            return
        if self._context.coords.is_first_of_dp:
            why = self.instances.why(room.registry)
            keys = () if why is Why.SECRET else self._context.keys.registry
            reason = f"{self._context.name}: {room.view.reason}"
            self._given_up.leave(room.registry, room.number, reason, why is not None, keys)

    def _hello(self) -> Hello:
        return Hello(self._context.name, self._context.place, self._engine.card(), self._layout)

    def _perform(self, instruction: rooms.Instruction) -> None:
        match instruction:
            case rooms.OpenLink(LinkKey() as key):
                self._links.open(key)
            case rooms.Expect(_, LinkKey() as key, tag, slot):
                self._completions.clear(slot)
                self._engine.expect(tag, peer=self._links.engine(key))
            case rooms.Tell(LinkKey() as key, message):
                self._links.send(key, message)
            case rooms.Compare(link=LinkKey() as key):
                self._digests.compare(instruction, self._links.source(key))
            case rooms.Fence(room, tags):
                self._fencer.close_tags(room, tags)
            case rooms.Over(room):
                if room.waiter is not None:
                    room.waiter.set()
                self._recorder.room_over(room)
                self._tell_registry(room)


def _optional_states(layout: Layout) -> frozenset[int]:
    """The state lists of the draft model alone: a prefill server without one does not have them."""
    needed = {one.state for one in layout.components if not one.kind.startswith(DRAFT)}
    return frozenset(range(len(layout.states))) - needed
