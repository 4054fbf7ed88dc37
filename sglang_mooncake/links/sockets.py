# SPDX-License-Identifier: Apache-2.0
"""The sockets of control links: a ROUTER on each prefill rank, to which each decode rank connects a
DEALER."""

from __future__ import annotations

import ctypes
import errno
import secrets
from collections.abc import Callable
from typing import Protocol

import zmq

__all__ = ["PortsTaken", "Readers", "open_dealer", "open_router"]

#: Control messages that wait for one peer; beyond it the peer counts as unreachable.
_QUEUE_MESSAGES_MAX = 10_000
#: zmq takes milliseconds as a C int: 24 days, which is "never" for a heartbeat.
_ZMQ_MS_MAX = 2**31 - 1
_srand = ctypes.PyDLL(None).srand
_srand.argtypes = (ctypes.c_uint,)
_srand.restype = None


class PortsTaken(RuntimeError):
    """None of the ports that a rank may listen on is free."""


class Readers(Protocol):
    """What `ControlLoop` has for those who use sockets."""

    zmq_context: zmq.Context[zmq.Socket[bytes]]

    def add_reader(self, socket: zmq.Socket[bytes], readable: Callable[[], None]) -> None: ...
    def remove_reader(self, socket: zmq.Socket[bytes]) -> None: ...


def open_router(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    message_bytes_max: int,
    ports: tuple[int, int] | None = None,
) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER socket and its port; peers connect with `open_dealer`. It gives each of them a
    name; one that asks for the name of another is not heard.

    Args:
        ports: the first and the last of those of which a free one is taken (default: of all).

    Raises:
        zmq.ZMQError: the address cannot be bound.
        PortsTaken: none of `ports` is free.
    """
    # A ROUTER numbers its peers from rand(), which is the same in each process unless it is seeded.
    # libzmq 4.3.5 aborts the process when it gives out a number that a peer has claimed before, so
    # nobody must be able to guess the next one. No option of the socket refuses such claims.
    _srand(secrets.randbits(32))
    socket = context.socket(zmq.ROUTER)
    _bound(socket, host, message_bytes_max)
    # A send to a peer that is gone raises instead of vanishing.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if ports is None:
        return socket, socket.bind_to_random_port(_tcp(host))
    for port in range(ports[0], ports[1] + 1):
        try:
            socket.bind(f"{_tcp(host)}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return socket, port
    socket.close(linger=0)
    raise PortsTaken(
        f"cannot listen on {host}: none of the ports from {ports[0]} to {ports[1]} is free; give a "
        "wider range"
    )


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    port: int,
    heartbeat_s: float,
    heartbeat_failures_max: int,
    message_bytes_max: int,
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER socket to a ROUTER, and the socket that reports when its connection breaks.

    zmq's own heartbeats run in its I/O thread, so a busy interpreter on either side is not mistaken
    for a dead peer, while a frozen process is found after heartbeat_s × heartbeat_failures_max, or
    never when that is more than zmq can count.

    Raises:
        zmq.ZMQError: the process has too many sockets or open files.
    """
    socket = context.socket(zmq.DEALER)
    try:
        _bound(socket, host, message_bytes_max)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(heartbeat_s))
        socket.setsockopt(
            zmq.HEARTBEAT_TIMEOUT, _milliseconds(heartbeat_s * heartbeat_failures_max)
        )
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(f"{_tcp(host)}:{port}")
        except BaseException:
            socket.disable_monitor()
            monitor.close(linger=0)
            raise
    except BaseException:
        socket.close(linger=0)
        raise
    return socket, monitor


def _milliseconds(seconds: float) -> int:
    return int(min(seconds * 1000, _ZMQ_MS_MAX))


def _bound(socket: zmq.Socket[bytes], host: str, message_bytes_max: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)


def _tcp(host: str) -> str:
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
