# SPDX-License-Identifier: Apache-2.0
"""Counters beside the truth over RDMA: what was written, and what the interfaces of the devices
counted. (rxe's own counters count packets; siw has none.)"""

from __future__ import annotations

import itertools

import pytest
from rdma_pair import TIMEOUT_S, RdmaPair, rdma_pair
from testbed_nics import Nic, cut, shaped, wait_for

import te

pytestmark = pytest.mark.rdma

NBYTES = 8 << 20
TRANSFERS = 3
ROUNDS = 8
#: Headers of a packet of 1024 bytes of payload, the least there is, and acknowledgements.
OVERHEAD = 1.2


def write(pair: RdmaPair, tag: int) -> None:
    pair.target.expect(tag)
    for _ in range(TRANSFERS):
        transfer = pair.peer.write(pair.blocks(0, 0, NBYTES), tag=tag)
        assert transfer.wait(TIMEOUT_S) is te.Status.DONE
    assert pair.target.fence(tag, TIMEOUT_S) == TRANSFERS


def flows(pair: RdmaPair) -> tuple[list[int], list[int]]:
    """Bytes sent and bytes received, by rail."""
    (out,), (into,) = pair.source.links(), pair.target.links()
    return (
        [rail.flow.bytes_sent for rail in out.rails],
        [rail.flow.bytes_received for rail in into.rails],
    )


def lost(pair: RdmaPair) -> int:
    """How often a rail of the source was."""
    return pair.source.stats().by_transport["rdma"].rails_lost


def test_rails_count_what_their_devices_carry(rdma_nics: tuple[Nic, ...]) -> None:
    """In one of a few rounds: a device that the testbed's CPU leaves waiting sends packets again,
    which count twice on the wire."""
    with rdma_pair(rdma_nics, rails=2, nbytes=NBYTES) as pair:
        fits = False
        for tag in itertools.count(1):
            wire = [(nic.wire_bytes("tx"), nic.wire_bytes("rx")) for nic in pair.near + pair.far]
            sent, landed = flows(pair)
            write(pair, tag)
            after = [(nic.wire_bytes("tx"), nic.wire_bytes("rx")) for nic in pair.near + pair.far]
            more = [new - old for new, old in zip(flows(pair)[0], sent, strict=True)]
            assert sum(more) == TRANSFERS * NBYTES
            assert sum(flows(pair)[1]) == sum(landed) + TRANSFERS * NBYTES
            tx = [after[i][0] - wire[i][0] for i in range(2)]
            rx = [after[i][1] - wire[i][1] for i in range(2, 4)]
            assert all(got >= n for got, n in zip(tx + rx, more * 2, strict=True)), (tx, rx, more)
            fits = all(got <= n * OVERHEAD for got, n in zip(tx + rx, more * 2, strict=True))
            if fits or tag == ROUNDS:
                break
        assert fits, (tx, rx, more)
        (out,) = pair.source.links()
        assert [rail.name.split()[0] for rail in out.rails] == [nic.device for nic in pair.near]
        assert all(rail.state == "up" for rail in out.rails)
        # The destination divides what has landed by pieces, which are of about one size.
        for counted, real in zip(*flows(pair), strict=True):
            assert abs(counted - real) <= 0.05 * (tag * TRANSFERS * NBYTES)
        counted = pair.source.stats().by_transport["rdma"]
        assert counted.outcomes.transfers_done == tag * TRANSFERS
        assert counted.bytes_sent == sum(flow.bytes_sent for flow in counted.rails)
        assert (counted.rails_lost, counted.rails_remade) == (0, 0)


def test_reads_count_where_they_land(rdma_nics: tuple[Nic, ...]) -> None:
    with rdma_pair(rdma_nics, rails=2, nbytes=NBYTES) as pair:
        back = te.Blocks.of(pair.dst.ctypes.data, pair.src.ctypes.data, NBYTES)
        assert pair.peer.read(back).wait(TIMEOUT_S) is te.Status.DONE
        stats, far = pair.source.stats(), pair.target.stats()
        assert (stats.bytes_received, stats.bytes_sent) == (NBYTES, 0)
        assert (far.bytes_received, far.bytes_sent) == (0, 0)  # It knows nothing of it.


def test_a_rail_that_is_lost_and_made_anew_is_counted(rdma_nics: tuple[Nic, ...]) -> None:
    with rdma_pair(rdma_nics, rails=2, nbytes=NBYTES) as pair:
        write(pair, 1)

        def changes() -> tuple[int, int]:
            one = pair.source.stats().by_transport["rdma"]
            return one.rails_lost, one.rails_remade

        with cut(pair.near[0].port):
            write(pair, 2)  # siw tells of no lost carrier: the rail is lost when nothing completes.
            wait_for(lambda: changes() == (1, 0), TIMEOUT_S, "the rail is lost")
            (link,) = pair.source.links()
            assert [rail.state == "up" for rail in link.rails] == [False, True]
            assert link.last_error
        wait_for(lambda: changes() == (1, 1), TIMEOUT_S, "the rail is made anew")
        write(pair, 3)
        assert pair.source.stats().bytes_sent == 3 * TRANSFERS * NBYTES
        assert pair.target.stats().bytes_received == 3 * TRANSFERS * NBYTES


def test_what_lands_by_a_rail_that_is_lost_before_it_is_confirmed_is_counted(
    rdma_nics: tuple[Nic, ...],
) -> None:
    """Its packets arrive, and nothing comes back: the destination tells what has landed."""
    small, count = 4096, 40
    with rdma_pair(rdma_nics, rails=2, nbytes=NBYTES) as pair:
        write(pair, 1)
        pair.target.expect(2)
        with shaped(pair.far[0].netdev, "netem", "loss", "100%"):
            blocks = [pair.blocks(i * small, i * small, small) for i in range(count)]
            transfers = [pair.peer.write(one, tag=2) for one in blocks]
            assert {one.wait(TIMEOUT_S) for one in transfers} == {te.Status.DONE}
            # Its work is done elsewhere before that it is lost is known.
            wait_for(lambda: lost(pair) > 0, TIMEOUT_S, "the rail is lost")
            assert lost(pair) == 1
        assert pair.target.fence(2, TIMEOUT_S) == count
        assert pair.source.stats().bytes_sent == TRANSFERS * NBYTES + count * small
        assert pair.target.stats().bytes_received == TRANSFERS * NBYTES + count * small
