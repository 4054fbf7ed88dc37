# SPDX-License-Identifier: Apache-2.0
"""The links of a decode rank to prefill ranks: the one place that knows which of them stand.

A link is opened when a room first needs it, and stays for all later rooms. One that breaks, or
cannot be opened, is forgotten at once: the next room that needs it opens it afresh. What happens to
links reaches the rooms as events, in order, and by no other way.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

import te
from bootstrap_server import Rank, RankCoords, Why
from bootstrap_server.admission.unauthenticated import bytes_received
from sglang_mooncake import messages
from sglang_mooncake.context import Deadlines
from sglang_mooncake.layout import Layout, Place
from sglang_mooncake.links.curve import decode_pair
from sglang_mooncake.links.silence import Silence
from sglang_mooncake.links.sockets import HANDSHAKE_FAILED, CurvePair, Readers, open_dealer
from sglang_mooncake.messages import (
    Hello,
    HelloReply,
    LinkReset,
    Message,
    MessageError,
    RoomAbort,
    RoomComputed,
    RoomDigests,
    RoomFailed,
)
from sglang_mooncake.rooms.decode_events import (
    LinkDown,
    LinkRefused,
    LinkUp,
    PeerComputed,
    PeerDigested,
    PeerFailed,
)

__all__ = ["CONNECT_S", "DecodeLinks", "LinkEvent", "LinkKey"]

logger = logging.getLogger(__name__)

LinkEvent = LinkUp | LinkDown | LinkRefused | PeerComputed | PeerDigested | PeerFailed

#: How long a rank's address is tried. After that the registry is asked whether it has another, and
#: the next room dials anew.
CONNECT_S = 3.0
#: A host that does not answer is dialled anew after so long. TCP asks again after 1, 3 and 7 s: one
#: that was cut off would be found up to 2 s after it is back.
DIAL_S = 0.9
#: Ends of rooms that could not be told: of one rank, and for how many ranks.
UNSAID_MAX = 1_024
UNSAID_RANKS_MAX = 1_024
#: A rank that has refused us is still told which rooms it need not wait for.
_FAREWELL_MS = 1_000
#: What `_dial` and a hello may raise.
_CANNOT_OPEN = (zmq.ZMQError, OSError, ValueError, te.Error)


_Place = tuple[str, RankCoords]


@dataclass(frozen=True, slots=True)
class LinkKey:
    """One life of one prefill rank; `address` is that of its instance's registry, `secret` the
    number of the deployment's secret with which the rank has signed its record."""

    address: str
    rank: Rank
    secret: int = 0

    @property
    def place(self) -> _Place:
        """The same for all lives of the rank."""
        return self.address, self.rank.coords

    def __str__(self) -> str:
        return f"prefill rank ({self.rank.coords}) at {self.rank.host}:{self.rank.port}"


@dataclass(slots=True, eq=False)
class _Link:
    """One connection; a key may have another one later."""

    key: LinkKey
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    opened_s: float
    #: When these sockets were made.
    dialled_s: float
    #: Whether the host has answered, and the descriptor of the connection then.
    connected: bool = False
    fd: int = -1
    #: The engine of the prefill rank; None until its hello is answered.
    engine: te.Identity | None = None
    #: How many layers of each page it writes (`HelloReply.layers`).
    layers: int = 0
    #: Of the prefill rank (`HelloReply.layout`).
    source: tuple[Layout, Place] | None = None


class DecodeLinks:
    """For the loop thread alone; no call waits.

    Args:
        readers: the loop that calls back when a socket can be read.
        hello: what to say first on each link.
        timeout_s: how long a prefill rank may take to answer it; `timeout_name` is the setting, for
            sentences.
        report: takes the events. It may come back to `send` and `open` before it returns.
        forget_instance: the instance of a rank, by its registry's address, may have been started
            elsewhere: it must be looked up afresh.
        refused: this life of a rank will never serve this one; with its sentence.
        keys: `secret.Keys.control`; empty: links are not encrypted.
    """

    def __init__(
        self,
        readers: Readers,
        hello: Callable[[], Hello],
        deadlines: Deadlines,
        timeout_s: float,
        timeout_name: str,
        report: Callable[[LinkEvent], None],
        forget_instance: Callable[[str], None],
        refused: Callable[[LinkKey, str, Why], None],
        keys: Sequence[bytes] = (),
    ) -> None:
        self._readers, self._hello = readers, hello
        self._deadlines = deadlines
        self._timeout_s, self._timeout_name = timeout_s, timeout_name
        self._report, self._forget_instance = report, forget_instance
        self._refused = refused
        self._keys = tuple(keys)
        self._links: dict[LinkKey, _Link] = {}
        self._silence: Silence[_Link] = Silence(deadlines)
        self._unsaid: dict[_Place, deque[RoomAbort]] = {}  # the oldest rank first

    def __len__(self) -> int:
        return len(self._links)

    def open(self, key: LinkKey) -> None:
        """Sees to it that the link stands. `LinkUp` or `LinkDown` follows in any case, at once when
        it stands already or cannot be opened."""
        known = self._links.get(key)
        if known is not None:
            if known.engine is not None:
                self._report(LinkUp(key, known.layers))
            return
        try:
            hello = messages.encode(self._hello())
            dealer, monitor = self._dial(key)
        except _CANNOT_OPEN as error:
            reason = f"cannot open a link to {key}: {error}"
            logger.error("%s", reason)
            self._report(LinkDown(key, reason))
            return
        now_s = time.monotonic()
        link = self._links[key] = _Link(key, dealer, monitor, now_s, now_s)
        self._begin(link, hello)

    def _dial(self, key: LinkKey) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """See `open_dealer`."""
        pair, router_key = self._credentials(key)
        return open_dealer(
            self._readers.zmq_context,
            key.rank.host,
            key.rank.port,
            self._deadlines,
            messages.MESSAGE_BYTES_MAX,
            pair,
            router_key,
        )

    def _begin(self, link: _Link, hello: bytes) -> None:
        self._readers.add_reader(link.dealer, partial(self._read, link))
        self._readers.add_reader(link.monitor, partial(self._watch, link))
        self._send(link, hello)

    def _dial_again(self, link: _Link, now_s: float) -> None:
        """With other sockets: libzmq leaves it to TCP when to ask again. What was said meanwhile
        has reached nobody, and what must be said is kept (`send`)."""
        self._end_sockets(link, farewell_ms=0)
        try:
            hello = messages.encode(self._hello())
            link.dealer, link.monitor = self._dial(link.key)
        except _CANNOT_OPEN as error:
            self._forget(link, f"cannot open a link to {link.key}: {error}", forget_instance=True)
            return
        link.dialled_s = now_s
        self._begin(link, hello)

    def engine(self, key: LinkKey) -> te.Identity:
        """The engine that writes for the prefill rank; LookupError when the link does not stand."""
        link = self._links.get(key)
        if link is None or link.engine is None:
            raise LookupError(f"there is no link to {key}")
        return link.engine

    def source(self, key: LinkKey) -> tuple[Layout, Place]:
        """What the prefill rank has, and where; LookupError when the link does not stand."""
        link = self._links.get(key)
        if link is None or link.source is None:
            raise LookupError(f"there is no link to {key}")
        return link.source

    def stands(self, key: LinkKey) -> bool:
        """Whether the link stands now."""
        link = self._links.get(key)
        return link is not None and link.engine is not None

    def send(self, key: LinkKey, message: Message) -> None:
        """Says nothing over a link that is gone: its rooms have been told, or are about to be. Only
        that a room has ended is kept for the next link to the same rank, or to its next life: it
        may have the request, and would wait for this rank until its own deadline."""
        link = self._links.get(key)
        if link is not None:
            self._send(link, messages.encode(message))
        if isinstance(message, RoomAbort) and not self.stands(key):
            self._keep(key, message)

    def _keep(self, key: LinkKey, message: RoomAbort) -> None:
        place = key.place
        if place not in self._unsaid and len(self._unsaid) >= UNSAID_RANKS_MAX:
            del self._unsaid[next(iter(self._unsaid))]
        self._unsaid.setdefault(place, deque(maxlen=UNSAID_MAX)).append(message)

    def tick(self, now_s: float) -> None:
        """Gives up links that bring nothing any more, to which nobody answers, or whose hello is
        not answered."""
        if self._silence.is_due(now_s):
            counts = {one: bytes_received(one.fd) for one in self._links.values() if one.connected}
            for link in self._silence.look(counts, now_s):
                self._drop(
                    link,
                    f"lost the connection to {link.key}, which has brought nothing for"
                    f" {self._silence.after_s:g} s",
                    forget_instance=True,
                )
        for link in list(self._links.values()):
            waited_s = now_s - link.opened_s
            if not link.connected:
                self._watch(link)  # It may have been reached while this thread stood still.
            if not self._is_current(link):
                continue
            if not link.connected and waited_s >= min(CONNECT_S, self._timeout_s):
                self._drop(link, f"{link.key} does not answer", forget_instance=True)
            elif link.engine is None and waited_s >= self._timeout_s:
                self._drop(
                    link,
                    f"{link.key} did not answer the hello within {self._timeout_s:g} s"
                    f" ({self._timeout_name})",
                    forget_instance=True,
                )
            elif not link.connected and now_s - link.dialled_s >= DIAL_S:
                self._dial_again(link, now_s)

    def close(self) -> None:
        """Closes all sockets, when nobody reads them any more."""
        for link in self._links.values():
            _close_sockets(link)
        self._links.clear()

    def _credentials(self, key: LinkKey) -> tuple[CurvePair | None, bytes]:
        """Who we are, and the public key of whom we want to speak to; ValueError if it has none."""
        if not self._keys:
            return None, b""
        if not key.rank.control_key:
            raise ValueError("its record in the registry has no key for control links")
        return decode_pair(self._keys[key.secret]), key.rank.control_key.encode("ascii")

    def _send(self, link: _Link, frame: bytes) -> None:
        try:
            link.dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._drop(link, f"{link.key} does not read its messages", forget_instance=True)
        except zmq.ZMQError as error:
            self._drop(link, f"cannot write to {link.key}: {error}", forget_instance=True)

    def _is_current(self, link: _Link) -> bool:
        return self._links.get(link.key) is link

    def _read(self, link: _Link) -> None:
        while self._is_current(link):
            try:
                message = messages.decode(link.dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except MessageError as error:
                self._drop(link, f"{link.key}: {error}", forget_instance=True)
                return
            self._take(link, message)

    def _take(self, link: _Link, message: Message) -> None:
        key = link.key
        match message:
            case HelloReply(None, engine_id, engine_epoch, layers, layout=layout, place=place):
                link.engine, link.layers = te.Identity(engine_id, engine_epoch), layers
                if layout is not None and place is not None:
                    link.source = layout, place
                for unsaid in self._unsaid.pop(key.place, ()):
                    self.send(key, unsaid)
                if self._is_current(link):  # else that has been reported
                    self._report(LinkUp(key, layers))
            case HelloReply(refused=reason, why=why):
                sentence = f"{key} refused: {reason}"
                if why is not None:
                    self._refused(key, sentence, why)
                # It can be told until the link is closed; see `_FAREWELL_MS`.
                self._report(LinkRefused(key, sentence))
                self._close(link)
            case LinkReset(reason):
                self._drop(link, f"{key}: {reason}", forget_instance=False)
            case RoomComputed():
                self._report(PeerComputed(key, message))
            case RoomDigests():
                self._report(PeerDigested(key, message))
            case RoomFailed():
                self._report(PeerFailed(key, message))
            case _:
                logger.warning("%s sent a %s", key, type(message).__name__)

    def _watch(self, link: _Link) -> None:
        if not self._is_current(link):
            return  # its sockets are closed
        try:
            seen = recv_monitor_message(link.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return
        event = seen["event"]
        if event & zmq.EVENT_CONNECTED:
            link.connected, link.fd = True, int(seen["value"])
            return
        if event & zmq.EVENT_CONNECT_RETRIED:
            # zmq tries again for ever. A rank listens before it registers: it is dead.
            self._drop(
                link,
                f"the connection to {link.key} was refused: no process listens there",
                forget_instance=True,
            )
            return
        if event & HANDSHAKE_FAILED:
            reason = (
                f"no control link to {link.key}: its process has another key than its record in "
                "the registry, or another secret than we have; the record is read again"
            )
        else:
            reason = f"lost the connection to {link.key}"
        self._drop(link, reason, forget_instance=True)

    def _drop(self, link: _Link, reason: str, forget_instance: bool) -> None:
        """The next room opens it again, after a fresh look at the registry when the rank may have
        been restarted elsewhere."""
        if not self._is_current(link):
            return  # a late word of a link that has been replaced
        self._end_sockets(link)
        self._forget(link, reason, forget_instance)

    def _forget(self, link: _Link, reason: str, forget_instance: bool) -> None:
        """Of one whose sockets are closed."""
        logger.warning("%s", reason)
        del self._links[link.key]
        if forget_instance:
            self._forget_instance(link.key.address)
        self._report(LinkDown(link.key, reason))

    def _close(self, link: _Link) -> None:
        if not self._is_current(link):
            return
        del self._links[link.key]
        self._end_sockets(link)

    def _end_sockets(self, link: _Link, farewell_ms: int = _FAREWELL_MS) -> None:
        self._readers.remove_reader(link.dealer)
        self._readers.remove_reader(link.monitor)
        _close_sockets(link, farewell_ms)


def _close_sockets(link: _Link, farewell_ms: int = _FAREWELL_MS) -> None:
    link.dealer.disable_monitor()
    link.monitor.close(linger=0)
    link.dealer.close(linger=farewell_ms)
