# SPDX-License-Identifier: Apache-2.0
"""ZMTP peers by hand, who claim a routing id that libzmq's own sockets refuse to ask for."""

from __future__ import annotations

import socket
import struct

__all__ = ["VERSIONS", "claim"]

#: Of ZMTP, each of which names itself in another way.
VERSIONS = ("3.0", "2.0", "1.0")
_HOST, _TIMEOUT_S = "127.0.0.1", 30.0
_DEALER = 5  # in ZMTP 2.0


def claim(port: int, routing_id: bytes, message: bytes, version: str = "3.0") -> socket.socket:
    """A DEALER in plain that claims a routing id (an empty one: none), and says a short message."""
    sock = socket.create_connection((_HOST, port), _TIMEOUT_S)
    if version == "1.0":
        # An anonymous frame has its length, flags included, and its flags.
        sock.sendall(bytes([len(routing_id) + 1, 0]) + routing_id)
        sock.sendall(bytes([len(message) + 1, 0]) + message)
        return sock
    if version == "2.0":
        sock.sendall(b"\xff" + bytes(8) + b"\x7f\x01" + bytes([_DEALER]))
        sock.sendall(bytes([0, len(routing_id)]) + routing_id)
    else:
        sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        received = b""
        while len(received) < 64:
            received += sock.recv(64 - len(received))
        ready = b"\x05READY"
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", routing_id)):
            ready += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
    sock.sendall(bytes([0, len(message)]) + message)
    return sock
