# SPDX-License-Identifier: Apache-2.0
"""Somebody who was not invited, at servers with a secret: finds all that their processes listen on,
and says to each what a stranger can say. Keeps what he hears."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bootstrap_server.admission.proof import HEADER, Claim, digest_of, prove_request
from bootstrap_server.admission.secret import Keys
from cpu_serving.servers import HOST
from te.connect.greeting import NONCE_BYTES, GreetingKind, encode_call, encode_greeting
from te.handshake import PROTOCOL_VERSION
from te.proof import keys_of

__all__ = ["Listener", "Process", "Stranger", "listeners", "of_group", "proved_request", "sayings"]

_LISTENS_TCP, _LISTENS_UNIX = "0A", "00010000"  # linux/tcp_states.h; __SO_ACCEPTCON of net.h
#: What he waits for an answer; and connections that he leaves open, silent, meanwhile.
_PATIENCE_S = 0.2
_KEPT = 1000
_AT_ONCE = 200
_ENGINE = "@te-"


class Process(NamedTuple):
    """What a process has."""

    pid: int
    descriptors: int
    rss_bytes: int


class Listener(NamedTuple):
    """A TCP port (of any address) or an abstract or named unix socket, as /proc/net/unix shows it;
    and a process that has it."""

    pid: int
    where: int | str


def of_group(group: int) -> list[Process]:
    """All processes of a server: they have its group."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if path.name.isdecimal() and int(fields[2]) == group:
                pages = int((path / "statm").read_text().split()[1])
                count = sum(1 for _ in (path / "fd").iterdir())
                found.append(Process(int(path.name), count, pages * os.sysconf("SC_PAGE_SIZE")))
    return found


def listeners(pids: Iterable[int]) -> list[Listener]:
    """All that these processes listen on."""
    owners: dict[str, int] = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                owners[str(path.readlink())] = pid
    found = []
    for name in ("tcp", "tcp6"):
        for row in _rows(f"/proc/net/{name}"):
            owner = owners.get(f"socket:[{row[9]}]")
            if row[3] == _LISTENS_TCP and owner is not None:
                found.append(Listener(owner, int(row[1].rpartition(":")[2], 16)))
    for row in _rows("/proc/net/unix"):
        owner = owners.get(f"socket:[{row[6]}]")
        if row[3] == _LISTENS_UNIX and owner is not None and len(row) > 7:
            found.append(Listener(owner, row[7]))
    return found


def _rows(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()[1:]]


# --- what he says ---

Saying = Callable[[random.Random], bytes]

_ANY: dict[str, Saying] = {
    "silence": lambda _: b"",
    "noise": lambda rng: rng.randbytes(rng.randrange(1, 8192)),
    "one byte": lambda rng: rng.randbytes(1),
}
_ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def sayings(kind: str, keys: Keys, others: Keys) -> dict[str, Saying]:
    """What strangers say to a port of the kind (registry, control, engine). Of `keys`, those of the
    deployment, he knows the names alone; `others` are his."""
    if kind == "registry":
        return _ANY | {
            "no proof": lambda _: _request("GET", "/v1/instances/default"),
            "wrong secret": lambda rng: proved_request(
                others, "GET", "/v1/instances/default", rng.randbytes(16)
            ),
            "a stock rank": lambda rng: _request("PUT", "/route", rng.randbytes(500)),
            "half a head": lambda _: b"GET /v1/instances HTTP/1.1\r\nHost: x\r\nX-A: ",
            "half a body": lambda _: _request("PUT", "/route", b"{" * 500)[:-400],
            "a huge head": lambda _: b"GET / HTTP/1.1\r\nX-A: " + b"a" * 60_000,
            "many heads": lambda _: b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
        }
    if kind == "control":
        ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        return _ANY | {
            "half a greeting": lambda rng: _ZMTP[: rng.randrange(1, 64)],
            "another mechanism": lambda _: _ZMTP.replace(b"CURVE", b"NULL\0") + ready,
            "a false hello": lambda rng: _ZMTP + b"\x04\xc8\x05HELLO\x01\x00" + rng.randbytes(192),
            "a huge frame": lambda _: (
                _ZMTP + b"\x06" + (1 << 25).to_bytes(8, "big") + bytes(50_000)
            ),
        }
    return _ANY | {
        "half a call": lambda rng: _call(keys, rng)[: rng.randrange(1, 56)],
        "wrong secret": lambda rng: _call(others, rng),
        "no secret": lambda rng: _call(Keys(), rng),
        "a hello that proves nothing": lambda rng: _call(keys, rng) + _hello(rng.randbytes(400)),
        "another version": lambda rng: encode_greeting(
            GreetingKind.CALL, PROTOCOL_VERSION + 1, rng.randbytes(200)
        ),
        "the other role": lambda rng: encode_greeting(
            GreetingKind.CHALLENGE, PROTOCOL_VERSION, rng.randbytes(72)
        ),
        "a hello at once": lambda rng: _hello(rng.randbytes(400)),
    }


def _request(method: str, path: str, body: bytes = b"", header: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def proved_request(keys: Keys, method: str, path: str, client: bytes) -> bytes:
    """Of a holder of these keys: the first of a client of that name."""
    claim = Claim(time.time_ns() // 1_000_000, client, 1, digest_of(None))
    proof = prove_request(keys.registry[0], method, path, claim)
    return _request(method, path, header=f"{HEADER}: {proof}\r\n")


def _call(keys: Keys, rng: random.Random) -> bytes:
    body = encode_call(rng.randbytes(NONCE_BYTES), keys_of(keys.data))
    return encode_greeting(GreetingKind.CALL, PROTOCOL_VERSION, body)


def _hello(body: bytes) -> bytes:
    return encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, body)


# --- who says it ---


@dataclass
class Stranger:
    """Attacks `targets`: where, and what kind of port that is."""

    targets: dict[int | str, str]
    keys: Keys
    others: Keys
    seed: int
    #: By kind and saying, and how often.
    heard: defaultdict[tuple[str, str], Counter[bytes]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    connections: int = 0
    _kept: list[socket.socket] = field(default_factory=list)

    def attack(self, count: int) -> None:
        """Makes so many connections."""
        asyncio.run(self._attack(count))

    async def _attack(self, count: int) -> None:
        rng = random.Random(self.seed)
        places = sorted(self.targets, key=str)
        said = {kind: sayings(kind, self.keys, self.others) for kind in self.targets.values()}
        turns = iter(range(count))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(self._come(turns, places, said, rng))
        finally:
            for sock in self._kept:
                sock.close()
            self._kept.clear()

    async def _come(
        self,
        turns: Iterable[int],
        places: list[int | str],
        said: dict[str, dict[str, Saying]],
        rng: random.Random,
    ) -> None:
        for turn in turns:
            place = places[turn % len(places)]
            kind = self.targets[place]
            name = list(said[kind])[turn // len(places) % len(said[kind])]
            sock = await _connect(place)
            self.connections += 1
            if name == "silence":
                self._kept.append(sock)
                if len(self._kept) > _KEPT:
                    self._kept.pop(0).close()
                continue
            with sock:
                self.heard[kind, name][await _say(sock, said[kind][name](rng))] += 1


async def _connect(place: int | str) -> socket.socket:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET if isinstance(place, int) else socket.AF_UNIX
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    address = (HOST, place) if isinstance(place, int) else f"\0{place.removeprefix('@')}"
    while True:
        try:
            await loop.sock_connect(sock, address)
        except BlockingIOError:  # the queue of a unix socket is full
            await asyncio.sleep(0.01)
        else:
            return sock


async def _say(sock: socket.socket, said: bytes) -> bytes:
    """Returns what comes back within his patience."""
    loop, heard = asyncio.get_running_loop(), b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            await loop.sock_sendall(sock, said)
            while part := await loop.sock_recv(sock, 1 << 16):
                heard += part
    return heard
