# SPDX-License-Identifier: Apache-2.0
"""The rails really carry it: shares by the devices' own counters, and more rails are faster."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from rdma_stream import NEVER_S, Stream, device_of, rail_of, two_engines
from testbed_nics import Nic, cut, shaped, wait_for

import te

pytestmark = pytest.mark.rdma

TRANSFERS = 3
RUNS = 8
WINDOW_S = 3.0
#: For each rail: transfers that last longer than the window, at 0.75 a second, also if this process
#: stands still within it.
FILL = 24
#: Once so much has passed, a link that may send 0.5 MB at once does not any more.
SPENT_NBYTES = 2 << 20
# A soft device has up to half a megabyte under way, which the queue must hold; and a testbed that
# has to wait for a CPU of its host loses no capacity of its links in a burst (80 ms) of that size.
TBF = ("tbf", "rate", "50mbit", "burst", "512kb", "latency", "800ms")
# A tenth of what a soft device carries beside three others on an idle host: less than a third on a
# busy one, too, where rates begin to count, and more than the sixteenth that is the least.
SLOW = ("tbf", "rate", "20mbit", "burst", "256kb", "latency", "400ms")
LEARNING = 12  # transfers that it may take to find that out


def lo_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_rail_carries_its_share_and_tcp_nothing(
    rdma_nics: tuple[Nic, ...], count: int
) -> None:
    """One of a few rounds: a rail that the testbed's CPU leaves waiting sends packets again, or has
    pieces taken from it by the others."""
    count = min(count, len(rdma_nics) // 2)
    near, far = rdma_nics[:count], rdma_nics[count : 2 * count]
    with two_engines(near, far) as engines:
        stream = Stream(*engines)
        tags, other = itertools.count(1), lo_bytes()
        rounds: list[npt.NDArray[np.int64]] = []
        share = TRANSFERS * stream.nbytes / count
        while not rounds or (len(rounds) < RUNS and not np.allclose(rounds[-1], share, rtol=0.15)):
            before = carried(stream, near, far)
            for tag in itertools.islice(tags, TRANSFERS):
                stream.once(tag)
            rounds.append(carried(stream, near, far) - before)
        assert np.allclose(rounds[-1], share, rtol=0.15), (rounds, share)
        assert lo_bytes() - other < len(rounds) * TRANSFERS * stream.nbytes / 100


@pytest.mark.driver("rxe")  # siw counts nothing by itself; its interfaces do, in the test above
def test_the_devices_count_packets_that_carry_all_of_it(rdma_nics: tuple[Nic, ...]) -> None:
    near, far = rdma_nics[0], rdma_nics[1]
    with two_engines([near], [far]) as engines:
        stream = Stream(*engines)
        packets = stream.nbytes / 4096  # the largest path MTU of RoCE
        most = 1.15 * packets  # in one of a few transfers: packets may be sent again
        rounds: list[tuple[int, int]] = []
        while not rounds or (len(rounds) < RUNS and max(rounds[-1]) > most):
            before = near.hardware_counter("sent_pkts"), far.hardware_counter("rcvd_pkts")
            stream.once(len(rounds) + 1)
            sent = near.hardware_counter("sent_pkts") - before[0]
            rounds.append((sent, far.hardware_counter("rcvd_pkts") - before[1]))
        assert min(map(min, rounds)) >= packets
        assert max(rounds[-1]) <= most, (rounds, packets)


def test_slow_rails_add_up(rdma_nics: tuple[Nic, ...]) -> None:
    """With each link at 50 Mbit/s four rails are at least 3.6 times as fast as one.

    The best of a few runs: the testbed has one CPU, which a busy host lends to others.
    """
    count = min(4, len(rdma_nics) // 2)
    one = rate(rdma_nics, 1)
    rates: list[float] = []
    while len(rates) < RUNS and max(rates, default=0.0) < 0.9 * count * one:
        rates.append(rate(rdma_nics, count))
    assert max(rates) >= 0.9 * count * one, f"{rates} over {count} rails, {one} over one"


def test_a_slow_rail_gets_what_it_carries(rdma_nics: tuple[Nic, ...]) -> None:
    """The first transfer, before anything was measured, is spread equally. Later ones do not wait
    for the slow rail: one of a few, since the testbed has one CPU, which a busy host lends to
    others."""
    count = min(4, len(rdma_nics) // 2)
    near, far = rdma_nics[:count], rdma_nics[count : 2 * count]
    with shaped(near[0].netdev, *SLOW), two_engines(near, far) as engines:
        stream = Stream(*engines)
        equal_s = duration_s(stream, 1)
        assert done(stream, near) == pytest.approx([stream.nbytes / count] * count, rel=0.5)
        tags = itertools.count(2)
        while not is_slow(stream, near):
            tag = next(tags)
            assert tag < LEARNING, stream.peer.stats().rails
            stream.begin(tag).wait(60)
        seen: list[str] = []
        for tag in itertools.islice(tags, RUNS):
            before = carried(stream, near, far)
            took_s = duration_s(stream, tag)
            taken, sent, _ = carried(stream, near, far) - before
            seen.append(f"{taken} taken, {sent} sent; {took_s} s ({equal_s} s)")
            share = 0.6 * stream.nbytes / count
            if max(taken[0], sent[0]) < share and took_s < 0.6 * equal_s:
                return
    pytest.fail("\n".join(seen))


def test_a_rail_that_was_slow_is_tried_again(rdma_nics: tuple[Nic, ...]) -> None:
    """Also when the transfers are so small that it would never be the first to be done."""
    near, far = rdma_nics[:2], rdma_nics[2:4]
    with two_engines(near, far) as engines:
        stream = Stream(*engines)
        tags = itertools.count(1)
        with shaped(near[0].netdev, *SLOW):
            while not is_slow(stream, near):
                stream.begin(next(tags)).wait(60)
        before = done(stream, near)[0]
        until_s = time.monotonic() + 60
        # It is believed to be fast again before it carries anything.
        while (
            is_slow(stream, near) or done(stream, near)[0] == before
        ) and time.monotonic() < until_s:
            stream.begin(next(tags)).wait(60)
        assert not is_slow(stream, near), stream.peer.stats().rails
        assert done(stream, near)[0] > before


@pytest.mark.parametrize("location", ["*", None])
def test_memory_uses_the_devices_of_its_location(
    rdma_nics: tuple[Nic, ...], tmp_path: Path, location: str | None
) -> None:
    """Where it is not told, this machine has one node. With no device of the location left, the
    others carry on."""
    count = len(rdma_nics) // 2
    near, far = rdma_nics[:count], rdma_nics[count : 2 * count]
    used, unused = near[: count // 2], near[count // 2 :]
    names = {"*": [nic.device for nic in used], "cpu:0": [nic.device for nic in unused]}
    if location is None:
        used, unused = unused, used
    file = tmp_path / "topology.json"
    file.write_text(json.dumps({place: [row] for place, row in names.items()}))
    # Rails that are silent for a while are not given up: the others would carry something.
    with two_engines(near, far, topology=file, rail_timeout_s=NEVER_S) as engines:
        stream = Stream(*engines, location=location)
        wire = [nic.wire_bytes("tx") for nic in unused]
        for tag in range(1, TRANSFERS + 1):
            stream.once(tag)
        assert done(stream, unused) == [0] * len(unused)
        for nic, old in zip(unused, wire, strict=True):
            assert nic.wire_bytes("tx") - old < stream.nbytes / 100
        assert sum(done(stream, used)) == TRANSFERS * stream.nbytes
        with ExitStack() as stack:
            for nic in used:
                stack.enter_context(cut(nic.netdev))
            for tag in range(TRANSFERS + 1, TRANSFERS + 3):
                stream.once(tag)
            assert sum(done(stream, unused)) > stream.nbytes


def test_a_topology_names_the_devices_of_an_engine(
    rdma_nics: tuple[Nic, ...], tmp_path: Path
) -> None:
    count = len(rdma_nics) // 2
    near, far = rdma_nics[:count], rdma_nics[count : 2 * count]
    used, unused = near[1:], near[:1]
    file = tmp_path / "topology.json"
    file.write_text(json.dumps({"*": [[nic.device for nic in used]]}))
    with two_engines(near, far, topology=file, rail_timeout_s=NEVER_S) as engines:
        stream = Stream(*engines)
        wire = [nic.wire_bytes("tx") for nic in unused]
        stream.once(1)
        assert {device_of(rail) for rail in stream.peer.stats().rails} == {
            nic.device for nic in used
        }
        for nic, old in zip(unused, wire, strict=True):
            assert nic.wire_bytes("tx") - old < stream.nbytes / 100


def is_slow(stream: Stream, nics: tuple[Nic, ...]) -> bool:
    """Whether the first rail was found to be slower than the others: by more than a factor of 3
    (`speeds_of` in te/transports/rdma/balance.pxd)."""
    rates = [rail_of(stream.peer, nic).bytes_per_s for nic in nics]
    return 3 * rates[0] < max(rates)


def duration_s(stream: Stream, tag: int) -> float:
    """How long one transfer takes."""
    began_s = time.monotonic()
    stream.begin(tag).wait(60)
    return time.monotonic() - began_s


def carried(stream: Stream, near: tuple[Nic, ...], far: tuple[Nic, ...]) -> npt.NDArray[np.int64]:
    """Bytes that the near devices have taken, have sent, and that the far ones have received, so
    far: shape (3, devices)."""
    sent = [nic.wire_bytes("tx") for nic in near]
    return np.array([done(stream, near), sent, [nic.wire_bytes("rx") for nic in far]])


def done(stream: Stream, nics: tuple[Nic, ...]) -> list[int]:
    """Bytes that have left by each device."""
    return [rail_of(stream.peer, nic).flow.bytes_sent for nic in nics]


def rate(nics: tuple[Nic, ...], count: int) -> float:
    """Bytes per second over so many rails, each slowed, while all of them have work: what it takes
    them to begin and to end together is not the links' rate."""
    near, far = nics[:count], nics[count : 2 * count]
    with ExitStack() as stack:
        for nic in near:
            stack.enter_context(shaped(nic.netdev, *TBF))
        stream = Stream(*stack.enter_context(two_engines(near, far, stall_timeout_s=60.0)))

        def total() -> int:
            return sum(rail.flow.bytes_sent for rail in stream.peer.stats().rails)

        transfers = [stream.begin(tag) for tag in range(1, 1 + count * FILL)]
        wait_for(lambda: total() >= count * SPENT_NBYTES, 60, "what a burst lets through")
        # In this order: standing still in between makes the rate too low, never too high.
        began_s, before = time.monotonic(), total()
        time.sleep(WINDOW_S)
        nbytes, ended_s = total() - before, time.monotonic()
        assert transfers[-1].poll() is te.Status.PENDING, "there was not enough to carry"
        return nbytes / (ended_s - began_s)
