# SPDX-License-Identifier: Apache-2.0
"""Encrypted connections: the records by themselves, then engines with somebody on the way between
them. That transfers are as over plain TCP, the contract's tests show (te_contract.py)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import te_gcm
from te_far import pattern, wait_until

import te
from te.handshake import Card, decode_card, encode
from te.proof import Key, stream_secrets
from te.transports import registry
from te.transports.tcp import transport as tcp
from te_bench._wire import Records

A, B = bytes(range(32)), bytes(range(32, 64))
RECORD_BYTES = 64 << 10
pytestmark = pytest.mark.usefixtures("by_records")

KEYS = (pattern(3, 32).tobytes(),)
ENCRYPTED = te.Config(transports=("tcp",), keys=KEYS, encrypt=True, rails=1)
NBYTES = 1 << 20
TIMEOUT_S = 60.0
#: tcpi_state of a connection that has ended (linux/tcp.h, net/tcp_states.h).
TCP_CLOSE = 7


class Ends:
    """Two ends of a socket that encrypt towards each other, and a way to look and to meddle."""

    def __init__(self, rekey_records: int = 0, buffer_bytes: int = 1 << 20) -> None:
        self.here, self.there = socket.socketpair()
        for one in (self.here, self.there):
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.source = Records(self.here.fileno(), A, B, rekey_records)
        self.target = Records(self.there.fileno(), B, A, rekey_records)

    def send(self, text: bytes) -> bytes:
        """What is to be seen on the way; it does not arrive."""
        assert self.source.send(text) == len(text)
        return self.there.recv(1 << 20)

    def deliver(self, data: bytes) -> bytes:
        """What the other end makes of it."""
        self.here.sendall(data)
        room = bytearray(1 << 20)
        return bytes(room[: self.target.receive(room)])

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


# -- records


def test_the_other_implementation_is_right():
    """Test case 16 of the specification of GCM (McGrew and Viega)."""
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    text = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    aad = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    sealed = te_gcm.encrypt(key, bytes.fromhex("cafebabefacedbaddecaf888"), aad, text)
    assert sealed[-16:].hex() == "76fc6ece0f4e1768cddf8853bb2d551b"
    assert sealed[:8].hex() == "522dc1f099567d07"


def test_records_are_what_the_format_says():
    ends = Ends(rekey_records=3)
    try:
        for number in range(8):
            text = pattern(number, 1 + 7 * number).tobytes()
            assert ends.send(text) == te_gcm.record(A, number, 3, text)
    finally:
        ends.close()


@pytest.mark.parametrize("own", [True, False], ids=["own memory", "the application's"])
@pytest.mark.parametrize("rekey_records", [0, 2])
def test_a_stream_arrives_whatever_its_pieces(own: bool, rekey_records: int) -> None:
    chance, ends = random.Random(1), Ends(rekey_records, buffer_bytes=8 << 10)
    text, taken = pattern(4, 700_000).tobytes(), bytearray()
    offered = sent = 0
    try:
        while len(taken) < len(text):
            if sent < len(text):
                # Of what is not taken the same must be offered again, or more.
                offered = max(offered, min(sent + chance.randint(1, 200_000), len(text)))
                try:
                    sent += ends.source.send(text[sent:offered], own)
                except BlockingIOError:
                    assert offered > sent
            room = bytearray(chance.randint(1, 100_000))
            try:
                moved = ends.target.receive(room, own)
            except BlockingIOError:
                assert not ends.target.ready
                continue
            assert moved
            taken += room[:moved]
        assert taken == text
        assert not ends.target.ready
    finally:
        ends.close()


def test_what_the_socket_does_not_show_any_more_is_said_to_be_there(ends: Ends) -> None:
    text = ends.send(b"first") + ends.send(b"second")
    ends.here.sendall(text)
    assert not ends.target.ready
    room = bytearray(3)
    assert ends.target.receive(room) == 3
    assert ends.target.ready
    room = bytearray(100)
    assert ends.target.receive(room) == 8
    assert room[:8] == b"stsecond"
    assert not ends.target.ready
    ends.here.close()
    assert ends.target.receive(room) == 0


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


MEDDLING: dict[str, Callable[[Ends], bytes]] = {
    "a bit of the length": lambda ends: flipped(ends.send(b"x" * 40), 0) + bytes(64),
    "a bit of the text": lambda ends: flipped(ends.send(b"x" * 40), 9),
    "the last bit of the text": lambda ends: flipped(ends.send(b"x" * 40), 43),
    "a bit of the tag": lambda ends: flipped(ends.send(b"x" * 40), 59),
    "no length": lambda ends: bytes(100),
    "a length beyond all": lambda ends: b"\x01\x00\x01\x00" + bytes(100),
    "the second first": lambda ends: ends.send(b"a")[:0] + ends.send(b"b"),
    "what the other end has said": lambda ends: te_gcm.record(B, 0, 9, b"back"),
    "a record cut out of another": lambda ends: ends.send(b"x" * 40)[:30] + bytes(30),
}


@pytest.mark.parametrize("how", MEDDLING)
def test_a_record_that_was_meddled_with_is_refused_and_nothing_of_it_taken(
    ends: Ends, how: str
) -> None:
    data = MEDDLING[how](ends)
    room = bytearray(b"?" * 100)
    ends.here.sendall(data)
    for _ in range(2):  # for good
        with pytest.raises(OSError, match="Bad message") as caught:
            ends.target.receive(room)
        assert caught.value.errno == errno.EBADMSG
        assert room == b"?" * 100


def test_a_record_counts_once(ends: Ends) -> None:
    data = ends.send(b"pay")
    assert ends.deliver(data) == b"pay"
    with pytest.raises(OSError, match="Bad message") as caught:
        ends.deliver(data)
    assert caught.value.errno == errno.EBADMSG


def test_a_reset_behind_a_record_is_told_after_it() -> None:
    """A socket tells of it once, and then looks as if the other side had closed it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with here, there:
        there.setblocking(False)
        source, target = Records(here.fileno(), A, B), Records(there.fileno(), B, A)
        room = bytearray(1 << 20)
        assert source.send(b"the last words") == 14
        here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        here.close()
        wait_until(
            lambda: there.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE,
            "reset",
        )
        assert target.receive(room) == 14
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                target.receive(room)


def test_memory_of_the_application_that_has_vanished_is_an_error_and_no_crash(ends: Ends) -> None:
    """And no byte of the stream is lost by it."""
    # Below what the kernel ever maps (vm.mmap_min_addr).
    nowhere = np.ctypeslib.as_array((ctypes.c_uint8 * 100).from_address(4096))
    with pytest.raises(OSError, match="Bad address"):
        ends.source.send(nowhere, own=False)
    ends.here.sendall(ends.send(b"landing"))
    with pytest.raises(OSError, match="Bad address"):
        ends.target.receive(nowhere, own=False)
    assert ends.target.ready
    room = bytearray(7)
    assert ends.target.receive(room, own=False) == 7
    assert room == b"landing"


def test_each_connection_and_direction_has_secrets_of_its_own():
    session, other = Key(A), Key(B)
    found = {
        secret
        for key in (session, other)
        for hello in (bytes(32), bytes(31) + b"\1")
        for secret in stream_secrets(key, hello)
    }
    assert len(found) == 8


# -- engines


class Way:
    """Somebody between a source and the engine of a card: sees all, and may change it."""

    def __init__(self, card: bytes) -> None:
        decoded = decode_card(card)
        self._target = (decoded.host, decoded.port)
        self._listener = socket.create_server((decoded.host, 0))
        self.card = encode(replaced(decoded, port=self._listener.getsockname()[1]))
        self.seen = {True: bytearray(), False: bytearray()}
        #: Gets each piece, and whether it goes to the destination; what it returns goes on.
        self.change: Callable[[bytes, bool], bytes] = lambda data, forth: data
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for one, other, forth in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._pass, args=(one, other, forth), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, one: socket.socket, other: socket.socket, forth: bool) -> None:
        while True:
            try:
                data = one.recv(1 << 16)
                self.seen[forth] += data
                other.sendall(self.change(data, forth))
            except OSError:
                data = b""
            if not data:
                for end in (one, other):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                return

    def close(self) -> None:
        for one in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for one in (self._listener, *self._ends):
            one.close()


def replaced(card: Card, **fields: object) -> Card:
    return msgspec.structs.replace(card, **fields)


class Pair:
    def __init__(self, config: te.Config) -> None:
        config = replace(config, connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
        self.target, self.source = te.Engine(config), te.Engine(config)
        self.src, self.dst = pattern(5, NBYTES), np.zeros(NBYTES, np.uint8)
        self.source.register(self.src, remote="read-write")
        self.target.register(self.dst, remote="read-write")
        self.way = Way(self.target.card())

    def write(self) -> te.Transfer:
        blocks = te.Blocks.of(self.src.ctypes.data, self.dst.ctypes.data, NBYTES)
        return self.peer.write(blocks)

    def close(self) -> None:
        self.way.close()
        self.source.close()
        self.target.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(getattr(request, "param", ENCRYPTED))
    made.peer = made.source.connect(made.way.card)
    yield made
    made.close()


PLAIN = replace(ENCRYPTED, encrypt=False)


@pytest.mark.parametrize("pair", [ENCRYPTED, PLAIN], indirect=True, ids=["encrypted", "plain"])
def test_who_listens_sees_the_bytes_only_in_plain(pair: Pair) -> None:
    assert pair.write().wait(TIMEOUT_S) is te.Status.DONE
    assert (pair.src == pair.dst).all()
    is_seen = pair.src[5000:5064].tobytes() in pair.way.seen[True]
    assert is_seen is not pair.peer.is_encrypted
    assert len(pair.way.seen[True]) > NBYTES


@pytest.mark.parametrize("forth", [True, False], ids=["of the source", "of the destination"])
def test_a_bit_that_is_changed_on_the_way_ends_the_link_and_does_not_land(
    pair: Pair, forth: bool
) -> None:
    passed = [0]

    def change(data: bytes, is_forth: bool) -> bytes:
        if is_forth is forth:
            before, passed[0] = passed[0], passed[0] + len(data)
            at = (NBYTES // 2 if forth else 8) - before
            if 0 <= at < len(data):
                return flipped(data, at)
        return data

    pair.way.change = change
    transfer = pair.write()
    with pytest.raises(te.TransferFailed) as caught:
        transfer.wait(TIMEOUT_S)
    wait_until(lambda: not pair.peer.alive, "the link has ended")
    if not forth:
        assert "an encrypted record that its engine did not send here, or not so" in str(
            caught.value
        )
    landed = pair.dst == pair.src
    assert (pair.dst[~landed] == 0).all()
    assert forth is not landed.all()


def test_nobody_takes_the_encryption_away(pair: Pair) -> None:
    card = decode_card(pair.way.card)
    stripped = encode(replaced(card, offers=card.offers | {"tcp": b""}))
    with te.Engine(ENCRYPTED) as other, pytest.raises(te.ConnectError, match="encrypts and"):
        other.connect(stripped)


@pytest.mark.parametrize("encrypts", [True, False], ids=["the source", "the destination"])
def test_one_that_encrypts_and_one_that_does_not_say_so(encrypts: bool) -> None:
    here, there = (ENCRYPTED, PLAIN) if encrypts else (PLAIN, ENCRYPTED)
    who = "this engine encrypts and the other" if encrypts else "the other engine encrypts and this"
    with te.Engine(here) as source, te.Engine(there) as target:
        with pytest.raises(te.TransportMismatch, match=f"{who}.*give both the same"):
            source.connect(target.card())
        # Nor does the destination believe a card that somebody has changed.
        card = decode_card(target.card())
        lie = tcp._RECORDS if encrypts else b""
        with pytest.raises(te.ConnectError, match=r"encrypts and .* does not; give both the same"):
            source.connect(encode(replaced(card, offers=card.offers | {"tcp": lie})))


# -- settings


def test_to_encrypt_takes_keys():
    with pytest.raises(ValueError, match="encrypt=True needs keys"):
        te.Config(encrypt=True)


def test_a_transport_that_cannot_encrypt_is_left_out(caplog, monkeypatch):
    capabilities = registry.load("samehost").capabilities
    monkeypatch.setattr(
        registry.load("samehost"), "capabilities", replace(capabilities, is_private=False)
    )
    with te.Engine(replace(ENCRYPTED, transports=("samehost", "tcp"))) as engine:
        assert engine.stats().transports == ("tcp",)
    assert "the engine does not use samehost, because it cannot encrypt" in caplog.text
    with pytest.raises(te.DeviceError, match=r"samehost cannot encrypt, and Config\.encrypt asks"):
        te.Engine(replace(ENCRYPTED, transports=("samehost",)))


def test_rdma_does_not_encrypt():
    private = {name for name in registry.NAMES if registry.load(name).capabilities.is_private}
    assert private == {"tcp", "samehost"}


def test_without_libcrypto_nothing_is_sent_in_plain(monkeypatch):
    monkeypatch.setattr(tcp, "has_libcrypto", lambda: False)
    with pytest.raises(te.DeviceError, match="it cannot encrypt: there is no libcrypto"):
        te.Engine(ENCRYPTED)
    te.Engine(PLAIN).close()
