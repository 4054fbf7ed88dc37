# SPDX-License-Identifier: Apache-2.0
"""An independent peer: engines exchange data with a queue pair that Debian's pyverbs made.

The words between the two sides are said by hand here (``te_frames``), the bytes and their marks by
pyverbs (``pyverbs_far``).
"""

from __future__ import annotations

import base64
import json
import random
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from rdma_pair import PATIENT, TIMEOUT_S
from te_frames import HEADER, AckStatus, Kind, ack, header
from te_raw import (
    RAW_ID,
    RawSource,
    dial,
    raw_destination,
    rdma_hello,
    rdma_welcome,
    read_greeting,
    said,
    take_hello,
)
from testbed_nics import Nic

import te
from te.core.wire import NICS_LIMIT
from te.handshake import Welcome, decode_body, decode_card, encode
from te.memory import Remote
from te.topology import Gid, GidKind
from te.transports.rdma.messages import (
    CardNic,
    RailAnswer,
    RailOffer,
    RdmaHello,
    RdmaOffer,
    RdmaWelcome,
)

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.driver("rxe"),
    pytest.mark.usefixtures("patient_rails"),
]

PYTHON = "/usr/bin/python3"  # for which Debian has built pyverbs
GID_INDEX = 1  # rxe's address of IPv4
NBYTES = 3 << 20
PAGE = 4 << 10
MTU_1024 = 3
TABLE_FIRST = 1  # flag: what was told before is void
REM_INV_REQ_ERR, REM_ACCESS_ERR = 9, 10  # enum ibv_wc_status
FAR_KEYS = struct.Struct(f"<QQQ{NICS_LIMIT}I")
MAY_WRITE_TAGGED = 2


class PyverbsFar:
    """``far.op(**arguments)`` runs ``Far.op`` of ``pyverbs_far`` in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("pyverbs_far.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            text=True,
        )

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps([op, arguments]), file=self._process.stdin, flush=True)
            answer = select.poll()  # By select(2) no descriptor above 1023 can be waited for.
            answer.register(self._process.stdout, select.POLLIN)
            assert answer.poll(1000 * TIMEOUT_S), f"pyverbs does not answer {op}"
            value, error = json.loads(self._process.stdout.readline())
            assert error is None, f"{op}: {error}"
            return value

        return call

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def far() -> Iterator[PyverbsFar]:
    made = PyverbsFar()
    yield made
    made.end()


@pytest.fixture
def engine(rdma_nics: tuple[Nic, ...]) -> Iterator[te.Engine]:
    nics = (rdma_nics[0].device,)
    with te.Engine(te.Config(transports=("rdma",), nics=nics, **PATIENT)) as made:
        yield made


def take(sock: Any, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        assert more, "the engine closed the connection"
        data += more
    return data


def take_frame(sock: Any, kind: int) -> tuple[Any, ...]:
    """The next frame's header, which must be of that kind."""
    found = HEADER.unpack(take(sock, HEADER.size))
    assert found[0] == kind, found
    return found


@contextmanager
def connected(engine: te.Engine, far: PyverbsFar, device: str) -> Iterator[RawSource]:
    """A link to the engine by hand, with one rail, of which the near end is pyverbs'."""
    card = engine.card()
    number, gid, _, _ = far.open(device=device, gid_index=GID_INDEX, nbytes=NBYTES, seed=3)
    source = RawSource(card, "rdma", link=1 << 40)
    with closing(source.sock):
        near = next(
            one
            for one in decode_body(decode_card(card).offers["rdma"], RdmaOffer).nics[0].gids
            if one.index == GID_INDEX
        )
        offer = RailOffer(
            rail=0, epoch=1, nic=0, remote_nic=0, number=number, psn=11, lid=0, mtu=MTU_1024,
            gid=bytes.fromhex(gid), remote_gid_index=GID_INDEX,
        )  # fmt: skip
        with dial(card) as sock:
            sock.sendall(rdma_hello(sock, card, offer, link=1 << 40))
            greeting = read_greeting(sock)
            assert greeting is not None
            rail = decode_body(decode_body(said(greeting), Welcome).body, RdmaWelcome).rail
        assert rail is not None
        far.connect(number=rail.number, psn=rail.psn, near_psn=11, gid=near.raw.hex(), mtu=MTU_1024)
        yield source


def asked(source: RawSource, **fields: int) -> tuple[tuple[int, ...], int]:
    """Asks for transfer 1: the one range of memory that is told, and the mark that is granted."""
    source.send(header(Kind.ASK, transfer=1, **fields))
    table = take_frame(source.sock, Kind.TABLE)
    told = FAR_KEYS.unpack(take(source.sock, table[3] * FAR_KEYS.size))
    granted = take_frame(source.sock, Kind.ACK)
    assert granted[1] == AckStatus.GRANTED
    return told, granted[5]


def test_pyverbs_writes_into_an_engine(
    rdma_nics: tuple[Nic, ...], engine: te.Engine, far: PyverbsFar
) -> None:
    dst = np.zeros(NBYTES, np.uint8)
    engine.register(dst)
    engine.expect(7)
    with connected(engine, far, rdma_nics[1].device) as source:
        told, mark = asked(source, count=1, tag=7, total=NBYTES)
        start, end, rights, rkey, *_ = told
        assert (start, end) == (dst.ctypes.data, dst.ctypes.data + NBYTES)
        assert rights == MAY_WRITE_TAGGED
        far.write(address=start, rkey=rkey, nbytes=NBYTES)
        assert dst.tobytes() == random.Random(3).randbytes(NBYTES)
        assert engine.arrived(7) == 0
        far.mark(word=socket.htonl(mark))
        done = source.ack()
        assert (done.transfer, done.status) == (1, AckStatus.LANDED)
        assert engine.arrived(7) == 1


@pytest.mark.parametrize(("remote", "op"), [("read", "write"), ("tagged", "fetch")])
def test_the_device_refuses_what_a_region_does_not_allow(
    rdma_nics: tuple[Nic, ...], engine: te.Engine, far: PyverbsFar, remote: Remote, op: str
) -> None:
    """Whoever has its key."""
    memory = np.full(NBYTES, 9, np.uint8)
    engine.register(memory, remote=remote)
    engine.expect(7)
    with connected(engine, far, rdma_nics[1].device) as source:
        is_read = remote == "read"
        (start, _, _, rkey, *_), _ = asked(source, count=0 if is_read else 1, tag=7, total=NBYTES)
        allowed = far.fetch if is_read else far.write
        allowed(address=start, rkey=rkey, nbytes=PAGE)
        before = memory.copy()
        with pytest.raises(AssertionError, match=f"completion status {REM_ACCESS_ERR}"):
            getattr(far, op)(address=start, rkey=rkey, nbytes=2 * PAGE)
    assert (memory == before).all()


def test_an_engine_writes_into_pyverbs(
    rdma_nics: tuple[Nic, ...], engine: te.Engine, far: PyverbsFar
) -> None:
    src = np.random.default_rng(5).integers(0, 256, NBYTES, np.uint8)
    region = engine.register(src, remote="read-write")
    number, gid, address, rkey = far.open(
        device=rdma_nics[1].device, gid_index=GID_INDEX, nbytes=NBYTES, seed=None
    )
    nic = CardNic(
        name="pyverbs", family="roce", lid=0, mtu=MTU_1024,
        gids=[Gid(index=GID_INDEX, text=f"::ffff:{rdma_nics[1].address}", kind=GidKind.IPV4,
                  roce=2, netdev="")],
    )  # fmt: skip
    assert nic.gids[0].raw.hex() == gid
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        listener, plain = stack.enter_context(raw_destination())
        card = decode_card(plain)
        card = structs.replace(card, offers={"rdma": encode(RdmaOffer(nics=[nic]))})
        connected = pool.submit(engine.connect, encode(card), TIMEOUT_S)
        control = stack.enter_context(listener.accept()[0])
        proven = take_hello(control)
        assert proven.hello.transport == "rdma"
        control.sendall(rdma_welcome(proven))
        with listener.accept()[0] as sock:
            proven = take_hello(sock)
            offer = decode_body(proven.hello.body, RdmaHello).rail
            assert offer is not None
            far.connect(
                number=offer.number, psn=offer.psn, near_psn=12, gid=offer.gid.hex(),
                mtu=offer.mtu,
            )  # fmt: skip
            sock.sendall(rdma_welcome(proven, RailAnswer(number=number, psn=12, fences=0)))
        peer = connected.result(TIMEOUT_S)
        assert (peer.id, peer.transport, peer.rails) == (RAW_ID, "rdma", 1)
        assert far.marks(count=1) == [0]  # the probe

        at = np.arange(0, NBYTES, PAGE, dtype=np.uint64)
        blocks = te.Blocks.of(at + np.uint64(src.ctypes.data), at[::-1] + np.uint64(address), PAGE)
        transfer = peer.write(blocks, tag=9)
        asked = take_frame(control, Kind.ASK)
        _, _, _, pieces, name, tag, _, total = asked
        assert (tag, total) == (9, NBYTES)
        control.sendall(
            header(Kind.TABLE, flags=TABLE_FIRST, count=1, transfer=0)
            + FAR_KEYS.pack(
                address, address + NBYTES, MAY_WRITE_TAGGED, rkey, *[0] * (NICS_LIMIT - 1)
            )
            + header(Kind.ACK, status=AckStatus.GRANTED, transfer=name, tag=0x2A010000)
        )
        marks = [socket.ntohl(word) for word in far.marks(count=pieces)]
        landed = base64.b64decode(far.read(nbytes=NBYTES))
        assert sorted(marks) == [0x2A010000 + i for i in range(pieces)]
        pages = src.reshape(-1, PAGE)[::-1]
        assert landed == pages.tobytes()
        assert transfer.poll() is te.Status.PENDING
        control.sendall(ack(name, AckStatus.LANDED))
        assert transfer.wait(TIMEOUT_S) is te.Status.DONE

        # Though the region allows it, and with its key: this queue pair is for what goes out.
        assert region.registration is not None
        key = region.registration.regions[0].rkey
        with pytest.raises(AssertionError, match=f"completion status {REM_INV_REQ_ERR}"):
            far.write(address=region.address, rkey=key, nbytes=PAGE)
        assert src.reshape(-1, PAGE)[::-1].tobytes() == landed
