# SPDX-License-Identifier: Apache-2.0
"""Links over RDMA by hand, on devices that move nothing: what a peer on the wire can say and do."""

from __future__ import annotations

import contextlib
import errno
import itertools
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from te_far import is_readable
from te_frames import ALL_RIGHTS, FAR, HEADER, PIECE, AckStatus, Kind, header
from te_raw import (
    RAW_ID,
    TIMEOUT_S,
    dial,
    rdma_hello,
    rdma_welcome,
    read_exactly,
    read_greeting,
    said,
    take_hello,
)

import te
from te.connect.greeting import GreetingKind
from te.core.wire import RECEIVE_DEPTH
from te.handshake import (
    PROTOCOL_VERSION,
    Card,
    Welcome,
    decode_body,
    encode,
)
from te.transports.base import Transport
from te.transports.rdma.messages import (
    CardNic,
    RailAnswer,
    RailOffer,
    RdmaHello,
    RdmaOffer,
    RdmaWelcome,
)
from te.transports.rdma.transport import Rdma
from te.verbs.fabric import Fabric
from te_bench._null import Device, QueuePair, Wires
from te_bench.null_post import null_fabric

__all__ = [
    "DeviceEngine",
    "Frame",
    "NullEngine",
    "RawDirectDestination",
    "RawDirectListener",
    "RawDirectSource",
    "Refusing",
    "ask",
    "raw_direct_destination",
    "table",
    "word",
]

_links = itertools.count(1 << 40)


class NullEngine(te.Engine):
    """An engine whose RDMA devices move nothing."""

    def __init__(
        self, wires: Wires, nics: int = 2, region_bytes_max: int = 1 << 62, **config: Any
    ) -> None:
        self._null_fabric = null_fabric(wires, nics, region_bytes_max)
        super().__init__(te.Config(**{"transports": ("rdma",), "workers": 1} | config))

    def _transport(self, name: str) -> Transport:
        if name == "rdma":
            return Rdma(self._config, self._null_fabric)
        return super()._transport(name)


class Refusing(Device):
    """A device without dma-bufs, which refuses some memory altogether: in a kernel without
    nvidia-peermem, a GPU's."""

    refused = range(0)

    def register_dma_buf(self, *_: int) -> Any:
        raise OSError(errno.EOPNOTSUPP, "ibv_reg_dmabuf_mr: Operation not supported")

    def register(self, address: int, nbytes: int, **rights: bool) -> Any:
        if address in self.refused:
            raise OSError(errno.EFAULT, "ibv_reg_mr: Bad address")
        return super().register(address, nbytes, **rights)


class DeviceEngine(te.Engine):
    """With this one RDMA device."""

    ALL: ClassVar = ("rdma", "samehost", "tcp")

    def __init__(self, device: Device, transports: tuple[str, ...] = ALL) -> None:
        whole = null_fabric(Wires(), 1)
        nics = (replace(whole.nics[0], device=device),)
        self._fabric = Fabric(nics, whole._topology, (0,))
        super().__init__(
            te.Config(transports=transports, connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
        )

    def _transport(self, name: str) -> Any:
        return Rdma(self._config, self._fabric) if name == "rdma" else super()._transport(name)


class Frame(NamedTuple):
    """One that the engine has sent."""

    kind: Kind
    status: int
    flags: int
    transfer: int
    tag: int
    total: int
    body: bytes


def ask(transfer: int, pieces: int, total: int = 1 << 20, tag: int = 0) -> bytes:
    return header(Kind.ASK, transfer=transfer, count=pieces, total=total, tag=tag)


def word(kind: Kind, rail: int, epoch: int, items: list[tuple[int, int]], **fields: int) -> bytes:
    """RAIL_LOST, RAIL_CLOSED, RAIL_BROKEN or CREDIT, with transfers and pieces."""
    head = header(kind, transfer=rail, tag=epoch, count=len(items), **fields)
    return head + np.array(items, PIECE).tobytes()


def table(
    ranges: list[tuple[int, int]], first: bool = True, key: int = 1, rights: int = ALL_RIGHTS
) -> bytes:
    items = np.zeros(len(ranges), FAR)
    items["start"] = [start for start, _ in ranges]
    items["end"] = [end for _, end in ranges]
    items["rights"] = rights
    items["keys"] = key
    head = header(Kind.TABLE, flags=int(first), count=len(ranges), transfer=0)
    return head + items.tobytes()


def _width(kind: int) -> int:
    return {Kind.TABLE: FAR.itemsize, Kind.ASK: 0, Kind.ACK: 1}.get(kind, 16)  # type: ignore[call-overload,no-any-return]


class _Control:
    """The connection of a link, in frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        self.sock = sock
        self._come = bytearray()

    def send(self, *parts: bytes) -> None:
        self.sock.sendall(b"".join(parts))

    def frame(self) -> Frame | None:
        """The next one; None at the end of the stream."""
        data = read_exactly(self.sock, HEADER.size)
        if data is None:
            return None
        kind, status, flags, count, transfer, tag, _, total = HEADER.unpack(data)
        body = read_exactly(self.sock, count * _width(kind))
        return (
            None if body is None else Frame(Kind(kind), status, flags, transfer, tag, total, body)
        )

    def await_frame(self, kind: Kind) -> Frame:
        """The next of that kind; what comes before is dropped."""
        while True:
            frame = self.frame()
            assert frame is not None, f"no {kind.name} but the end"
            if frame.kind is kind:
                return frame

    def granted(self) -> int:
        """The mark of the next transfer that is granted."""
        frame = self.await_frame(Kind.ACK)
        assert frame.status == AckStatus.GRANTED, frame
        return frame.tag

    def closed(self) -> bool:
        """Waits until the engine has closed the connection."""
        while self.frame() is not None:
            pass
        return True

    def drain(self) -> list[Frame] | None:
        """All that has come by now; None at the end of the stream. Instead of the others."""
        while is_readable(self.sock, 0.0):
            more = self.sock.recv(1 << 16)
            if not more:
                return None
            self._come += more
        found = []
        while len(self._come) >= HEADER.size:
            kind, status, flags, count, transfer, tag, _, total = HEADER.unpack_from(self._come)
            end = HEADER.size + count * _width(kind)
            if len(self._come) < end:
                break
            body = bytes(self._come[HEADER.size : end])
            found.append(Frame(Kind(kind), status, flags, transfer, tag, total, body))
            del self._come[:end]
        return found

    def close(self) -> None:
        self.sock.close()


class RawDirectSource(_Control):
    """A welcomed link to an engine on null devices, without rails at first."""

    def __init__(self, card: bytes, wires: Wires) -> None:
        self._card, self._wires = card, wires
        self.link = next(_links)
        sock = dial(card)
        super().__init__(sock)
        self.send(rdma_hello(sock, card, link=self.link))
        greeting = read_greeting(sock)
        assert greeting is not None
        assert greeting.kind == GreetingKind.WELCOME

    def rail(self, index: int = 0, epoch: int = 1) -> QueuePair | None:
        """This side's end of a new rail; None when the engine wants none."""
        pair = Device(self._wires).queue_pair(1, 512, 1, 1 << 30)
        offer = RailOffer(
            rail=index, epoch=epoch, nic=0, remote_nic=0, gid=b"", remote_gid_index=0,
            number=pair.number,
        )  # fmt: skip
        with dial(self._card) as sock:
            sock.sendall(rdma_hello(sock, self._card, offer, link=self.link))
            greeting = read_greeting(sock)
        if greeting is None or greeting.kind != GreetingKind.WELCOME:
            return None
        answer = decode_body(decode_body(said(greeting), Welcome).body, RdmaWelcome).rail
        assert answer is not None
        with contextlib.suppress(OSError):  # The engine may have given its end up already.
            pair.connect(answer.number)
            return pair
        return None


class RawDirectDestination(_Control):
    """What a source on null devices believes to be an engine."""

    def __init__(
        self, sock: socket.socket, number: int, rails: dict[tuple[int, int], QueuePair]
    ) -> None:
        super().__init__(sock)
        self.number = number
        #: This side's ends of the rails, by (rail, epoch).
        self.rails = rails


class RawDirectListener:
    """Behind a card: takes every link and every rail that it is offered."""

    def __init__(self, wires: Wires, nics: int = 1) -> None:
        self._wires = wires
        self._links: queue.SimpleQueue[RawDirectDestination] = queue.SimpleQueue()
        #: This side's ends, by the number of the link.
        self._rails: dict[int, dict[tuple[int, int], QueuePair]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        nics_there = [
            CardNic(name=f"null{i}", family="ib", lid=i + 1, mtu=5, gids=[]) for i in range(nics)
        ]
        card = Card(
            protocol=PROTOCOL_VERSION,
            id=RAW_ID,
            epoch=1,
            host="127.0.0.1",
            port=self._listener.getsockname()[1],
            offers={"rdma": encode(RdmaOffer(nics=nics_there))},
            regions=[],
        )
        self.card = encode(card)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        self._listener.close()

    def connect(self, engine: te.Engine) -> tuple[te.Peer, RawDirectDestination]:
        """A new link of the engine's; the one before must have ended."""
        peer = engine.connect(self.card, TIMEOUT_S)
        return peer, self.next_link()

    def next_link(self) -> RawDirectDestination:
        """The next link that somebody has opened."""
        return self._links.get(timeout=TIMEOUT_S)

    def forget(self, link: RawDirectDestination) -> None:
        """It has ended."""
        link.close()
        del self._rails[link.number]

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        try:
            proven = take_hello(sock)
        except AssertionError:
            sock.close()
            return
        hello = proven.hello
        rail = decode_body(hello.body, RdmaHello).rail
        if rail is None:
            rails = self._rails[hello.link] = {}
            sock.sendall(rdma_welcome(proven))
            self._links.put(RawDirectDestination(sock, hello.link, rails))
            return
        with sock:
            known = self._rails.get(hello.link)
            if known is not None:
                sock.sendall(rdma_welcome(proven, _answer(self._wires, rail, known)))


@contextlib.contextmanager
def raw_direct_destination(
    wires: Wires, engine: te.Engine
) -> Iterator[tuple[te.Peer, RawDirectDestination]]:
    """The engine connected to a destination by hand."""
    with RawDirectListener(wires) as listener:
        peer, raw = listener.connect(engine)
        try:
            yield peer, raw
        finally:
            raw.close()


def _answer(wires: Wires, offer: RailOffer, rails: dict[tuple[int, int], QueuePair]) -> RailAnswer:
    pair = Device(wires).queue_pair(1, 1, RECEIVE_DEPTH, 1 << 30)
    with contextlib.suppress(OSError):  # The engine may have given its end up already.
        pair.connect(offer.number)
    pair.receive(RECEIVE_DEPTH)
    for key in [key for key in rails if key[0] == offer.rail]:
        del rails[key]
    rails[offer.rail, offer.epoch] = pair
    return RailAnswer(number=pair.number)
