# SPDX-License-Identifier: Apache-2.0
"""Counters beside the truth: what was written, and what the kernel counted on the sockets, for
engines of two processes. (Over RDMA: tests/rdma/test_rdma_truth.py.)"""

from __future__ import annotations

import base64
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from te_far import FarEngine, pattern, wait_until
from wire_spec.table import HEADER, LIMITS

import te
from te.status import ask

TIMEOUT_S: Final = 60.0
NBYTES: Final = 4 << 20
SEGMENT_BYTES: Final = 1 << 20
#: Segments of small transfers are cut for more rails, down to this. Each has a header, the places
#: of its blocks, and a trailer.
SEGMENT_LEAST: Final = 256 << 10
LANDING_NBYTES: Final = 16
#: Four greetings for each connection, and of either side.
GREETING_NBYTES_MAX: Final = 4096
CONFIG: Final[dict[str, Any]] = {
    "transports": ("tcp",),
    "rails": 2,
    "segment_bytes": SEGMENT_BYTES,
    # A thread may stand still for seconds.
    "connect_timeout_s": TIMEOUT_S,
    "stall_timeout_s": TIMEOUT_S,
}
#: In struct tcp_info of linux/tcp.h: tcpi_bytes_acked, tcpi_bytes_received.
TCP_INFO_AT: Final = 120


@pytest.fixture
def far() -> Iterator[FarEngine]:
    one = FarEngine(**CONFIG)
    yield one
    one.end()


def sockets_of(ports: set[int]) -> dict[str, tuple[int, int]]:
    """Of this process's TCP connections with one of these ports: by both addresses, the bytes that
    the other side has acknowledged, and those received."""
    found = {}
    for fd in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # No socket, or the descriptor of the listing.
        with sock:
            try:
                here, there = sock.getsockname(), sock.getpeername()
            except OSError:
                continue  # It listens.
            if sock.family == socket.AF_INET and {here[1], there[1]} & ports:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                where = f"{here[0]}:{here[1]} → {there[0]}:{there[1]}"
                found[where] = struct.unpack_from("QQ", info, TCP_INFO_AT)
    return found


def overhead_max(nbytes: int, blocks: int, transfers: int) -> int:
    """Of one direction of one connection, above the payload."""
    frames = nbytes // SEGMENT_LEAST + transfers + blocks
    each = HEADER.nbytes + LIMITS["TRAILER_BYTES"]
    return GREETING_NBYTES_MAX + frames * each + (blocks + frames) * LANDING_NBYTES


@pytest.mark.slow
def test_bytes_counted_are_bytes_written_and_bytes_on_the_sockets(far: FarEngine) -> None:
    src, back = pattern(1, NBYTES), np.zeros(NBYTES, np.uint8)
    with te.Engine(te.Config(**CONFIG)) as near:
        near.register(src, remote="none")
        near.register(back, remote="read-write")
        address = far.register(nbytes=NBYTES, seed=2)
        peer = near.connect(far.bytes_card())
        far.expect(tag=1)
        sizes, at = [1, 70_000, NBYTES, 3, 300_000, NBYTES], [0, 5000, 200_000, 900_000]
        for nbytes in sizes:
            blocks = te.Blocks.of(src.ctypes.data, address, nbytes)
            assert peer.write(blocks, tag=1).wait(TIMEOUT_S) is te.Status.DONE
        offsets = np.array(at, np.uint64)
        scattered = te.Blocks.of(offsets + np.uint64(src.ctypes.data), offsets + address, 1000)
        assert peer.write(scattered, tag=1).wait(TIMEOUT_S) is te.Status.DONE
        written, transfers = sum(sizes) + 4000, len(sizes) + 1

        # And the other direction, over a link that the far engine opens.
        there = far.connect(card=base64.b64encode(near.card()).decode())
        near.expect(2)
        for _ in range(3):
            number = far.write(
                peer=there, src=address, dst=int(back.ctypes.data), nbytes=NBYTES, tag=2
            )
            assert far.outcome(number=number) == ["done", None]

        # What was planned, what was landed, and what each side has counted.
        far_counts = ask(Path(far.status_path()), "engine", timeout_s=TIMEOUT_S)
        mine, its = near.stats(), far_counts["stats"]
        assert (mine.bytes_sent, its["bytes_received"]) == (written, written)
        assert (mine.bytes_received, its["bytes_sent"]) == (3 * NBYTES, 3 * NBYTES)
        tcp = mine.by_transport["tcp"].outcomes
        assert (tcp.transfers_done, tcp.blocks_done) == (transfers, len(sizes) + 4)
        assert (tcp.transfers_landed, tcp.bytes_landed) == (3, 3 * NBYTES)
        assert its["by_transport"]["tcp"]["outcomes"]["transfers_landed"] == transfers
        assert far.arrived(tag=1) == transfers

        # What the kernel has counted on each socket, with what the protocol adds.
        near_port = near._acceptor.address[1]
        links = {one.is_incoming: one for one in near.links()}
        payloads = {rail.name: rail.flow.bytes_sent for rail in links[False].rails}
        wait_until(
            lambda: all(
                sockets_of({peer.address[1]})[name][0] >= payload
                for name, payload in payloads.items()
            ),
            "the last bytes are acknowledged",
        )
        kernel = sockets_of({peer.address[1], near_port})
        for rail in links[False].rails:
            acked, _ = kernel.pop(rail.name)
            payload = rail.flow.bytes_sent
            assert payload <= acked <= payload + overhead_max(payload, 4, transfers)
        received = sorted(n for _, n in kernel.values())
        counted = sorted(rail.flow.bytes_received for rail in links[True].rails)
        assert len(received) == len(counted) == CONFIG["rails"]
        for payload, got in zip(counted, received, strict=True):
            assert payload <= got <= payload + overhead_max(payload, 3, 3)


@pytest.mark.slow
def test_a_peer_counts_what_landed_before_the_source_died(far: FarEngine) -> None:
    """A process that ends in the middle: what landed is counted, and not more than was sent."""
    with te.Engine(te.Config(**CONFIG)) as near:
        dst = np.zeros(NBYTES, np.uint8)
        near.register(dst, remote="read-write")
        address = far.register(nbytes=NBYTES, seed=2)
        there = far.connect(card=base64.b64encode(near.card()).decode())
        near.expect(1)
        for _ in range(50):
            far.write(peer=there, src=address, dst=int(dst.ctypes.data), nbytes=NBYTES, tag=1)
        wait_until(lambda: near.stats().bytes_received > NBYTES, "bytes land")
        far.process.kill()
        wait_until(lambda: not near.links(), "the link has ended")
        counted = near.stats().by_transport["tcp"]
        landed, nbytes = near.arrived(1), near.arrived_nbytes(1)
        outcomes = counted.outcomes
        assert (outcomes.transfers_landed, outcomes.bytes_landed) == (landed, nbytes)
        assert nbytes == landed * NBYTES <= counted.bytes_received <= 50 * NBYTES
        assert sum(counted.links_ended.values()) == 1
