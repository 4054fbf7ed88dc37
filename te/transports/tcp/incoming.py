# SPDX-License-Identifier: Apache-2.0
"""One incoming connection: checks what a source sends and lands it."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te.arrivals import Tag
from te.errors import BoundsError, HandshakeError, ProtocolViolation
from te.handshake import (
    PROTOCOL_VERSION,
    Hello,
    Refusal,
    Refuse,
    Welcome,
    decode_body,
    encode,
    version_mismatch,
)
from te.transports.tcp.loop import READABLE, WRITABLE
from te.transports.tcp.syscalls import Iovecs, receive_into, send_from
from te.transports.tcp.wire import (
    SOURCE_FRAMES,
    Abandon,
    AckStatus,
    End,
    Frame,
    FrameReader,
    Greeting,
    GreetingKind,
    GreetingReader,
    Segment,
    encode_ack,
    encode_greeting,
)

if TYPE_CHECKING:
    from te.transports.tcp.receiver import Receiver

__all__ = ["Incoming"]

logger = logging.getLogger(__name__)

# Calls on one connection before the others get their turn.
CALLS_PER_TURN = 32
# A source that does not read its acknowledgements is not read from either.
ACK_BACKLOG_BYTES = 256 << 10


@dataclass
class _Arriving:
    """The transfer whose frames are coming in."""

    id: int
    tag: int
    #: The opening it began under; None for tag 0, and when the tag was not open.
    opening: Tag | None
    nbytes: int = 0
    #: It was acknowledged as refused: the rest of it is thrown away.
    refused: bool = False


class Incoming:
    """Belongs to the receiver's thread, but for ``dropped`` and ``engine_id``."""

    def __init__(self, receiver: Receiver, sock: socket.socket, where: str) -> None:
        self._receiver = receiver
        self._local = receiver.local
        self._sock = sock
        self._fd = sock.fileno()
        self._where = where
        self._closed = False
        self._greet_until_s: float | None = time.monotonic() + self._local.config.connect_timeout_s
        #: Set by any thread: nothing may land from here any more. Looked at inside the gate.
        self.dropped = False
        #: Of the source, once it has introduced itself.
        self.engine_id: str | None = None
        self._reader: GreetingReader | FrameReader = GreetingReader()
        self._out = bytearray()
        self._watched = READABLE
        self._last_id = 0
        self._arriving: _Arriving | None = None
        # What the payload under way may be written to, and against what it was checked.
        self._iovecs = Iovecs()
        self._map = self._local.memory.map
        self._newest = 0
        self._discard_nbytes = 0

    def check_greeting(self, now_s: float) -> float | None:
        """Closes it if it has not introduced itself in time; else returns when it must have."""
        if self._greet_until_s is not None and now_s >= self._greet_until_s:
            self.close(f"no hello within {self._local.config.connect_timeout_s} s")
        return self._greet_until_s

    def close(self, reason: str) -> None:
        """Closes it and says why in the log. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._greet_until_s = None
        logger.info("closing the connection from %s (%s): %s", self._where, self.engine_id, reason)
        self._receiver.loop.forget(self._fd)
        self._receiver.forget(self)
        self._sock.close()

    def on_ready(self, events: int) -> None:
        """Handler for the loop."""
        try:
            if events & ~WRITABLE:
                self._read()
            if not self._closed:
                self._flush()
        except (ProtocolViolation, HandshakeError) as exc:
            logger.warning("%s (%s) broke the protocol: %s", self._where, self.engine_id, exc)
            self.close("broken protocol")
        except OSError as exc:
            self.close(exc.strerror or str(exc))

    def _read(self) -> None:
        for _ in range(CALLS_PER_TURN):
            if self._closed or len(self._out) > ACK_BACKLOG_BYTES:
                return
            try:
                if self._discard_nbytes:
                    self._discard()
                elif self._iovecs.remaining:
                    self._land()
                else:
                    self._control()
            except BlockingIOError:
                return

    def _flush(self) -> None:
        if self._out:
            with contextlib.suppress(BlockingIOError):
                del self._out[: send_from(self._fd, self._out)]
        full = len(self._out) > ACK_BACKLOG_BYTES
        watched = (0 if full else READABLE) | (WRITABLE if self._out else 0)
        if watched != self._watched:
            self._watched = watched
            self._receiver.loop.rewatch(self._fd, watched)

    # -- what comes in between payloads

    def _control(self) -> None:
        nbytes = receive_into(self._fd, self._reader.room())
        if not nbytes:
            self._end_of_stream()
            return
        item = self._reader.filled(nbytes)
        if isinstance(item, Greeting):
            self._greet(item)
        elif item is not None:
            self._on_frame(item)

    def _end_of_stream(self) -> None:
        whole = self._reader.idle and self._arriving is None
        self.close("closed by the peer" + ("" if whole else " in the middle of a transfer"))

    def _greet(self, greeting: Greeting) -> None:
        if greeting.version != PROTOCOL_VERSION:
            who = f"the engine at {self._where}"
            self._refuse_greeting(Refusal.VERSION, version_mismatch(who, greeting.version))
            return
        if greeting.kind != GreetingKind.HELLO:
            raise ProtocolViolation(f"a greeting of kind {greeting.kind} instead of a hello")
        hello = decode_body(greeting.body, Hello)
        if (hello.peer_id, hello.peer_epoch) != (self._local.id, self._local.epoch):
            self._refuse_greeting(
                Refusal.IDENTITY,
                f"this is the engine {self._local.id}, not {hello.peer_id} of the card: it was"
                " restarted or another one took its port; get its new card",
            )
            return
        self.engine_id = hello.id
        self._greet_until_s = None
        self._reader = FrameReader(SOURCE_FRAMES)
        welcome = Welcome(id=self._local.id, epoch=self._local.epoch)
        self._out += encode_greeting(GreetingKind.WELCOME, PROTOCOL_VERSION, encode(welcome))

    def _refuse_greeting(self, code: Refusal, reason: str) -> None:
        logger.warning("%s refused: %s", self._where, reason)
        body = encode(Refuse(code=code, reason=reason))
        self._out += encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, body)
        self._flush()
        self.close("refused")

    def _on_frame(self, frame: Frame) -> None:
        if isinstance(frame, Segment):
            self._on_segment(frame)
        elif isinstance(frame, End):
            self._on_end(frame)
        else:
            assert isinstance(frame, Abandon)
            arriving = self._transfer(frame.transfer, None)
            if not arriving.refused:
                self._out += encode_ack(arriving.id, AckStatus.ABANDONED)
            self._arriving = None

    def _transfer(self, number: int, tag: int | None) -> _Arriving:
        """The transfer a frame belongs to; begins it with its first frame."""
        arriving = self._arriving
        if arriving is None:
            if number <= self._last_id:
                raise ProtocolViolation(f"transfer {number} comes after {self._last_id}")
            self._last_id = number
            opening = self._local.arrivals.find(tag) if tag else None
            arriving = self._arriving = _Arriving(number, tag or 0, opening)
            if tag and opening is None:
                self._refuse(f"the tag {tag:#x} is not open here: never expected, or fenced")
        elif number != arriving.id or tag not in (None, arriving.tag):
            raise ProtocolViolation(
                f"transfer {number} with tag {tag} within transfer {arriving.id}"
                f" with tag {arriving.tag}"
            )
        return arriving

    def _refuse(self, reason: str) -> None:
        assert self._arriving is not None
        assert not self._arriving.refused
        self._arriving.refused = True
        if self.dropped:
            self.close(reason)
            return
        self._out += encode_ack(self._arriving.id, AckStatus.REFUSED, reason)

    def _on_segment(self, segment: Segment) -> None:
        arriving = self._transfer(segment.transfer, segment.tag)
        arriving.nbytes += segment.nbytes
        if not arriving.refused:
            self._map = self._local.memory.map
            try:
                self._map.check(segment.landings["dst"], segment.landings["nbytes"])
            except BoundsError as exc:
                self._refuse(f"the destination: {exc}")
            self._newest = self._map.newest
        if arriving.refused:
            self._discard_nbytes = segment.nbytes
        else:
            self._iovecs.load(segment.landings)

    def _on_end(self, end: End) -> None:
        arriving = self._transfer(end.transfer, end.tag)
        if end.nbytes != arriving.nbytes:
            raise ProtocolViolation(
                f"transfer {arriving.id} ends after {arriving.nbytes} of {end.nbytes} bytes"
            )
        if not arriving.refused:
            # Inside the gate: no arrival is counted after a fence has returned.
            with self._receiver.gate:
                revoked = self._revoked(arriving)
                if revoked is None and arriving.opening is not None:
                    self._local.arrivals.landed(arriving.opening)
            if revoked is not None:
                self._refuse(revoked)
            else:
                self._out += encode_ack(arriving.id, AckStatus.LANDED)
        self._arriving = None

    # -- payload

    def _discard(self) -> None:
        room = self._receiver.scratch[: self._discard_nbytes]
        nbytes = receive_into(self._fd, room)
        if not nbytes:
            self._end_of_stream()
        self._discard_nbytes -= nbytes

    def _land(self) -> None:
        """One call that writes registered memory, inside the gate, if that is still allowed."""
        arriving = self._arriving
        assert arriving is not None
        nbytes = 0
        with self._receiver.gate:
            reason = self._revoked(arriving)
            if reason is None:
                try:
                    nbytes = self._iovecs.receive(self._fd)
                except OSError as exc:
                    if exc.errno != errno.EFAULT:
                        raise
                    reason = f"registered memory cannot be written: {exc.strerror}"
        if reason is not None:
            self._refuse(reason)
            self._discard_nbytes = self._iovecs.remaining
            self._iovecs.unload()
        elif not nbytes:
            self._end_of_stream()
        else:
            self._receiver.bytes_received += nbytes

    def _revoked(self, arriving: _Arriving) -> str | None:
        """Why no byte of the transfer may land any more, looked at anew before each call."""
        if self.dropped:
            return "the application fenced this peer"
        if arriving.opening is not None and not arriving.opening.open:
            return f"the tag {arriving.tag:#x} was fenced"
        memory_map = self._local.memory.map
        if memory_map is not self._map and self._iovecs.remaining:
            rest = self._iovecs.rest()
            # Only what was registered at the segment's check and still is: the same range can have
            # been registered anew, for something else.
            try:
                memory_map.up_to(self._newest).check(rest["base"], rest["nbytes"])
            except BoundsError as exc:
                return f"deregistered meanwhile: {exc}"
            self._map = memory_map
        return None
