# SPDX-License-Identifier: Apache-2.0
"""Strangers at all ports of a pair at once: `python -m soak_run.attack SPEC`, in JSON (`Attack`),
prints how many connections they have made (`Made`).

Some talk: each connection brings something, and is ended when it was answered, or after half a
second. Others stay: they begin something, and go on when they are sent away alone. What suits one
kind of port comes to all of them.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import random
import resource
import struct
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec
from chaos_run.stranger import SAYINGS, Saying, attack, http, zmtp
from cpu_serving.strangers import sayings

from bootstrap_server import InstanceConfig, KVFormat, Rank, RankCoords, RankRecord, Topology
from bootstrap_server.admission.secret import Keys
from kvstore.protocol import messages as store
from sglang_mooncake import messages as control
from sglang_mooncake.layout import ALONE, Buffers, Layout
from te.connect.greeting import GreetingKind, encode_greeting
from te.handshake import PROTOCOL_VERSION, Card, encode

__all__ = ["BEGINNINGS", "MORE", "Attack", "Made", "strangers"]

BOMB_BYTES: Final = 256 << 20
"""What becomes of a body of 255 kB when it is unpacked."""
PAUSE_S: Final = 0.5
_NO_NAME: Final = "nobody-{}.invalid"
_NOT_UTF_8: Final = b"\xff\xfe\xc0\x80"
_OTHERS: Final = Keys.from_secrets([b"0123456789abcdef-of-strangers"])


class Attack(msgspec.Struct, frozen=True):
    """staying: connections at each port whose other side has begun something."""

    host: str
    ports: list[int]
    seed: int
    lasts_s: float
    staying: int


class Made(msgspec.Struct):
    """Connections of those who talk, and of those who stay; and how many of the latter there were
    at most at a time."""

    talking: int = 0
    staying: int = 0
    at_a_time: int = 0


# --- what they say ---


@functools.cache
def _bomb() -> bytes:
    return gzip.compress(bytes(BOMB_BYTES))


def _bombs(rng: random.Random) -> bytes:
    path = rng.choice((b"/v1/instances/default/ranks", b"/route", b"/register_dp_rank", b"/health"))
    method = rng.choice(("PUT", "POST", "GET"))
    return http(method, path, _bomb(), b"Content-Encoding: gzip")


def _record(rng: random.Random) -> bytes:
    """Of a rank at a host whose name nobody knows, in an instance of its own: without a secret it
    is registered."""
    number = rng.randrange(20)
    config = InstanceConfig(Topology(1, 1, 1, 1), KVFormat(1, "float32"), protocol=1)
    rank = Rank(RankCoords(0, 0, 0, 0), _NO_NAME.format(number), 9, epoch=time.time_ns())
    body = msgspec.json.encode(RankRecord(config, rank))
    return http("PUT", b"/v1/instances/stranger-%d/ranks" % number, body)


def _hello(rng: random.Random) -> bytes:
    """Of a decode rank whose engine is at such a host."""
    card = Card(
        protocol=PROTOCOL_VERSION,
        id=f"{rng.getrandbits(128):032x}",
        epoch=time.time_ns(),
        host=_NO_NAME.format(rng.randrange(20)),
        port=9,
        offers={},
        regions=[],
    )
    nothing = Buffers((), (), ())
    layout = Layout(1, "float32", None, (), nothing, nothing)
    return zmtp(control.encode(control.Hello("a stranger", ALONE, encode(card), layout)))


def _abort(rng: random.Random) -> bytes:
    return zmtp(control.encode(control.RoomAbort(rng.getrandbits(62), 1, "a stranger's wish")))


def _claim(rng: random.Random) -> bytes:
    """A routing id as libzmq gives it to the next who comes, or one that is as long as can be."""
    numbered = b"\0" + struct.pack(">I", rng.choice((rng.randrange(64), rng.getrandbits(32))))
    return zmtp(rng.randbytes(20), rng.choice((numbered, rng.randbytes(255), b"")))


def _question(rng: random.Random) -> bytes:
    """To an owner of the store."""
    raw = store.encode(rng.choice((store.Greet(store.VERSION), store.Follow(0), store.Publish(1))))
    return zmtp(store.REQUEST_ID.pack(1) + raw)


def _text(rng: random.Random) -> bytes:
    """That is not UTF-8, wherever there can be text."""
    body = b'{"bootstrap_room": 1, "dp_rank": "' + _NOT_UTF_8 + b'"}'
    message = b"\x82\xa4type\xabroom_failed\xa6reason\xa4" + _NOT_UTF_8
    header = b"SGMK" + struct.pack("<H", control.PROTOCOL_VERSION)
    return rng.choice(
        (
            encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, _NOT_UTF_8 * 60),
            http("GET", b"/v1/instances/" + _NOT_UTF_8),
            http("GET", b"/route?prefill_dp_rank=" + _NOT_UTF_8),
            http("GET", b"/", b"", b"X-" + _NOT_UTF_8 + b": " + _NOT_UTF_8),
            http("POST", b"/register_dp_rank", body),
            http("PUT", b"/v1/instances/default/ranks", body),
            zmtp(header + message),
            zmtp(store.REQUEST_ID.pack(1) + b"\x92\x01\xa4" + _NOT_UTF_8),
        )
    )


def _huge(rng: random.Random) -> bytes:
    """Much is announced, and little comes."""
    some = rng.randbytes(50_000)
    endless = b"POST /register_dp_rank HTTP/1.1\r\nHost: x\r\n"
    return rng.choice(
        (
            zmtp() + b"\x02" + struct.pack(">Q", rng.choice((1 << 25, 1 << 40, 1 << 62))) + some,
            struct.pack("<8sHHI", b"te-wire\0", PROTOCOL_VERSION, 0, (1 << 32) - 1) + some,
            endless + b"Content-Length: 1000000000000000000\r\n\r\n" + some,
            endless + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n" + some,
        )
    )


def _of_tests() -> list[Saying]:
    """What servers of the tests hear, too."""
    kinds = ("registry", "control", "engine")
    return [one for kind in kinds for one in sayings(kind, Keys(), _OTHERS).values()]


MORE: Final[dict[str, Saying]] = {
    "bombs": _bombs,
    "records": _record,
    "hellos": _hello,
    "aborts": _abort,
    "claims": _claim,
    "questions": _question,
    "text": _text,
    "huge": _huge,
}

BEGINNINGS: Final[dict[str, bytes]] = {
    "silence": b"",
    "half a line": b"GET /v1/inst",
    "half a head": b"GET /v1/instances HTTP/1.1\r\nHost: x\r\nX-A: ",
    "half a body": http("PUT", b"/route", b"{" * 500)[:-400],
    "a long wait": http("GET", b"/v1/instances/stranger?wait_s=60"),
    "half a greeting of ZMTP": zmtp()[:20],
    "a socket of ZMTP": zmtp(),
    "a claim": zmtp(identity=b"\0\0\0\0\x07"),
    "half a frame": zmtp() + b"\x02" + struct.pack(">Q", 1 << 19) + bytes(1000),
    "half a greeting of te": struct.pack("<8sHHI", b"te-wire\0", PROTOCOL_VERSION, 0, 72),
}


# --- who says it ---


async def strangers(spec: Attack) -> Made:
    """Until their time is over. They have begun to stay before any begins to talk."""
    made, open_now = Made(), 0
    until_s = time.monotonic() + spec.lasts_s

    async def stay(port: int, beginning: bytes) -> None:
        nonlocal open_now
        while time.monotonic() < until_s:
            try:
                reader, writer = await asyncio.open_connection(spec.host, port)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            made.staying, open_now = made.staying + 1, open_now + 1
            made.at_a_time = max(made.at_a_time, open_now)
            try:
                writer.write(beginning)
                async with asyncio.timeout(until_s - time.monotonic()):
                    while await reader.read(1 << 16):
                        pass
            except (OSError, TimeoutError):
                pass  # sent away, or it is over
            finally:
                open_now -= 1
                writer.transport.abort()
            await asyncio.sleep(PAUSE_S)

    begins = list(BEGINNINGS.values())
    async with asyncio.TaskGroup() as group:
        for port in spec.ports:
            for number in range(spec.staying):
                group.create_task(stay(port, begins[number % len(begins)]))
        talk: Sequence[Saying] = (*SAYINGS, *_of_tests(), *MORE.values())
        left_s = until_s - time.monotonic()
        made.talking = await attack(spec.host, spec.ports, spec.seed, left_s, talk)
    return made


def main(text: str) -> Made:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return asyncio.run(strangers(msgspec.json.decode(text, type=Attack)))


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(main(sys.argv[1])).decode())
