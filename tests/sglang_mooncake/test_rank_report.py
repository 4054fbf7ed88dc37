# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank reports for the status page."""

from __future__ import annotations

import time

import msgspec
import pytest
import requests
from handover import NEVER_S, handover, until

from bootstrap_server import PeerStatus, RailStatus, RankCoords, RankStatus, Topology, TransportRate
from bootstrap_server.client import lease
from bootstrap_server.ranks.rank_status import FAILURES_MAX, PEERS_MAX, RAILS_MAX
from sglang_mooncake.failures import Failures
from sglang_mooncake.layout import Place
from sglang_mooncake.rank_report import DecodePeer, RankReport
from sglang_mooncake.rooms.states import RoomState
from te.stats import LinkStats, Outcomes, RailFlow, RailStats

NOTHING = Outcomes(0, 0, 0, {}, 0, 0, 0)
PLACE = Place(Topology(1, 1, 2, 1), RankCoords(0, 0, 1, 0))


class _Moved:
    """Of te.stats.TransportStats what is read."""

    def __init__(self, received, sent):
        self.bytes_received, self.bytes_sent = received, sent


class _Stats:
    def __init__(self, **by_transport):
        self.by_transport = {name: _Moved(*moved) for name, moved in by_transport.items()}


class World:
    """What the report asks, at one moment."""

    def __init__(self):
        self.now_s, self.stats, self.links, self.peers = 10.0, _Stats(), [], []
        self.report = RankReport(
            lambda: self.stats,
            lambda: self.links,
            lambda: self.peers,
            lambda: {"done": 3},
            lambda: (),
            lambda: self.now_s,
        )

    def after(self, passed_s):
        self.now_s += passed_s
        return self.report()


@pytest.fixture
def world():
    return World()


def link(peer, transport, *rails):
    stats = tuple(RailStats(name, state, RailFlow(nbytes, 0)) for name, state, nbytes in rails)
    return LinkStats(peer, "h:1", False, transport, "", "", 0.0, stats, 0, NOTHING, "")


def test_rates_are_those_since_the_report_before(world):
    world.stats = _Stats(rdma=(0, 100), tcp=(30, 0))
    world.links = [link("e" * 32, "rdma", ("mlx5_0 to device mlx5_1", "up", 100))]
    world.peers = [DecodePeer("e" * 32, "10.0.0.2", PLACE)]
    assert world.after(2.0) == RankStatus(
        rates=(TransportRate("rdma", 0.0, 50.0), TransportRate("tcp", 15.0, 0.0)),
        rails=(RailStatus("mlx5_0", True, 50.0),),
        peers=(PeerStatus("e" * 12, "10.0.0.2", (0, 0, 1, 0), (1, 1, 2, 1), "rdma", 50.0),),
        peers_total=1,
        rooms={"done": 3},
    )
    world.stats = _Stats(rdma=(0, 140), tcp=(30, 0))
    world.links = [link("e" * 32, "rdma", ("mlx5_0 to device mlx5_1", "up", 140))]
    report = world.after(4.0)
    assert report.rates == (TransportRate("rdma", 0.0, 10.0), TransportRate("tcp", 0.0, 0.0))
    assert (report.rails[0].bytes_per_s, report.peers[0].bytes_per_s) == (10.0, 10.0)


def test_a_link_that_ended_takes_its_bytes_along_and_no_rate_is_negative(world):
    world.links = [link("a", "tcp", ("10.0.0.1:5 → 10.0.0.2:6", "up", 100))]
    world.after(1.0)
    world.links = [link("b", "tcp", ("10.0.0.1:7 → 10.0.0.3:8", "up", 10))]
    assert world.after(1.0).rails == (RailStatus("10.0.0.1", True, 0.0),)
    world.links = []
    assert world.after(0.0).rails == ()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("mlx5_0 (fe80::1) to device mlx5_1 (fe80::2)", "mlx5_0"),
        ("10.0.0.1:40000 → 10.0.0.2:50000", "10.0.0.1"),
        ("[fe80::1]:40000 → [fe80::2]:50000", "[fe80::1]"),
        ("", "samehost"),
        ("x" * 100, "x" * 64),
    ],
)
def test_rails_go_by_what_is_at_their_near_end(world, name, shown):
    world.links = [link("a", "samehost", (name, "up", 1))]
    assert world.after(1.0).rails == (RailStatus(shown, True, 1.0),)


def test_a_rail_is_up_where_all_its_connections_are(world):
    world.links = [
        link("a", "rdma", ("m0 to x", "probe", 1), ("m1 to x", "up", 2)),
        link("b", "rdma", ("m0 to x", "up", 4), ("m1 to x", "up", 8)),
    ]
    assert world.after(1.0).rails == (RailStatus("m0", False, 5.0), RailStatus("m1", True, 10.0))


def test_a_report_is_bounded(world):
    world.links = [link("a", "rdma", *((f"d{i} to x", "up", 1) for i in range(RAILS_MAX + 1)))]
    world.peers = [DecodePeer(f"{i:032x}", "h" * 99, PLACE) for i in range(PEERS_MAX + 5)]
    report = world.after(1.0)
    assert (len(report.rails), len(report.peers)) == (RAILS_MAX, PEERS_MAX)
    assert report.peers_total == PEERS_MAX + 5


def test_failures_are_counted_by_reason_and_the_last_ones_kept():
    times = iter(range(100))
    failures = Failures(clock=lambda: float(next(times)))
    for number in range(FAILURES_MAX + 1):
        failures.note(f"reason {number}")
    failures.note("reason 5")
    failures.note(None)
    failures.note("a\nb" + "x" * 300)
    found = failures.last()
    assert len(found) == FAILURES_MAX
    assert found[0].reason.startswith("a bxxx")
    assert found[1].reason == "no reason was given"
    assert (found[2].reason, found[2].count, found[2].at_s) == ("reason 5", 2, 9.0)
    assert "reason 0" not in {one.reason for one in found}


@pytest.mark.slow
def test_a_real_rank_reports_what_it_moved_and_what_failed(monkeypatch):
    monkeypatch.setattr(lease, "RENEWALS_PER_LEASE", NEVER_S / 0.1)  # each 0.1 s
    with handover() as pair:
        pair.decode.know(pair.address)

        def told(condition):
            """The report that the registry has, once it is so."""

            def ask():
                answer = requests.get(f"http://{pair.address}/v1/status", timeout=30).json()
                return [msgspec.convert(one[3], RankStatus) for one in answer["reports"]]

            until(lambda: any(map(condition, ask())), "it is reported")
            return ask()[0]

        pair.complete(1, [0, 1, 2], [3, 4, 5], aux=1)
        report = told(lambda report: report.rooms["done"] and report.peers)
        (peer,) = report.peers
        assert peer.id == pair.decode.engine.id[:12]
        assert (peer.coords, peer.topology) == ((0, 0, 0, 0), (1, 1, 1, 1))
        (transport,) = {name for name, _ in pair.prefill.engine.stats().peer_transports.values()}
        assert peer.transport == transport
        assert transport in {rate.transport for rate in report.rates}
        assert len(report.rails) > 0
        assert report.peers_total == 1

        failing = pair.prefill.side.open_room(2, register_dp_rank=False)
        pair.prefill.side.fail(failing, "the disk is on fire")
        until(lambda: failing.view.state is RoomState.FAILED, "the room has failed")
        report = told(lambda report: report.failures and report.rooms["failed"])
        assert report.failures[0].reason == "the disk is on fire"
        assert time.time() - report.failures[0].at_s < 600
        assert report.rooms["failed"] == 1

        pair.decode.close()
        assert told(lambda report: report.peers_total == 0).peers == ()
