# SPDX-License-Identifier: Apache-2.0
"""What two doctors say to each other: MessagePack messages over a connection, each with a proof.

The near side calls with random bytes and the names of its keys; the far side answers with random
bytes and the key that it takes. Both derive the session's key from that, and each message has a
code (HMAC-SHA256) over its direction, its number and itself. So nobody without a key is listened
to, and nobody on the way changes, repeats or drops one unseen. Without keys the empty key takes
their place, which everybody has.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Final, TypeVar

import msgspec

from te import nesting
from te.errors import UsageError
from te.proof import KEY_ID_BYTES, KEYS_MAX, NO_KEY, Key, is_same

__all__ = ["REPLY_BYTES_MAX", "REQUEST_BYTES_MAX", "Channel", "ChannelError", "answer", "call"]

REQUEST_BYTES_MAX: Final = 4096
REPLY_BYTES_MAX: Final = 8 << 20

VERSION: Final = 2
"""The version of these messages. Doctors talk only to those of their own."""

_MAGIC: Final = b"te doctor\0"
_NONCE_BYTES: Final = 32
#: Magic, version, random bytes, names of keys.
_CALL: Final = struct.Struct(f"<10sH{_NONCE_BYTES}s{KEY_ID_BYTES * KEYS_MAX}s")
#: Magic, version, which of the keys (from 0; ``_NO_KEY``: none), random bytes.
_ANSWER: Final = struct.Struct(f"<10sHB{_NONCE_BYTES}s")
_NO_KEY: Final = 255
_HEADER: Final = struct.Struct("<I32s")
_SESSION: Final = b"te doctor session\0"
_ENGINES: Final = b"te doctor engines\0"

T = TypeVar("T")


class ChannelError(UsageError):
    """The other doctor cannot be talked with; the sentence says why."""


class Channel:
    """Messages in both directions; used by one thread."""

    def __init__(self, sock: socket.socket, session: Key, is_near: bool) -> None:
        """``call`` and ``answer`` make it. ``is_near``: this side asks."""
        self.sock = sock
        self._session = session
        self._directions = (b"near", b"far\0") if is_near else (b"far\0", b"near")
        self._sent = self._received = 0

    @property
    def engine_key(self) -> bytes:
        """The key of this session's engines, on both sides."""
        return self._session.expand(_ENGINES)

    def send(self, message: msgspec.Struct, timeout_s: float) -> None:
        """``ChannelError``."""
        body = msgspec.msgpack.encode(message)
        code = self._code(0, self._sent, body)
        self._sent += 1
        try:
            self.sock.settimeout(timeout_s)
            self.sock.sendall(_HEADER.pack(len(body), code) + body)
        except OSError as exc:
            raise ChannelError(f"the other doctor has gone ({_cause(exc)})") from exc

    def receive(self, decoder: msgspec.msgpack.Decoder[T], nbytes_max: int, timeout_s: float) -> T:
        """The next message, of at most so many bytes; ``ChannelError``."""
        deadline_s = time.monotonic() + timeout_s
        nbytes, code = _HEADER.unpack(_read(self.sock, _HEADER.size, deadline_s))
        if nbytes > nbytes_max:
            raise ChannelError(f"a message of {nbytes} bytes; at most {nbytes_max} are accepted")
        body = _read(self.sock, nbytes, deadline_s)
        if not is_same(code, self._code(1, self._received, body)):
            raise ChannelError(
                "the other doctor does not prove that it has this key: give both the same"
                " --secret-file"
            )
        self._received += 1
        problem = nesting.complaint(body)
        try:
            if problem is None:
                return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            problem = str(exc)
        raise ChannelError(f"the other doctor says what this one does not know: {problem}")

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()

    def _code(self, direction: int, number: int, body: bytes) -> bytes:
        said = self._directions[direction] + number.to_bytes(8, "little") + body
        return self._session.code(said)


def call(sock: socket.socket, keys: tuple[Key, ...], timeout_s: float) -> Channel:
    """The near side's: of a connected socket, which it closes on an error. ``ChannelError``."""
    try:
        nonce = os.urandom(_NONCE_BYTES)
        names = b"".join(key.id for key in keys).ljust(KEY_ID_BYTES * KEYS_MAX, b"\0")
        sock.settimeout(timeout_s)
        sock.sendall(_CALL.pack(_MAGIC, VERSION, nonce, names))
        data = _read(sock, _ANSWER.size, time.monotonic() + timeout_s)
        magic, version, which, other = _ANSWER.unpack(data)
        _check(magic, version)
        if which >= len(keys):
            raise ChannelError(
                "the other doctor has another secret, or none: give both the same --secret-file"
            )
        return Channel(sock, _session(keys[which], nonce, other), is_near=True)
    except OSError as exc:
        sock.close()
        raise ChannelError(f"the other doctor does not answer ({_cause(exc)})") from exc
    except ChannelError:
        sock.close()
        raise


def answer(sock: socket.socket, keys: tuple[Key, ...], timeout_s: float) -> Channel:
    """The far side's: of an accepted socket, which it closes on an error. ``ChannelError``."""
    try:
        data = _read(sock, _CALL.size, time.monotonic() + timeout_s)
        magic, version, nonce, names = _CALL.unpack(data)
        if magic != _MAGIC:
            raise ChannelError("a connection of something else than te doctor")
        own = os.urandom(_NONCE_BYTES)
        ids = [names[at : at + KEY_ID_BYTES] for at in range(0, len(names), KEY_ID_BYTES)]
        both = [(i, key) for i, name in enumerate(ids) for key in keys if key.id == name]
        which, key = both[0] if both else (_NO_KEY, NO_KEY)
        sock.settimeout(timeout_s)
        sock.sendall(_ANSWER.pack(_MAGIC, VERSION, which, own))
        _check(magic, version)
        if not both:
            raise ChannelError("a doctor with another secret, or none")
        return Channel(sock, _session(key, nonce, own), is_near=False)
    except OSError as exc:
        sock.close()
        raise ChannelError(f"a connection ended before it said anything ({_cause(exc)})") from exc
    except ChannelError:
        sock.close()
        raise


def _session(key: Key, near: bytes, far: bytes) -> Key:
    return Key(key.expand(_SESSION + near + far))


def _check(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise ChannelError("it is no te doctor that listens there")
    if version != VERSION:
        raise ChannelError(
            f"the other doctor speaks version {version}, this one {VERSION}: run the same version"
            " of sglang-mooncake on both hosts"
        )


def _read(sock: socket.socket, nbytes: int, deadline_s: float) -> bytes:
    data = bytearray()
    try:
        while len(data) < nbytes:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            part = sock.recv(min(nbytes - len(data), 1 << 16))
            if not part:
                raise ChannelError("the other side closed the connection")
            data += part
    except OSError as exc:
        raise ChannelError(f"no word from the other doctor ({_cause(exc)})") from exc
    return bytes(data)


def _cause(exc: OSError) -> str:
    return exc.strerror or str(exc) or type(exc).__name__
