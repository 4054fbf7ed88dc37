# SPDX-License-Identifier: Apache-2.0
"""Destinations that misbehave, written with raw sockets: what a source makes of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from te_contract import cancel
from te_far import wait_until
from te_frames import (
    BLOCK,
    HEADER,
    LANDING,
    REPLY,
    AckStatus,
    Kind,
    ack,
    end,
    header,
    segment,
    trailer,
)
from te_raw import CHALLENGE, TIMEOUT_S, raw_destination, read_greeting, take_hello, welcome

import te
from te.connect.dial import DIALS_MAX
from te.connect.greeting import (
    GREETING,
    MAGIC,
    GreetingKind,
    Proven,
    encode_greeting,
    seal_answer,
)
from te.handshake import PROTOCOL_VERSION, Refusal, Refuse, encode
from te.proof import NO_KEY, PROOF_BYTES

#: What a destination by hand says to a good hello.
Answer = Callable[[Proven], bytes]


@contextlib.contextmanager
def connected_to_raw(
    config: te.Config,
) -> Iterator[tuple[te.Engine, te.Peer, socket.socket]]:
    """A real source that believes to be connected to an engine."""
    with raw_destination() as (listener, card), te.Engine(config) as source:
        peers: list[te.Peer] = []
        thread = threading.Thread(target=lambda: peers.append(source.connect(card, TIMEOUT_S)))
        thread.start()
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(TIMEOUT_S)
            sock.sendall(welcome(take_hello(sock)))
            thread.join(TIMEOUT_S)
            yield source, peers[0], sock


def sealed(kind: GreetingKind, body: bytes) -> Answer:
    """A greeting that proves to be an answer."""
    return lambda proven: encode_greeting(
        kind, PROTOCOL_VERSION, seal_answer(kind, body, proven)[0]
    )


def another(proven: Proven) -> Proven:
    """As if the hello had been another one."""
    return dataclasses.replace(proven, proof=bytes(PROOF_BYTES))


REFUSE = Refuse(code=Refusal.LIMIT, reason="no room")
ANSWERS: list[tuple[Answer, type[te.Error], str]] = [
    (lambda _: encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, b""), te.HandshakeError,
     "without a proof"),
    (sealed(GreetingKind.REFUSE, encode(REFUSE)), te.ConnectError, "refused .* no room"),
    (lambda _: encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, encode(REFUSE)),
     te.HandshakeError, "without a proof"),
    (lambda proven: welcome(another(proven)), te.HandshakeError, "without a proof"),
    (lambda proven: welcome(proven)[:-1] + b"x", te.HandshakeError, "without a proof"),
    (lambda _: encode_greeting(GreetingKind.WELCOME, PROTOCOL_VERSION, b""),
     te.HandshakeError, "without a proof"),
    (lambda proven: welcome(proven, version=99), te.VersionError, "speaks te protocol 99"),
    (lambda _: b"HTTP/1.1 400 Bad Request\r\n", te.HandshakeError, "not a te engine"),
    (sealed(GreetingKind.WELCOME, b"?"), te.HandshakeError, "Welcome"),
    (sealed(GreetingKind.REFUSE, b"?"), te.HandshakeError, "Refuse"),
    (sealed(GreetingKind.HELLO, b"?"), te.HandshakeError, "kind 1"),
    (lambda _: GREETING.pack(MAGIC, PROTOCOL_VERSION, 2, 1 << 31), te.HandshakeError, "at most"),
    (lambda _: b"", te.ConnectError, "closed the connection instead of a welcome"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "error", "says"), ANSWERS)
def test_answers_to_a_hello(answer: Answer, error: type[te.Error], says: str) -> None:
    with raw_destination() as (listener, card), te.Engine() as source:

        def reply() -> None:
            for _ in range(DIALS_MAX if "instead of" in says else 1):
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(answer(take_hello(sock)))

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(error, match=says):
            source.connect(card, TIMEOUT_S)
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize(
    ("beginning", "error", "says"),
    [
        (encode_greeting(GreetingKind.CHALLENGE, 99, CHALLENGE), te.VersionError, "te protocol 99"),
        (encode_greeting(GreetingKind.REFUSE, 99, b""), te.VersionError, "te protocol 99"),
        (encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, bytes(71)),
         te.HandshakeError, "71 bytes instead of a challenge"),
        (encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, bytes(73)),
         te.HandshakeError, "73 bytes instead of a challenge"),
        (encode_greeting(GreetingKind.WELCOME, PROTOCOL_VERSION, bytes(72)),
         te.HandshakeError, "kind 2 and 72 bytes instead of a challenge"),
        (encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, b"x"),
         te.HandshakeError, "kind 3 and 1 bytes instead of a challenge"),
        (encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, b""), te.ConnectError,
         "closed the connection: it has keys, and this engine has none; give both the same secret"),
        (encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, bytes(72)), te.ConnectError,
         "does not prove to be the engine abab.* of the card: it was restarted"),
        (encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, NO_KEY.id + bytes(64)),
         te.ConnectError, "does not prove to be the engine abab.* of the card: it was restarted"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", te.HandshakeError, "not a te engine"),
    ],
)  # fmt: skip
def test_what_comes_instead_of_a_challenge(
    beginning: bytes, error: type[te.Error], says: str
) -> None:
    with raw_destination() as (listener, card), te.Engine() as source:
        heard: list[bytes] = []

        def begin() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(TIMEOUT_S)
                read_greeting(sock)
                sock.sendall(beginning)
                with contextlib.suppress(ConnectionResetError):  # It left bytes unread.
                    heard.append(sock.recv(1))

        thread = threading.Thread(target=begin)
        thread.start()
        with pytest.raises(error, match=says):
            source.connect(card, TIMEOUT_S)
        thread.join(TIMEOUT_S)
        assert not b"".join(heard)  # Nothing was said to it but the call.


def test_no_answer_and_nobody_there() -> None:
    with raw_destination() as (listener, card), te.Engine() as source:
        with pytest.raises(te.ConnectError, match=r"did not answer within 0.05 s"):
            source.connect(card, timeout_s=0.05)
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        with pytest.raises(te.ConnectError, match=f"{where}: Connection refused"):
            source.connect(card)


def test_the_queue_is_bounded() -> None:
    with connected_to_raw(te.Config(max_queued_transfers=3, stall_timeout_s=TIMEOUT_S)) as (
        source,
        peer,
        _,
    ):
        region = source.register(bytearray(10))
        blocks = te.Blocks.of(region.address, 1, 10)
        transfers = [peer.write(blocks) for _ in range(3)]
        with pytest.raises(te.QueueFull, match="3 unfinished transfers"):
            peer.write(blocks)
        peer.close()
        for transfer in transfers:
            with pytest.raises(te.TransferFailed):
                transfer.wait(TIMEOUT_S)
        source.deregister(region)


@pytest.mark.slow
def test_cancel_before_the_first_byte_and_without_confirmation() -> None:
    with connected_to_raw(te.Config(stall_timeout_s=3.0)) as (source, peer, _):
        buffer = np.zeros(64 << 20, np.uint8)
        region = source.register(buffer)
        big = peer.write(te.Blocks.of(region.address, 1, region.nbytes))
        small = peer.write(te.Blocks.of(region.address, 1, 1))
        small.cancel()
        assert small.wait(TIMEOUT_S) is te.Status.CANCELLED
        big.cancel()
        # Or by the kernel's deadline, twice as long, where the worker has not run meanwhile.
        said = r"(no progress for 3.0 s|Connection timed out)"
        says = rf"cancelling could not be confirmed: .* {said}"
        with pytest.raises(te.TransferFailed, match=says):
            big.wait(TIMEOUT_S)
        assert not peer.alive


def test_deregistration_waits_for_a_cancelled_transfer() -> None:
    """As SGLang takes memory back right after it has aborted what is sent from there."""
    with (
        connected_to_raw(te.Config(stall_timeout_s=TIMEOUT_S)) as (source, peer, sock),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        region = source.register(bytearray(10))
        transfer = peer.write(te.Blocks.of(region.address, 1, 10))
        assert sock.recv(HEADER.size + LANDING.itemsize + 10 + len(trailer()), socket.MSG_WAITALL)
        transfer.cancel()
        with pytest.raises(te.RegistrationError, match="1 unfinished transfers read from"):
            source.deregister(region, timeout_s=0.01)
        left = pool.submit(source.deregister, region, TIMEOUT_S)
        lock = source._memory._lock
        wait_until(lambda: lock.locked() or left.done(), "it waits")
        sock.sendall(ack(1, AckStatus.LANDED))
        left.result(TIMEOUT_S)
        with pytest.raises(te.RegistrationError, match="is not registered"):
            source.deregister(region)


def test_words_of_progress_do_not_keep_memory_in_use() -> None:
    """A destination that takes a transfer, never answers it, and goes on to speak of others."""
    with connected_to_raw(te.Config(stall_timeout_s=0.5)) as (source, peer, sock):
        region = source.register(bytearray(10))
        transfer = peer.write(te.Blocks.of(region.address, 1, 10))
        ends_s = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(OSError):
            while transfer.poll() is te.Status.PENDING and time.monotonic() < ends_s:
                sock.sendall(header(Kind.ACK, status=AckStatus.PROGRESS, transfer=77, nbytes=1))
        wait_until(lambda: not peer.alive, "its link has ended")
        assert time.monotonic() < ends_s
        with pytest.raises(te.TransferFailed, match=r"no progress for 0.5 s"):
            transfer.wait(TIMEOUT_S)
        source.deregister(region)


def test_the_progress_of_later_transfers_does_not_keep_an_earlier_one_waiting() -> None:
    with connected_to_raw(te.Config(stall_timeout_s=0.5)) as (source, peer, sock):
        region = source.register(bytearray(10))
        blocks = te.Blocks.of(region.address, 1, 10)
        first = peer.write(blocks)
        number, ends_s = 1, time.monotonic() + TIMEOUT_S
        wanted = HEADER.size + LANDING.itemsize + 10 + len(trailer())
        with contextlib.suppress(OSError):
            while first.poll() is te.Status.PENDING and time.monotonic() < ends_s:
                number += 1
                peer.write(blocks)
                if not sock.recv(wanted, socket.MSG_WAITALL):
                    break
                if number > 2:
                    sock.sendall(ack(number - 1, AckStatus.LANDED))
        wait_until(lambda: not peer.alive, "its link has ended")
        assert time.monotonic() < ends_s
        with pytest.raises(te.TransferFailed, match=r"no progress for 0.5 s"):
            first.wait(TIMEOUT_S)


def test_answers_to_a_read_land_where_it_asked_for_them_and_nowhere_else() -> None:
    with connected_to_raw(te.Config(stall_timeout_s=TIMEOUT_S)) as (source, peer, sock):
        memory = np.zeros(1000, np.uint8)
        start = source.register(memory, remote="read-write").address
        # Two of these touch, and are one range for the answer.
        good = te.Blocks.of([1, 1, 1], [start + 10, start, start + 500], 10)
        for answer, at in enumerate((5, 500, 15, 490, 990), 1):
            read = peer.read(good)
            said = sock.recv(HEADER.size + 3 * BLOCK.itemsize, socket.MSG_WAITALL)
            number = HEADER.unpack_from(said)[4]
            frame = segment(answer, number, [(start + at, 10)], 10, total=30, flags=REPLY)
            sock.sendall(frame + b"\7" * 10 + trailer())
            if answer < 3:
                wait_until(lambda: (memory[at : at + 10] == 7).all(), "it lands")  # noqa: B023
                cancel(read)
                continue
            says = f"10 bytes at {start + at:#x} lie outside the ranges that the read is for"
            with pytest.raises(te.TransferFailed, match=says):
                read.wait(TIMEOUT_S)
            refused = sock.recv(HEADER.size, socket.MSG_WAITALL)
            sock.recv(HEADER.unpack(refused)[3], socket.MSG_WAITALL)
        assert (np.flatnonzero(memory) == [*range(5, 15), *range(500, 510)]).all()
        assert peer.alive


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ack(77, AckStatus.LANDED), "transfer 77, acknowledged as LANDED"),
        (ack(1, AckStatus.LANDED) * 2, "transfer 1, acknowledged as LANDED"),
        (header(Kind.ACK, status=AckStatus.PROGRESS, nbytes=1), "transfer 1, acknowledged as PROG"),
        (end(1), "kind 17 is not expected"),
        (b"", "closed the connection"),
    ],
)
def test_wrong_acknowledgements(answer: bytes, says: str) -> None:
    with connected_to_raw(te.Config(stall_timeout_s=TIMEOUT_S)) as (source, peer, sock):
        region = source.register(bytearray(10))
        first = peer.write(te.Blocks.of(region.address, 1, 10))
        second = peer.write(te.Blocks.of(region.address, 1, 10))
        wanted = 2 * (HEADER.size + LANDING.itemsize + 10 + len(trailer()))
        while wanted:
            wanted -= len(sock.recv(wanted))
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(te.TransferFailed, match=says):
            second.wait(TIMEOUT_S)
        assert first.poll() is not te.Status.PENDING
