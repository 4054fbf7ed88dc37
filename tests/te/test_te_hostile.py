# SPDX-License-Identifier: Apache-2.0
"""Sources that are broken, of another version, late or lying, written with raw sockets."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from te_far import wait_until
from te_frames import (
    HEADER,
    LANDING,
    AckStatus,
    Kind,
    abandon,
    ack,
    descriptors,
    end,
    header,
    segment,
    trailer,
)
from te_raw import (
    TIMEOUT_S,
    RawSource,
    dial,
    hello,
    read_greeting,
    said,
    take_challenge,
)

import te
from te.connect.greeting import MAGIC, Greeting, GreetingKind, encode_greeting
from te.handshake import PROTOCOL_VERSION, Refuse, decode_body, decode_card, encode

NBYTES = 1 << 20


class Target:
    """An engine with memory, and a well-behaved peer to see that it still serves."""

    def __init__(self, engine: te.Engine, friend: te.Engine, transport: str) -> None:
        self.transport = transport
        self.engine = engine
        self.memory = np.zeros(NBYTES, np.uint8)
        self.base = int(self.memory.ctypes.data)
        self.region = engine.register(self.memory, remote="read-write")
        self.card = engine.card()
        self._source = np.full(8, 7, np.uint8)
        friend.register(self._source)
        self._friend = friend.connect(self.card)

    def assert_serves(self) -> None:
        blocks = te.Blocks.of(self._source.ctypes.data, self.base + NBYTES - 8, 8)
        assert self._friend.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        assert (self.memory[-8:] == 7).all()
        self.memory[-8:] = 0


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    config = te.Config(connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
    with te.Engine(config) as engine, te.Engine(config) as friend:
        yield Target(engine, friend, getattr(request, "param", "tcp"))


on_both = pytest.mark.parametrize("target", ["tcp", "samehost"], indirect=True)


@contextlib.contextmanager
def raw_source(target: Target) -> Iterator[RawSource]:
    source = RawSource(target.card, target.transport)
    with source.sock:
        yield source


def half_a_segment(target: Target, source: RawSource, tag: int) -> None:
    """Sends a segment for all of the memory, and half of its payload; waits until that landed."""
    before = target.engine.stats().bytes_received
    source.send(segment(1, tag, [(target.base, NBYTES)], NBYTES), b"\1" * (NBYTES // 2))
    wait_until(
        lambda: target.engine.stats().bytes_received == before + NBYTES // 2, "half has landed"
    )
    assert (target.memory[: NBYTES // 2] == 1).all()
    target.memory[:] = 0


# -- revoking in the middle of a segment: the rest of it must not land


def finish(source: RawSource, tag: int) -> tuple[AckStatus, str]:
    source.send(b"\1" * (NBYTES // 2), trailer())
    ack = source.ack()
    return ack.status, ack.reason


@on_both
def test_fence_in_the_middle_of_a_segment(target: Target) -> None:
    target.engine.expect(8)
    with raw_source(target) as source:
        half_a_segment(target, source, 8)
        assert target.engine.fence(8, TIMEOUT_S) == 0
        # A new use of the same value is not open to a transfer of the old one.
        target.engine.expect(8)
        status, reason = finish(source, 8)
        assert (status, reason) == (AckStatus.REFUSED, "the tag 0x8 was fenced")
        assert not target.memory.any()
        assert target.engine.arrived(8) == 0
        source.send(end(2, 8))
        assert source.ack().status is AckStatus.LANDED
        assert target.engine.arrived(8) == 1


@on_both
def test_fence_between_the_last_payload_and_its_trailer(target: Target) -> None:
    target.engine.expect(8)
    with raw_source(target) as source:
        half_a_segment(target, source, 8)
        source.send(b"\1" * (NBYTES // 2))
        wait_until(lambda: target.memory[-1] == 1, "landed")
        target.engine.fence(8, TIMEOUT_S)
        source.send(trailer())
        assert source.ack().status is AckStatus.REFUSED


@on_both
def test_deregister_in_the_middle_of_a_segment(target: Target) -> None:
    with raw_source(target) as source:
        half_a_segment(target, source, 0)
        target.engine.deregister(target.region, TIMEOUT_S)
        status, reason = finish(source, 0)
        assert status is AckStatus.REFUSED
        assert "deregistered meanwhile" in reason
        assert not target.memory.any()
        target.engine.register(target.memory, remote="read-write")
    target.assert_serves()


@on_both
def test_registered_anew_in_the_middle_of_a_segment(target: Target) -> None:
    with raw_source(target) as source:
        half_a_segment(target, source, 0)
        target.engine.deregister(target.region, TIMEOUT_S)
        target.engine.register(target.memory, remote="read-write")
        status, reason = finish(source, 0)
        assert (status, "deregistered meanwhile" in reason) == (AckStatus.REFUSED, True)
        assert not target.memory.any()


def test_deregister_one_of_two_touching_regions_in_the_middle_of_a_segment() -> None:
    memory = np.zeros(NBYTES, np.uint8)
    base, half = int(memory.ctypes.data), NBYTES // 2
    with te.Engine() as engine:
        engine.register(base, half, remote="read-write")
        upper = engine.register(base + half, half, remote="read-write")
        source = RawSource(engine.card())
        with source.sock:
            source.send(segment(1, 0, [(base, NBYTES)], NBYTES), b"\1" * 1000)
            wait_until(lambda: engine.stats().bytes_received == 1000, "landed")
            engine.deregister(upper, TIMEOUT_S)
            source.send(b"\1" * (NBYTES - 1000), trailer())
            assert source.ack().status is AckStatus.REFUSED
            assert not memory[1000:].any()


@on_both
def test_other_registrations_do_not_disturb_a_segment(target: Target) -> None:
    with raw_source(target) as source:
        half_a_segment(target, source, 0)
        target.engine.register(bytearray(100))
        assert finish(source, 0)[0] is AckStatus.LANDED
        assert (target.memory[NBYTES // 2 :] == 1).all()


@on_both
def test_abandon_is_confirmed_and_does_not_arrive(target: Target) -> None:
    target.engine.expect(8)
    with raw_source(target) as source:
        source.send(segment(1, 8, [(target.base, 4)], 4, total=9), b"abcd", trailer())
        source.send(abandon(1, 8, sent=4))
        assert source.ack().status is AckStatus.ABANDONED
        assert target.engine.arrived(8) == 0


# -- greetings


@pytest.mark.parametrize("at", ["call", "hello"])
def test_greetings_of_another_version(
    target: Target, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it reads first says which one this is."""
    with caplog.at_level(logging.WARNING), dial(target.card) as sock:
        if at == "call":
            sock.sendall(encode_greeting(GreetingKind.CALL, PROTOCOL_VERSION + 1, b"?"))
        else:
            sock.sendall(hello(sock, target.card, version=PROTOCOL_VERSION + 1))
        assert read_greeting(sock) == Greeting(PROTOCOL_VERSION, GreetingKind.REFUSE, b"")
        assert sock.recv(1) == b""
    assert f"it speaks te protocol {PROTOCOL_VERSION + 1}" in caplog.text
    target.assert_serves()


@pytest.mark.parametrize("changes", [{"peer_epoch": 3}, {"peer_id": "12" * 16}])
def test_hello_for_another_engine(
    target: Target, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), dial(target.card) as sock:
        sock.sendall(hello(sock, target.card, **changes))
        assert read_greeting(sock) == Greeting(PROTOCOL_VERSION, GreetingKind.REFUSE, b"")
        assert sock.recv(1) == b""
    assert "its hello is for the engine" in caplog.text


def test_connecting_with_the_card_of_a_former_engine(target: Target) -> None:
    card = decode_card(target.card)
    former = encode(msgspec.structs.replace(card, id="12" * 16))
    with (
        te.Engine() as source,
        pytest.raises(te.ConnectError, match=r"not prove to be the engine 1212.*restarted"),
    ):
        source.connect(former)
    with (
        te.Engine() as source,
        pytest.raises(te.ConnectError, match="offers smoke, this one samehost, rdma, tcp"),
    ):
        source.connect(encode(msgspec.structs.replace(card, offers={"smoke": b""})))


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(1000), b"\xff" * 100_000, MAGIC + b"\xff" * 100],
)
def test_garbage_instead_of_a_hello(
    target: Target, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), dial(target.card) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(garbage)
        assert read_greeting(sock) is None
    assert "broke the protocol" in caplog.text
    target.assert_serves()


@pytest.mark.slow
def test_silence_instead_of_a_hello() -> None:
    with te.Engine(te.Config(connect_timeout_s=3.0)) as engine, te.Engine() as friend:
        target = Target(engine, friend, "tcp")
        with dial(target.card) as sock:
            take_challenge(sock, target.card)
            assert sock.recv(1) == b""
        target.assert_serves()


@pytest.mark.slow
@on_both
@pytest.mark.parametrize(
    ("frames", "says"),
    [
        (lambda base: segment(1, 0, [(base, 5)], 6), "6 bytes with blocks of 5 bytes"),
        (lambda base: b"\0" * HEADER.size, "kind 0"),
        (lambda base: ack(1, AckStatus.LANDED), "1, acknowledged as LANDED, is not waiting"),
        (lambda base: header(Kind.END, total=9), "END has total 9, which must be 0"),
        (lambda base: end(2) + end(1), "1 comes after 2"),
        (lambda base: end(1) * 2, "1 comes after 1"),
        (
            lambda base: (
                segment(1, 0, [(base, 1)], 1, 2)
                + b"x"
                + trailer()
                + segment(1, 0, [(base, 2)], 2, 2)
            ),
            "transfer 1 of 2 bytes comes with 3",
        ),
        (
            lambda base: (
                segment(1, 0, [(base, 1)], 1, 2)
                + b"x"
                + trailer()
                + segment(1, 0, [(base, 1)], 1, 3)
            ),
            "transfer 1 with tag 0 and 3 bytes began with tag 0 and 2 bytes",
        ),
        (
            lambda base: segment(1, 0, [(base, 1)], 1, 3) + b"x" + trailer() + abandon(1, 0, 0),
            "given up with fewer bytes than were sent",
        ),
        (lambda base: header(Kind.END, flags=1), "END has flags 1, which must be 0"),
        (lambda base: header(Kind.END, status=1), "END has status 1, which must be 0"),
        (lambda base: header(Kind.END, count=3), "END has count 3, which must be 0"),
        (lambda base: header(Kind.SEGMENT, nbytes=10, total=10), "count 0, which must be between"),
        (lambda base: header(Kind.SEGMENT, count=1021, nbytes=1 << 20), "between 1 and 1020"),
        (
            lambda base: header(Kind.SEGMENT, count=1, nbytes=(64 << 20) + 1),
            "nbytes 67108865, which must be between 1 and 67108864",
        ),
        (lambda base: header(Kind.SEGMENT, count=2, nbytes=1), "at least its count, 2"),
        (lambda base: segment(1, 0, [(base, 0), (base, 9)], 9), "with a block of 0 bytes"),
        (
            lambda base: segment(1, 0, [(base, 2**64 - 1), (base, 9)], 8),
            "with a block of 18446744073709551615 bytes",
        ),
        (lambda base: header(Kind.ACK, status=4), "unknown status 4"),
        (lambda base: header(Kind.ACK, status=1, count=512), "between 0 and 511"),
        (lambda base: ack(1, AckStatus.REFUSED, b"\xff"), "not printable ASCII"),
    ],
)
def test_protocol_violations_end_only_their_connection(
    target: Target,
    frames: Callable[[int], bytes],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), raw_source(target) as source:
        source.send(frames(target.base))
        while source.sock.recv(1 << 16) != b"":
            pass
    wait_until(lambda: says in caplog.text, f"logged: {says}")
    assert not target.memory[1:].any()
    target.assert_serves()


def test_one_source_leaves_room_for_others() -> None:
    with te.Engine(te.Config(max_connections=4, transports=("tcp",))) as engine:
        card, decoded = engine.card(), decode_card(engine.card())
        held = [RawSource(card, link=1 + i) for i in range(3)]
        with dial(card) as sock:
            sock.sendall(hello(sock, card, link=9))
            answer = read_greeting(sock)
            assert answer is not None
            refused = decode_body(said(answer), Refuse)
            assert refused.reason == "3 connections of 127.0.0.1 are open already"
        address, there = (decoded.host, decoded.port), ("127.0.0.2", 0)
        with socket.create_connection(address, TIMEOUT_S, there) as sock:
            sock.sendall(hello(sock, card, link=10))
            answer = read_greeting(sock)
            assert answer is not None
            assert answer.kind == GreetingKind.WELCOME
        for one in held:
            one.sock.close()


def test_connections_are_bounded() -> None:
    with te.Engine(te.Config(max_connections=2)) as engine:
        card = engine.card()
        one, two = RawSource(card), RawSource(card)
        with te.Engine() as source, pytest.raises(te.ConnectError, match="2 connections are open"):
            source.connect(card)
        one.sock.close()
        wait_until(lambda: engine.stats().rails == 1, "one is gone")
        three = RawSource(card)
        for source_of_two in (two, three):
            source_of_two.sock.close()


def test_a_source_that_reads_no_acknowledgements_is_not_read_from(target: Target) -> None:
    with raw_source(target) as source:
        source.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        source.sock.setblocking(False)
        sent, number = 0, 1
        data = b""
        with contextlib.suppress(BlockingIOError):
            while sent < 64 << 20:
                if not data:
                    data = b"".join(end(number + i, 5) for i in range(1000))
                    number += 1000
                taken = source.sock.send(data)
                sent, data = sent + taken, data[taken:]
        assert sent < 64 << 20, "the engine took everything and kept its answers in memory"
        target.assert_serves()


@contextlib.contextmanager
def memory_that_vanishes(engine: te.Engine, nbytes: int) -> Iterator[int]:
    """The address of registered memory that cannot be accessed any more.

    Protected rather than unmapped, so that nothing else can be mapped there meanwhile.
    """
    with mmap.mmap(-1, nbytes) as memory:
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        engine.register(address, nbytes, remote="read-write")
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0) == 0
        yield address


@on_both
def test_source_memory_that_vanished_fails_only_its_transfer(target: Target) -> None:
    nbytes = 1 << 18
    config = te.Config(
        segment_bytes=1 << 16, transports=(target.transport,), connect_timeout_s=TIMEOUT_S,
        stall_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    with (
        te.Engine(config) as source,
        memory_that_vanishes(source, nbytes) as address,
    ):
        kept = source.register(bytearray(b"\5" * 100))
        peer = source.connect(target.card)
        first_of_many = peer.write(te.Blocks.of(address, target.base, nbytes))
        only_one = peer.write(te.Blocks.of(address, target.base, 100))
        behind_good = peer.write(
            te.Blocks.of([kept.address, address], [target.base, target.base + 200], 100)
        )
        elsewhere = NBYTES // 2
        good = peer.write(te.Blocks.of(kept.address, target.base + elsewhere, 100))
        # Small blocks go through the rings on the same host.
        offsets = np.arange(1000, dtype=np.uint64) * 100
        many_small = peer.write(te.Blocks.of(address + offsets, target.base + offsets, 99))
        for lost in (first_of_many, only_one, behind_good, many_small):
            with pytest.raises(te.TransferFailed, match="memory cannot be read: Bad address"):
                lost.wait(TIMEOUT_S)
        assert good.wait(TIMEOUT_S) is te.Status.DONE
        assert (target.memory[elsewhere : elsewhere + 100] == 5).all()


def test_source_memory_that_vanished_behind_many_blocks_writes_no_further() -> None:
    """What is sent in place of the large block takes dozens of pieces, and a frame of that many
    blocks has room for three more."""
    nbytes, small_n, small = 64 << 20, 1019, 1 << 10
    config = te.Config(
        segment_bytes=64 << 20, transports=("tcp",), rails=1, connect_timeout_s=TIMEOUT_S,
        stall_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    with (
        te.Engine(config) as target,
        te.Engine(config) as source,
        memory_that_vanishes(source, nbytes) as address,
    ):
        room = np.empty(nbytes + 2 * small_n * small, np.uint8)
        base = int(room.ctypes.data)
        target.register(room, remote="read-write")
        kept = source.register(np.full(small_n * small, 5, np.uint8))
        offsets = np.arange(small_n, dtype=np.uint64) * small
        blocks = te.Blocks.of(
            np.append(kept.address + offsets, np.uint64(address)),
            # Apart, so that they are not merged.
            np.append(base + 2 * offsets, np.uint64(base + 2 * small_n * small)),
            np.append(np.full(small_n, small, np.uint64), np.uint64(nbytes)),
        )
        peer = source.connect(target.card())
        with pytest.raises(te.TransferFailed, match="memory cannot be read: Bad address"):
            peer.write(blocks).wait(TIMEOUT_S)
        good = te.Blocks.of(kept.address, base, small)
        assert peer.write(good).wait(TIMEOUT_S) is te.Status.DONE


@on_both
def test_target_memory_that_vanished_fails_only_its_transfer(target: Target) -> None:
    with memory_that_vanishes(target.engine, 1 << 18) as address, raw_source(target) as source:
        source.send(segment(1, 0, [(address, 1000)], 1000), bytes(1000))
        answer = source.ack()
        assert answer.status is AckStatus.REFUSED
        assert "cannot be written: Bad address" in answer.reason
        source.send(trailer(), end(2))
        assert source.ack().status is AckStatus.LANDED


def test_a_reader_that_acknowledges_nothing_does_not_keep_memory_in_use() -> None:
    with te.Engine(te.Config(stall_timeout_s=0.5)) as target:
        region = target.register(bytearray(100), remote="read-write")
        source = RawSource(target.card())
        with source.sock:
            source.send(descriptors(Kind.READ, 1, [(region.address, 1, 100)]))
            reply = HEADER.size + LANDING.itemsize + 100 + len(trailer())
            assert isinstance(source.sock, socket.socket)
            assert len(source.sock.recv(reply, socket.MSG_WAITALL)) == reply
            assert source.closed()
        wait_until(lambda: target.stats().rails == 0, "the link has ended")
        target.deregister(region, TIMEOUT_S)
