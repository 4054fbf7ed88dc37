# SPDX-License-Identifier: Apache-2.0
"""Somebody who was not invited: connects to every port that a host listens on, and says things.
`python -m chaos_run.stranger HOST SECONDS SEED PORT…` prints how many connections were made."""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

__all__ = ["SAYINGS", "Saying", "attack", "http", "zmtp"]

Saying: TypeAlias = Callable[[random.Random], bytes]

_AT_ONCE: Final = 16
_PATIENCE_S: Final = 0.5
_MESSAGE_BYTES_MAX: Final = 8192


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, _MESSAGE_BYTES_MAX))


def _silence(_rng: random.Random) -> bytes:
    return b""


def _greeting(rng: random.Random) -> bytes:
    """Of te, with a body of noise (docs/wire.md)."""
    body = rng.randbytes(rng.choice((0, 16, 40, 72, 200, 4096)))
    header = struct.pack("<8sHHI", b"te-wire\0", rng.randrange(20), rng.randrange(8), len(body))
    return header + body


def zmtp(message: bytes = b"", identity: bytes | None = None) -> bytes:
    """A greeting of ZMTP 3.1 without security (RFC 37) of a DEALER, who may claim a routing id, and
    a message, if there is one. A DEALER does not wait for the other side's greeting."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER")
    if identity is not None:
        ready += _property(b"Identity", identity)
    said = greeting + _frame(0x04, ready)
    return said + _frame(0, message) if message else said


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 0x02]) + struct.pack(">Q", len(body)) + body


def _dealer(rng: random.Random) -> bytes:
    return zmtp(rng.randbytes(rng.randrange(1, 255)))


def http(method: str, path: bytes, body: bytes = b"", *fields: bytes) -> bytes:
    """A request; more fields of its head as they stand there."""
    head = (method.encode() + b" " + path + b" HTTP/1.1", b"Host: x", *fields)
    return b"\r\n".join((*head, b"Content-Length: %d" % len(body), b"", body))


def _requests(rng: random.Random) -> bytes:
    path = rng.choice((b"/route", b"/register_dp_rank", b"/v1/instances", b"/" + b"a" * 4000))
    return http(
        rng.choice(("GET", "PUT", "POST", "DELETE")), path, rng.randbytes(rng.randrange(2000))
    )


SAYINGS: Final[tuple[Saying, ...]] = (_noise, _silence, _greeting, _dealer, _requests)


async def attack(
    host: str, ports: list[int], seed: int, lasts_s: float, sayings: Sequence[Saying] = SAYINGS
) -> int:
    """Says any of these to any of the ports. Returns how many connections were made."""
    made = 0
    until_s = time.monotonic() + lasts_s

    async def one(rng: random.Random) -> None:
        nonlocal made
        # `wait_for` loses a cancellation that comes with the answer (Python 3.11).
        while time.monotonic() < until_s:
            port, saying = rng.choice(ports), rng.choice(sayings)
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(_PATIENCE_S)
                continue
            made += 1
            try:
                writer.write(saying(rng))
                await asyncio.wait_for(reader.read(_MESSAGE_BYTES_MAX), _PATIENCE_S)
            except (OSError, TimeoutError):
                pass  # refused, or not answered: as it should be
            finally:
                writer.transport.abort()

    tasks = [asyncio.create_task(one(random.Random(seed + n))) for n in range(_AT_ONCE)]
    try:
        await asyncio.wait(tasks, timeout=lasts_s)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return made


def main(argv: list[str]) -> None:
    host, seconds, seed, *ports = argv
    made = asyncio.run(attack(host, [int(port) for port in ports], int(seed), float(seconds)))
    sys.stdout.write(str(made))


if __name__ == "__main__":
    main(sys.argv[1:])
