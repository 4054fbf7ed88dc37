# SPDX-License-Identifier: Apache-2.0
"""One of a peer's connections is cut off, abruptly or silently, while the others live on."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from te_far import pattern, wait_until

import te
from te.handshake import decode_card, encode

TIMEOUT_S = 60.0
NBYTES = 64 << 20
PIECE_BYTES = 1 << 16


class Wire:
    """A connection that is passed on, until it is cut or held."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.ends = (near, far)
        self.passed = 0
        self.passes_max = math.inf
        self.held = threading.Event()
        self.released = threading.Event()
        self.threads = [
            threading.Thread(target=self._pass, args=ends, daemon=True)
            for ends in ((near, far), (far, near))
        ]
        for thread in self.threads:
            thread.start()

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(PIECE_BYTES):
                if self.held.is_set() or self.passed > self.passes_max:
                    self.released.wait()
                far.sendall(data)
                self.passed += len(data)
        for end in (near, far):  # The other direction must not wait for ever.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Both sides get a reset. Idempotent."""
        for end in self.ends:
            with contextlib.suppress(OSError):  # It is closed, or the other side has gone.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)
            end.close()
        self.released.set()


class Relay:
    """Stands between a source and an engine; every connection is a ``Wire``."""

    def __init__(self, card: bytes) -> None:
        decoded = decode_card(card)
        self._far = (decoded.host, decoded.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.card = encode(msgspec.structs.replace(decoded, port=port))
        self.wires: list[Wire] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.wires.append(Wire(near, socket.create_connection(self._far)))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(TIMEOUT_S)
        for wire in self.wires:
            wire.cut()
            for thread in wire.threads:
                thread.join(TIMEOUT_S)


@pytest.fixture
def relayed(request: pytest.FixtureRequest) -> Iterator[tuple[te.Engine, te.Engine, Relay]]:
    """A source, a target, and what is between them. The parameter: when silence is a stall."""
    stall_timeout_s = getattr(request, "param", TIMEOUT_S)
    config = te.Config(
        transports=("tcp",), rails=2, connect_timeout_s=TIMEOUT_S, stall_timeout_s=stall_timeout_s
    )
    with te.Engine(config) as source, te.Engine(config) as target:
        relay = Relay(target.card())
        yield source, target, relay
        relay.close()


def write_all(peer: te.Peer, src: te.Region, dst: te.Region, tag: int = 0) -> te.Transfer:
    return peer.write(te.Blocks.of(src.address, dst.address, src.nbytes), tag)


@pytest.mark.slow
@pytest.mark.parametrize("rail", [0, 1])
def test_a_cut_rail_fails_what_is_under_way_and_nothing_else(
    relayed: tuple[te.Engine, te.Engine, Relay], rail: int
) -> None:
    source, target, relay = relayed
    data, memory, other = pattern(1, NBYTES), np.zeros(NBYTES, np.uint8), np.zeros(100, np.uint8)
    src, dst = source.register(data), target.register(memory, remote="read-write")
    target.expect(9)
    with te.Engine(te.Config(transports=("tcp",))) as friend:
        friend_dst = friend.register(other, remote="read-write")
        friend_peer = source.connect(friend.card())
        peer = source.connect(relay.card)
        wait_until(lambda: len(relay.wires) == 2, "both rails are relayed")
        wire, other_wire = relay.wires[rail], relay.wires[1 - rail]
        # The rest is still under way when it is cut, however late that is; and what goes by the
        # other rail meanwhile is not all of the last transfer.
        wire.passes_max = wire.passed + (1 << 20)
        other_wire.passes_max = other_wire.passed + 2 * NBYTES
        transfers = [write_all(peer, src, dst, 9) for _ in range(4)]
        wait_until(lambda: wire.passed > wire.passes_max, "the rail carries bytes")
        wire.cut()
        with pytest.raises(te.TransferFailed, match=f"{target.id} .*(broke|clos|reset)"):
            transfers[-1].wait(TIMEOUT_S)
        outcomes = [transfer.poll() for transfer in transfers]
        assert set(outcomes) <= {te.Status.DONE, te.Status.FAILED}
        assert not peer.alive
        # Nobody else notices, and the memory can be had back on both sides.
        small = te.Blocks.of(src.address, friend_dst.address, 100)
        assert friend_peer.write(small).wait(TIMEOUT_S) is te.Status.DONE
        wait_until(lambda: target.stats().rails == 0, "the target has let the link go")
        # One more may have landed whose acknowledgement was cut off.
        assert outcomes.count(te.Status.DONE) <= target.fence(9, TIMEOUT_S) < len(transfers)
        memory[:] = 0
        # The same engine can be connected to at once.
        target.expect(10)
        again = source.connect(relay.card)
        assert write_all(again, src, dst, 10).wait(TIMEOUT_S) is te.Status.DONE
        assert target.arrived(10) == 1
        assert (memory == data).all()


@pytest.mark.slow
@pytest.mark.parametrize("relayed", [1.0], indirect=True)
def test_a_rail_that_goes_silent_is_found_within_the_deadline(
    relayed: tuple[te.Engine, te.Engine, Relay],
) -> None:
    source, target, relay = relayed
    data, memory = pattern(1, NBYTES), np.zeros(NBYTES, np.uint8)
    src, dst = source.register(data), target.register(memory, remote="read-write")
    peer = source.connect(relay.card)
    wait_until(lambda: len(relay.wires) == 2, "both rails are relayed")
    relay.wires[1].held.set()
    transfer = write_all(peer, src, dst)
    # Or by the kernel's deadline, twice as long, where the workers have not run meanwhile.
    said = "(no progress for 1.0 s|Connection timed out)"
    with pytest.raises(te.TransferFailed, match=f"{target.id} .*{said}"):
        transfer.wait(TIMEOUT_S)
    assert not peer.alive

    def is_carried() -> bool:
        """By a new link, on which a machine that stands still for a second is a stall, too."""
        again = write_all(source.connect(relay.card), src, dst)
        with contextlib.suppress(te.TransferFailed):
            again.wait(TIMEOUT_S)
        return again.poll() is te.Status.DONE

    wait_until(is_carried, "a new link carries it")
    assert (memory == data).all()
