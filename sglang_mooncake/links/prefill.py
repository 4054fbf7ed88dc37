# SPDX-License-Identifier: Apache-2.0
"""The links of a prefill rank to decode ranks: hellos answered, the data paths that belong to them,
and the one place that knows which of them stand.

A decode rank says hello, its engine is connected in a worker, and the link stands once that is done
and answered. One whose data path or control connection has ended is forgotten at once. What happens
to links reaches the rooms as events, in order, and by no other way.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

import te
from bootstrap_server import Why
from bootstrap_server.admission.crowd import source_of
from bootstrap_server.admission.refusals import Refusals
from bootstrap_server.admission.unauthenticated import (
    Connection,
    UnauthenticatedConnections,
    bytes_received,
)
from sglang_mooncake import messages
from sglang_mooncake.context import Deadlines
from sglang_mooncake.layout import LayoutMismatch, Place, Plan
from sglang_mooncake.links.curve import Gatekeeper, new_pair
from sglang_mooncake.links.destinations import Destination, Destinations
from sglang_mooncake.links.silence import Silence
from sglang_mooncake.links.sockets import QUEUE_MESSAGES_MAX, Readers, open_router
from sglang_mooncake.messages import (
    Hello,
    HelloReply,
    LinkReset,
    Message,
    MessageError,
    RoomAbort,
    RoomDiffers,
    RoomRequest,
    RoomWait,
)
from sglang_mooncake.rooms.prefill_events import (
    Differed,
    PeerLost,
    Requested,
    RoomAborted,
    WaitsForPrompt,
)
from sglang_mooncake.workers import Workers

__all__ = ["Connected", "LinkEvent", "Poster", "PrefillLinks", "Unreached"]

logger = logging.getLogger(__name__)

LinkEvent = Requested | WaitsForPrompt | RoomAborted | Differed | PeerLost

#: A peer that floods us must not keep the loop from everybody else's rooms.
MESSAGES_PER_TURN = 256
#: Hellos whose data path is being made, in all and of one source address: decode ranks may all come
#: from one, and those of others find a place beside them.
GREETINGS_MAX = 4_096
GREETINGS_OF_SOURCE_MAX = 3_072
#: Data paths made at a time. One to a host that has been cut off takes 5 s
#: (`te.Config.connect_timeout_s`), so those to one host leave threads for the others.
CONNECT_THREADS = 16
CONNECT_THREADS_OF_HOST = 4


#: Errors of te that every later attempt between the same two engines brings, too.
_FOR_GOOD = {
    te.KeyMismatch: Why.SECRET,
    te.TransportMismatch: Why.TRANSPORT,
    te.VersionError: Why.RELEASE,
}


@dataclass(frozen=True, slots=True)
class Unreached:
    """Why there is no data path to a decode rank. `why`: see `HelloReply`."""

    sentence: str
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class Connected:
    """What came of a hello: the data path to a decode rank, or why there is none. `host` is where
    it came from."""

    key: str
    host: str
    rank: str
    plan: Plan
    peer: te.Peer | Unreached
    card: bytes
    place: Place


class Poster(Readers, Protocol):
    """What `ControlLoop` has for those who use sockets and have threads of their own."""

    def post(self, stimulus: Any) -> None: ...


class PrefillLinks:
    """For the loop thread alone; no call waits. Peers go by `key`, the routing id of their control
    connection, in hexadecimal digits.

    Args:
        name: of this rank, for sentences.
        loop: calls back when a socket can be read. A `Connected` that is posted to it is to be
            handed to `connected`.
        plan: what is written to the decode rank of a hello; raises LayoutMismatch.
        stands: says to a decode rank that its data path stands; with the layers of its plan, and
            only the first time with this rank's layout.
        report: takes the events. It may come back to `send` before it returns.
        deadlines: a decode rank that shows no sign of life for so long is gone.
        keys: `secret.Keys.control`; empty: everybody is let in.
    """

    def __init__(
        self,
        name: str,
        loop: Poster,
        engine: te.Engine,
        plan: Callable[[Hello], Plan],
        stands: HelloReply,
        report: Callable[[LinkEvent], None],
        deadlines: Deadlines,
        keys: Sequence[bytes] = (),
    ) -> None:
        self._name, self._loop, self._engine = name, loop, engine
        self._plan, self._stands, self._report = plan, stands, report
        self._deadlines, self._next_probe_s = deadlines, 0.0
        self._destinations = Destinations()
        self._connecting = Workers(
            "kv-prefill-connect",
            CONNECT_THREADS,
            # One that is made again is counted twice for a moment.
            GREETINGS_MAX + CONNECT_THREADS,
            CONNECT_THREADS_OF_HOST,
        )
        #: Of links.
        self._connections: dict[str, Connection] = {}
        self._silence: Silence[str] = Silence(deadlines)
        self._greeting: dict[str, Connection | None] = {}
        self._greeting_of: Counter[str] = Counter()  # by source
        self._keys = tuple(keys)
        self._pair = new_pair() if keys else None
        self._gatekeeper: Gatekeeper | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._unauthenticated: UnauthenticatedConnections | None = None
        #: By connection: what one whose queue is full must hear. At most one for each that stands.
        self._unsaid: dict[str, LinkReset] = {}
        self._refusals = Refusals("message")

    def __len__(self) -> int:
        return len(self._destinations)

    def __iter__(self) -> Iterator[Destination]:
        """Those that stand; any thread may ask."""
        return iter(self._destinations)

    def __getitem__(self, key: str) -> Destination:
        """Raises NoDataPath."""
        return self._destinations[key]

    @property
    def control_key(self) -> str:
        """The public key of this rank's socket, for its record; empty without a secret."""
        return self._pair.public.decode("ascii") if self._pair is not None else ""

    def listen(self, host: str, ports: tuple[int, int] | None) -> int:
        """Lets decode ranks say hello; returns the port. Raises as `open_router` does."""
        if self._keys:
            self._gatekeeper = Gatekeeper(self._loop, self._keys)
        self._router, port = open_router(
            self._loop.zmq_context,
            host,
            messages.MESSAGE_BYTES_MAX,
            ports,
            self._pair,
            self._deadlines,
        )
        self._unauthenticated = UnauthenticatedConnections(
            self._router, port, self._loop.add_reader, "control"
        )
        self._loop.add_reader(self._router, self._read)
        return port

    def send(self, key: str, message: Message) -> None:
        """Raises nothing: a decode rank that has gone, or takes nothing in, is reported, once. The
        latter is told as soon as it takes something in, since it waits for what is lost now."""
        assert self._router is not None
        try:
            self._router.send_multipart([bytes.fromhex(key), messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == errno.EAGAIN and isinstance(message, LinkReset):
                self._unsaid[key] = message
            destination = self._destinations.get(key)
            if destination is None:
                # A line for each would let strangers fill the log: they ask, and leave.
                logger.debug("cannot tell %s: %s (%s)", key, message, error)
            elif error.errno == errno.EAGAIN:
                self._reset(
                    destination,
                    f"closes its link to {destination.rank}, which does not read its messages: "
                    f"{QUEUE_MESSAGES_MAX} are queued",
                )
            elif error.errno != errno.EHOSTUNREACH:
                logger.warning("cannot tell %s: %s (%s)", key, message, error)
            else:
                self._lose(destination, f"lost the control connection to {destination.rank}")

    def tick(self, now_s: float) -> None:
        """Gives up links whose data path has ended, and probes the others where that is due."""
        if self._unauthenticated is not None:
            self._unauthenticated.tick()
        unsaid, self._unsaid = self._unsaid, {}
        for key, reset in unsaid.items():  # what cannot be said yet comes back
            self.send(key, reset)
        for destination in self._destinations:
            if not destination.peer.alive:
                self._reset(destination, f"lost the data connection to {destination.rank}")
        if self._silence.is_due(now_s):
            self._end_silent(now_s)
        if now_s >= self._next_probe_s:
            self._next_probe_s = now_s + self._deadlines.heartbeat_s
            self._probe(self._destinations)

    def connected(self, result: Connected) -> None:
        """Answers a hello."""
        key = result.key
        if not isinstance(result.peer, Unreached) and not result.peer.alive:
            # It has ended since, with the former connection of this decode rank (`_lose`), say.
            self._connect(key, result.host, result.rank, result.plan, result.card, result.place)
            return
        connection = self._end_greeting(key, result.host)
        if isinstance(result.peer, Unreached):
            reply = HelloReply(refused=result.peer.sentence, why=result.peer.why)
            self._refusals.note(result.rank, str(reply.refused))
            self.send(key, reply)
            return
        made = Destination(key, result.rank, result.peer, result.plan, result.place)
        logger.info("%s writes to %s over %s", self._name, result.rank, way(result.peer))
        if self._unauthenticated is not None and connection is not None:
            self._unauthenticated.welcome(connection)
            self._connections[key] = connection
        for former in self._destinations.add(made):
            self._reset(former, f"has too many links to {former.rank}")
        # First the others: this hello may be the end of one of them.
        self._probe([one for one in self._destinations.of_engine(made) if one is not made])
        self._stand(made, self._stands)

    def close(self) -> None:
        """Closes the socket, when nobody reads it any more, and connects nobody any more."""
        self._connecting.close()
        if self._unauthenticated is not None:
            self._unauthenticated.close()
        if self._router is not None:
            self._router.close(linger=0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()

    def _read(self) -> None:
        assert self._router is not None
        assert self._unauthenticated is not None
        for _ in range(MESSAGES_PER_TURN):
            try:
                routing_id, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = routing_id.bytes.hex()
            try:
                if len(frames) != 1:
                    raise MessageError(f"{len(frames)} frames where one message was expected")
                message = messages.decode(frames[0].bytes)
            except MessageError as error:
                self._refusals.note(key, str(error))
                self.send(key, HelloReply(refused=str(error)))
                continue
            self._take(key, routing_id, message)

    def _take(self, key: str, routing_id: zmq.Frame, message: Message) -> None:
        match message:
            case Hello():
                self._greet(key, routing_id, message)
            case RoomAbort():  # welcome from strangers too: a refused rank gives its rooms up
                self._report(RoomAborted(key, message))
            case RoomWait() if key in self._destinations:
                self._report(WaitsForPrompt(key, message))
            case RoomRequest() if key in self._destinations:
                self._report(Requested(key, message))
            case RoomDiffers() if key in self._destinations:
                self._report(Differed(key, message))
            case RoomRequest() | RoomWait():
                self.send(
                    key, LinkReset(f"{self._name} has no data connection to this decode rank")
                )
            case RoomDiffers():
                pass  # The data connection was lost meanwhile, as the log has told.
            case _:
                self._refusals.note(key, f"a prefill rank takes no {type(message).__name__}")

    def _greet(self, key: str, routing_id: zmq.Frame, hello: Hello) -> None:
        if key in self._greeting:
            return  # it will be answered
        host = str(routing_id.get("Peer-Address"))
        of_source, everybody = self._greeting_of[source_of(host)], len(self._greeting)
        if of_source >= GREETINGS_OF_SOURCE_MAX or everybody >= GREETINGS_MAX:
            crowd = f"connects {everybody} decode ranks, {of_source} of them at {host}"
            self.send(key, HelloReply(refused=f"{self._name} {crowd}: say hello again later"))
            return
        try:
            plan = self._plan(hello)
        except LayoutMismatch as error:
            reply = HelloReply(refused=str(error), why=error.why)
            self._refusals.note(hello.rank, str(reply.refused))
            self.send(key, reply)
            return
        assert self._unauthenticated is not None
        self._greeting[key] = self._unauthenticated.connection(routing_id)
        self._greeting_of[source_of(host)] += 1
        self._connect(key, host, hello.rank, plan, hello.card, hello.place)

    def _connect(
        self, key: str, host: str, rank: str, plan: Plan, card: bytes, place: Place
    ) -> None:
        """Has the data path made. Greetings are bounded, so there is always room for it."""

        def connect(waited_s: float) -> None:
            del waited_s
            self._loop.post(Connected(key, host, rank, plan, self._path(rank, card), card, place))

        self._connecting.submit(connect, host)

    def _path(self, rank: str, card: bytes) -> te.Peer | Unreached:
        try:
            return self._engine.connect(card)
        except te.Error as error:
            sentence = f"{self._name} cannot reach the engine of {rank}: {error}"
            return Unreached(sentence, _FOR_GOOD.get(type(error)))
        except Exception as error:  # noqa: BLE001 - the card is the peer's, who waits for an answer
            return Unreached(f"{self._name} cannot connect {rank}: {error!r}")

    def _end_silent(self, now_s: float) -> None:
        """Gives up links whose control connections bring nothing any more."""
        counts = {key: bytes_received(one.fd) for key, one in self._connections.items()}
        for key in self._silence.look(counts, now_s):
            connection, destination = self._connections.get(key), self._destinations.get(key)
            if connection is None or destination is None:
                continue  # The loss of another one has been the end of it.
            why = f"it has brought nothing for {self._silence.after_s:g} s"
            assert self._unauthenticated is not None
            self._unauthenticated.end(connection, why)
            self._lose(destination, f"lost the control connection to {destination.rank}: {why}")

    def _end_greeting(self, key: str, host: str) -> Connection | None:
        if key not in self._greeting:
            return None
        self._greeting_of -= Counter([source_of(host)])  # forgets those that have none left
        return self._greeting.pop(key)

    def _probe(self, destinations: Iterable[Destination]) -> None:
        """Says that the data path stands. Whoever cannot be told has gone, or has said hello again
        over another connection: nothing else tells us that a control connection has ended."""
        again = msgspec.structs.replace(self._stands, layout=None, place=None)
        for destination in destinations:
            self._stand(destination, again)

    def _stand(self, destination: Destination, reply: HelloReply) -> None:
        layers = destination.plan.layer_count()
        self.send(destination.key, msgspec.structs.replace(reply, layers=layers))

    def _lose(self, destination: Destination, what: str) -> None:
        """It is no destination any more: its rooms end. So do their transfers, at once and not when
        they have stalled, unless the same engine has another connection: a rank that is there still
        says hello again."""
        self._destinations.remove(destination.key)
        self._connections.pop(destination.key, None)
        if not self._destinations.of_engine(destination):
            destination.peer.close()
        logger.warning("%s %s", self._name, what)
        self._report(PeerLost(destination.key, f"{self._name} {what}"))

    def _reset(self, destination: Destination, what: str) -> None:
        """The same for one that is there still: it is to say hello again."""
        self._lose(destination, what)
        self.send(destination.key, LinkReset(f"{self._name} {what}"))


def way(peer: te.Peer) -> str:
    """The transport, what to expect of it, and why it is no better one."""
    rate = f", {peer.bytes_per_s / 1e9:.3g} GB/s at best" if peer.bytes_per_s else ""
    why = f" ({peer.transport_reason})" if peer.transport_reason else ""
    encrypted = ", encrypted" if peer.is_encrypted else ""
    return f"{peer.transport}{encrypted}{rate}{why}"
