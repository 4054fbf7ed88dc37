# SPDX-License-Identifier: Apache-2.0
"""Somebody who was not invited: connects to every port that a host listens on, and says things.
`python -m chaos_run.stranger HOST SECONDS SEED PORT…` prints how many connections were made."""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

__all__ = ["attack"]

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


def _zmtp(rng: random.Random) -> bytes:
    """A greeting of ZMTP 3.1 without security (RFC 37), then frames of noise."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    said = rng.randbytes(rng.randrange(1, 255))
    return greeting + b"\x04" + bytes([len(ready)]) + ready + b"\x00" + bytes([len(said)]) + said


def _http(rng: random.Random) -> bytes:
    path = rng.choice(("/route", "/register_dp_rank", "/v1/instances", "/" + "a" * 4000))
    method = rng.choice(("GET", "PUT", "POST", "DELETE"))
    body = rng.randbytes(rng.randrange(0, 2000))
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_SAYINGS: Final[tuple[Callable[[random.Random], bytes], ...]] = (
    _noise,
    _silence,
    _greeting,
    _zmtp,
    _http,
)


async def attack(host: str, ports: list[int], seed: int, lasts_s: float) -> int:
    """Returns how many connections were made."""
    made = 0
    until_s = time.monotonic() + lasts_s

    async def one(rng: random.Random) -> None:
        nonlocal made
        # `wait_for` loses a cancellation that comes with the answer (Python 3.11).
        while time.monotonic() < until_s:
            port, saying = rng.choice(ports), rng.choice(_SAYINGS)
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
