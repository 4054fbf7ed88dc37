# SPDX-License-Identifier: Apache-2.0
"""What the tests of strangers on the same host say to an engine."""

from __future__ import annotations

import fcntl
import os
import socket
from typing import Any

from te_raw import (
    NONCE,
    dial_unix,
    host_hello,
    read_greeting,
    refusal,
    said,
)
from te_ring import make_rings

from te.buffers import F_SEAL_FUTURE_WRITE
from te.connect.greeting import GreetingKind
from te.handshake import Refuse, decode_body
from te.transports.samehost.messages import Nonce, Shared

PAGE = 4096


def memory_file(nbytes: int, content: bytes = b"", at: int = 0) -> int:
    """One that a peer maps, as of `te.allocate`; nothing but holes beside the content."""
    fd = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if content:
        os.pwrite(fd, content, at)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE)
    return fd


def rail_asked(card: bytes, **changes: Any) -> socket.socket:
    """A connection that asks for a rail on the same host."""
    sock, fd = dial_unix(card), make_rings()
    socket.send_fds(sock, [host_hello(sock, card, **changes)], [fd])
    os.close(fd)
    return sock


def rail_refused(card: bytes, **changes: Any) -> str:
    """Why a rail on the same host is refused."""
    with rail_asked(card, **changes) as sock:
        return refusal(sock).reason


def say(
    card: bytes, shared: Shared, fd: int | None, link: int, nonce: Nonce = NONCE.nonce
) -> str | None:
    """A word about memory; why it was refused, or None."""
    with dial_unix(card) as sock:
        socket.send_fds(
            sock, [host_hello(sock, card, nonce, shared, link=link)], [] if fd is None else [fd]
        )
        greeting = read_greeting(sock)
        assert greeting is not None
        if greeting.kind == GreetingKind.WELCOME:
            return None
        return decode_body(said(greeting), Refuse).reason
