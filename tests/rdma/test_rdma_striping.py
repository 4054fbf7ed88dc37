# SPDX-License-Identifier: Apache-2.0
"""The rails really carry it: shares by the devices' own counters, and more rails are faster."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from rdma_stream import Stream, rail_of, two_engines
from testbed_nics import Nic, shaped, wait_for

import te

pytestmark = pytest.mark.rdma

TRANSFERS = 3
RUNS = 4
WINDOW_S = 3.0
#: For each rail: transfers that last longer than the window, at 1.5 a second.
FILL = 8
#: Once so much has passed, a link that may send 0.5 MB at once does not any more.
SPENT_NBYTES = 2 << 20
# A soft device has up to half a megabyte under way, which the queue must hold; and a testbed that
# has to wait for a CPU of its host loses no capacity of its links in a burst (40 ms) of that size.
TBF = ("tbf", "rate", "100mbit", "burst", "512kb", "latency", "400ms")


def lo_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_rail_carries_its_share_and_tcp_nothing(
    rdma_nics: tuple[Nic, ...], count: int
) -> None:
    count = min(count, len(rdma_nics) // 2)
    near, far = rdma_nics[:count], rdma_nics[count : 2 * count]
    with two_engines(near, far) as engines:
        stream = Stream(*engines)
        before = [nic.wire_bytes("tx") for nic in near], [nic.wire_bytes("rx") for nic in far]
        other = lo_bytes()
        for tag in range(1, TRANSFERS + 1):
            stream.once(tag)
        total = TRANSFERS * stream.nbytes
        sent = [nic.wire_bytes("tx") - old for nic, old in zip(near, before[0], strict=True)]
        landed = [nic.wire_bytes("rx") - old for nic, old in zip(far, before[1], strict=True)]
        assert lo_bytes() - other < total / 100
        for i, nic in enumerate(near):
            done = rail_of(stream.peer, nic).done_nbytes
            assert done == pytest.approx(total / count, rel=0.15)
            assert sent[i] == pytest.approx(done, rel=0.15)
            assert landed[i] == pytest.approx(done, rel=0.15)


@pytest.mark.driver("rxe")  # siw counts nothing by itself; its interfaces do, in the test above
def test_the_devices_count_packets_that_carry_all_of_it(rdma_nics: tuple[Nic, ...]) -> None:
    near, far = rdma_nics[0], rdma_nics[1]
    with two_engines([near], [far]) as engines:
        stream = Stream(*engines)
        before = near.hardware_counter("sent_pkts"), far.hardware_counter("rcvd_pkts")
        stream.once(1)
        sent = near.hardware_counter("sent_pkts") - before[0]
        received = far.hardware_counter("rcvd_pkts") - before[1]
    packets = stream.nbytes / 4096  # the largest path MTU of RoCE
    assert packets <= sent <= 1.15 * packets
    assert packets <= received <= 1.15 * packets


def test_slow_rails_add_up(rdma_nics: tuple[Nic, ...]) -> None:
    """With each link at 100 Mbit/s four rails are at least 3.6 times as fast as one.

    The best of a few runs: the testbed has one CPU, which a busy host lends to others.
    """
    count = min(4, len(rdma_nics) // 2)
    one = rate(rdma_nics, 1)
    rates: list[float] = []
    while len(rates) < RUNS and max(rates, default=0.0) < 0.9 * count * one:
        rates.append(rate(rdma_nics, count))
    assert max(rates) >= 0.9 * count * one, f"{rates} over {count} rails, {one} over one"


def rate(nics: tuple[Nic, ...], count: int) -> float:
    """Bytes per second over so many rails, each slowed, while all of them have work: what it takes
    them to begin and to end together is not the links' rate."""
    near, far = nics[:count], nics[count : 2 * count]
    with ExitStack() as stack:
        for nic in near:
            stack.enter_context(shaped(nic.netdev, *TBF))
        stream = Stream(*stack.enter_context(two_engines(near, far, stall_timeout_s=60.0)))

        def carried() -> int:
            return sum(view.done_nbytes for view in stream.peer.rail_views)

        transfers = [stream.begin(tag) for tag in range(1, 1 + count * FILL)]
        wait_for(lambda: carried() >= count * SPENT_NBYTES, 60, "what a burst lets through")
        before, began_s = carried(), time.monotonic()
        time.sleep(WINDOW_S)
        nbytes, ended_s = carried() - before, time.monotonic()
        assert transfers[-1].poll() is te.Status.PENDING, "there was not enough to carry"
        return nbytes / (ended_s - began_s)
