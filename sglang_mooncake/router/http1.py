# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 as the router speaks it to servers (RFC 9112): the head of a request, and an answer that
is taken apart as its bytes come. Pure.

Only what leaves no doubt is taken: what could be read in two ways is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

__all__ = ["HEAD_BYTES_MAX", "AnswerError", "AnswerParser", "Head", "request_head"]

HEAD_BYTES_MAX: Final = 64 << 10
"""Of an answer, and of the trailers behind a body in chunks."""
#: Of the line before a chunk, with what may stand behind the size.
_SIZE_BYTES_MAX: Final = 4 << 10
_END: Final = b"\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n\0]*)?")
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: Control characters but the tab (RFC 9110, 5.5), which aiohttp passes on to no client.
_BAD_VALUE: Final = re.compile(rb"[\0-\x08\x0a-\x1f\x7f]")
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
#: What would end a line of a head, or the head.
_BREAKS: Final = re.compile(r"[\r\n\0]")
_NO_BODY: Final = frozenset({204, 304})
_SWITCHED: Final = 101


class AnswerError(ValueError):
    """It is no answer, or only a part of one."""


class Head(NamedTuple):
    """``length``: of the body in bytes, where the server names it."""

    status: int
    headers: Sequence[tuple[str, str]]
    length: int | None


def request_head(path: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    """Of a POST with a body of so many bytes. ``ValueError`` for what would break a line."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if _BREAKS.search("".join(lines)):
        raise ValueError("a header has a line break or a zero in it")
    return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape")


class AnswerParser:
    """One answer. ``take`` gets its bytes as they come, ``end`` is told that no more will come."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.is_over = False
        #: Whether the connection may be used again once it is over.
        self.keeps = True
        self._buffer = bytearray()
        #: What is left of the body, or of the chunk; None where it lasts until the connection ends.
        self._left: int | None = 0
        self._is_chunked = self._is_trailer = False
        self._trailer_bytes = 0

    @property
    def has_begun(self) -> bool:
        """Whether anything of it has come."""
        return self.head is not None or bool(self._buffer)

    def take(self, data: bytes) -> bytes:
        """The bytes of the body in ``data``. ``AnswerError``."""
        if self.head is None:
            self._buffer += data
            data = self._after_head()
            if self.head is None:
                return b""
        if self._is_chunked:
            return self._chunks(data)
        if self.is_over:
            self.keeps = self.keeps and not data
            return b""
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        if not self._left:
            self.is_over = True
            self.keeps = self.keeps and len(data) == len(body)
        return body

    def end(self) -> None:
        """The connection has ended. ``AnswerError`` if the answer has not."""
        self.keeps = False
        if self.head is not None and self._left is None and not self._is_chunked:
            self.is_over = True
        if not self.is_over:
            where = "before its answer" if self.head is None else "in the middle of its answer"
            raise AnswerError(f"the server has closed the connection {where}")

    def _after_head(self) -> bytes:
        """What has come behind the head."""
        while (at := self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)) >= 0:
            lines, rest = bytes(self._buffer[:at]).split(_END), bytes(self._buffer[at + 4 :])
            self._buffer.clear()
            status, is_old, headers = _read_head(lines)
            if status >= 200:
                self._begin(status, is_old, headers)
                return rest
            if status == _SWITCHED:
                raise AnswerError("the server has switched to a protocol that it was not asked for")
            self._buffer += rest  # It goes on with the request: the answer follows.
        if len(self._buffer) >= HEAD_BYTES_MAX:
            raise AnswerError(f"the head of the answer is longer than {HEAD_BYTES_MAX} bytes")
        return b""

    def _begin(self, status: int, is_old: bool, headers: Sequence[tuple[str, str]]) -> None:
        named: dict[str, list[str]] = {}
        for name, value in headers:
            named.setdefault(name.lower(), []).append(value)
        words = [w.strip().lower() for v in named.get("connection", ()) for w in v.split(",")]
        self.keeps = not is_old and "close" not in words
        coding, lengths = named.get("transfer-encoding"), named.get("content-length")
        length = None
        if status in _NO_BODY:
            self.is_over = True
        elif coding is not None:
            if lengths is not None or [one.lower() for one in coding] != ["chunked"]:
                raise AnswerError(f"the answer is coded in a way that is not understood: {coding}")
            self._is_chunked = True
        elif lengths is not None:
            if len(set(lengths)) > 1 or not _LENGTH.fullmatch(lengths[0]):
                raise AnswerError(f"the answer has no length that is understood: {lengths}")
            self._left = length = int(lengths[0])
            self.is_over = not length
        else:
            self._left, self.keeps = None, False
        self.head = Head(status, headers, length)

    def _chunks(self, data: bytes) -> bytes:
        """``_left`` counts the line break behind a chunk."""
        if self.is_over:
            self.keeps = self.keeps and not data
            return b""
        if self._buffer:
            data = bytes(self._buffer) + data
            self._buffer.clear()
        parts: list[bytes] = []
        at = 0
        while at < len(data) and not self.is_over:
            if self._left:
                at = self._in_chunk(data, at, parts)
                continue
            end = data.find(_END, at)
            if end < 0:
                if len(data) - at > _SIZE_BYTES_MAX:
                    raise AnswerError("the line before a chunk is too long")
                self._buffer += data[at:]
                break
            at = self._at_line(data[at:end], end + 2)
        if self.is_over and at < len(data):
            self.keeps = False
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _in_chunk(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Takes what there is of a chunk, from ``at`` on; where it ends."""
        assert self._left
        body = data[at : at + self._left - 2] if self._left > 2 else b""
        if body:
            parts.append(body)
            self._left -= len(body)
            at += len(body)
        while at < len(data) and 0 < self._left <= 2:
            if data[at] != _END[2 - self._left]:
                raise AnswerError("a chunk is longer than it was said to be")
            self._left -= 1
            at += 1
        return at

    def _at_line(self, line: bytes, behind: int) -> int:
        """A line before a chunk, or behind the last one; where it ends."""
        if self._is_trailer:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > HEAD_BYTES_MAX:
                raise AnswerError("there is too much behind the last chunk")
            self.is_over = not line
            return behind
        size = _SIZE.fullmatch(line)
        if size is None:
            raise AnswerError(f"{line[:40]!r} is no size of a chunk")
        count = int(size[1], 16)
        if count:
            self._left = count + 2
        else:
            self._is_trailer = True
        return behind


def _read_head(lines: Sequence[bytes]) -> tuple[int, bool, list[tuple[str, str]]]:
    """Status, whether it is HTTP/1.0, and headers."""
    first = _STATUS.fullmatch(lines[0])
    if first is None:
        raise AnswerError(f"{lines[0][:40]!r} is no begin of an answer")
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
            raise AnswerError(f"{line[:40]!r} is no header")
        headers.append((name.decode(), value.strip(b" \t").decode(errors="surrogateescape")))
    return int(first[2]), first[1] == b"0", headers
