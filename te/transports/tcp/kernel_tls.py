# SPDX-License-Identifier: Apache-2.0
"""Encryption of a TCP connection by the kernel: TLS 1.3's records (RFC 8446, 5) without its
handshake, with keys that both sides have derived. Source: the kernel's networking/tls.rst and
include/uapi/linux/tls.h.

The socket is used as before: the kernel encrypts what is written to it, and scatters what it has
decrypted to where it is read, once the record's tag is good. The cipher is ChaCha20-Poly1305, of
which one key is enough for all records that can be numbered (RFC 8446, 5.5), so a connection never
has to be made anew. AES-GCM's keys must be replaced, which kernels before 6.14 cannot do.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
from typing import Final

from te.proof import Key

__all__ = ["encrypt", "problem"]

_TCP_ULP: Final = 31  # linux/tcp.h
_SOL_TLS: Final = 282  # linux/socket.h
_TLS_TX: Final = 1
_TLS_RX: Final = 2
_TLS_1_3: Final = 0x0304
_CHACHA20_POLY1305: Final = 54
#: struct tls12_crypto_info_chacha20_poly1305: version, cipher, iv, key, number of the next record.
_CRYPTO_INFO: Final = struct.Struct("=HH12s32sQ")
_IV_BYTES: Final = 12
_KEY: Final = b"te tls key\0"
_IV: Final = b"te tls iv\0"


def encrypt(fd: int, out: bytes, into: bytes) -> None:
    """Has the kernel encrypt what is written to the connected TCP socket from now on, and decrypt
    what has not been read yet, with keys that follow from these two secrets (32 random bytes each).

    ``OSError``: the kernel cannot (``problem``), or the connection has ended.
    """
    sock = socket.socket(fileno=fd)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_ULP, b"tls")
        sock.setsockopt(_SOL_TLS, _TLS_TX, _crypto_info(out))
        sock.setsockopt(_SOL_TLS, _TLS_RX, _crypto_info(into))
    finally:
        sock.detach()


@functools.cache
def problem() -> str | None:
    """Why the kernel cannot; tried out once, with two sockets of this process."""
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            one = stack.enter_context(socket.create_connection(listener.getsockname(), 1.0))
            encrypt(one.fileno(), bytes(32), bytes(32))
    except OSError as error:
        return (
            f"the kernel has no TLS with ChaCha20-Poly1305 for sockets ({error.strerror});"
            " `modprobe tls` loads its module"
        )
    return None


def _crypto_info(secret: bytes) -> bytes:
    key = Key(secret)
    iv = key.expand(_IV)[:_IV_BYTES]
    return _CRYPTO_INFO.pack(_TLS_1_3, _CHACHA20_POLY1305, iv, key.expand(_KEY), 0)
