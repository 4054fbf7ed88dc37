# SPDX-License-Identifier: Apache-2.0
"""What the status page is made of: ranks' reports, their connections, plans. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bootstrap_server import (
    FailureStatus,
    PeerStatus,
    RailStatus,
    RankCoords,
    RankRecord,
    RankStatus,
    Topology,
    TransportRate,
)
from bootstrap_server.page import planned as planned_module
from bootstrap_server.page.board import EVENTS_MAX, GONE_KEPT_S, GONE_MAX, Board, Report
from bootstrap_server.page.lately import Tally
from bootstrap_server.page.planned import planned
from bootstrap_server.page.status_report import REPORT_BYTES_MAX, read_report
from bootstrap_server.ranks.matching import sources
from bootstrap_server.ranks.rank_status import PEERS_MAX, REASON_CHARS_MAX, reason_text
from bootstrap_server.ranks.registry import Registry

MakeRecord = Callable[..., RankRecord]

ONE, FIRST = Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)
NOTHING = Tally(0, 0, 0, 0)
PEER = PeerStatus("a1b2", "10.0.0.9", (0, 0, 1, 0), (1, 1, 2, 1), "rdma", 2e9)
FULL = RankStatus(
    rates=(TransportRate("rdma", 0.0, 2e9),),
    rails=(RailStatus("mlx5_0", True, 2e9), RailStatus("mlx5_1", False, 0.0)),
    peers=(PEER,),
    peers_total=1,
    rooms={"open": 1, "done": 7, "failed": 1},
    failures=(FailureStatus(1.7e9, "the peer is gone", 1),),
)


def whats(board: Board) -> list[str]:
    return [event.what for event in reversed(board.events)]


# --- reports ---


def test_a_report_is_kept_as_it_was_sent_without_what_nobody_knows() -> None:
    sent = msgspec.json.decode(msgspec.json.encode(FULL)) | {"more": [1]}
    report = read_report(msgspec.Raw(msgspec.json.encode(sent)))
    assert report is not None
    assert msgspec.json.decode(report.encoded, type=RankStatus) == FULL
    assert b"more" not in report.encoded
    assert report.topologies == {(1, 1, 2, 1)}
    assert report.tally == Tally(done=7, failed=1, aborted=0, peers=1)


def test_no_report_is_none() -> None:
    assert read_report(msgspec.Raw()) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rails": [["x", True, -1.0]]}, "bytes_per_s of a rail is -1.0"),
        ({"rates": [["x", 0.0, 1e16]]}, "out_bytes_per_s is 1e"),
        ({"rails": [["x" * 65, True, 0.0]]}, "rail has 65 characters"),
        ({"rails": [["\x1b[2J", True, 0.0]]}, "control characters"),
        ({"failures": [[0.0, "x" * (REASON_CHARS_MAX + 1), 1]]}, "201 characters"),
        ({"failures": [[0.0, "x", -1]]}, "count of a failure is -1"),
        ({"failures": [[0.0, "x", 1]] * 9}, "9 failures, at most 8"),
        ({"peers": [["a", "h", [0, 0, 2, 0], [1, 1, 2, 1], "tcp", 0.0]]}, "coordinates"),
        ({"peers": [["a", "h", [0, 0, 0, 0], [1, 1, 1, 99_999], "tcp", 0.0]]}, "coordinates"),
        ({"rooms": {"done": -3}}, "number of rooms done is -3"),
        ({"rooms": "many"}, "Expected `object`"),
        ({"version": 2}, "version 2, this server knows 1"),
        ({"peers_total": 2**60}, "peers_total is"),
    ],
)
def test_reports_that_are_none(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_report(msgspec.Raw(msgspec.json.encode(changes)))


def test_a_report_is_bounded() -> None:
    largest = msgspec.structs.replace(FULL, peers=(PEER,) * PEERS_MAX)
    assert read_report(msgspec.Raw(msgspec.json.encode(largest))) is not None
    with pytest.raises(ValueError, match="257 peers, at most 256"):
        msgspec.structs.replace(FULL, peers=(PEER,) * (PEERS_MAX + 1))
    with pytest.raises(ValueError, match=f"at most {REPORT_BYTES_MAX}"):
        read_report(msgspec.Raw(b'"' + b"x" * REPORT_BYTES_MAX + b'"'))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("short", "short"),
        ("two\nlines\x00", "two lines "),
        ("x" * REASON_CHARS_MAX, "x" * REASON_CHARS_MAX),
        ("x" * 500, "x" * (REASON_CHARS_MAX - 1) + "…"),
    ],
)
def test_reasons_fit_into_a_report(text: str, reason: str) -> None:
    assert reason_text(text) == reason
    FailureStatus(0.0, reason, 1)


# --- the board ---


@pytest.fixture
def record(make_record: MakeRecord) -> RankRecord:
    return make_record(ONE, FIRST)


def test_a_closed_connection_is_shown_and_a_renewal_takes_it_back(record: RankRecord) -> None:
    board = Board(first_revision=10)
    board.registered("a", record, "one", 1.0)
    shown = board.find("a", FIRST)
    assert shown is not None
    assert (shown.lost_s, shown.connection) == (None, "one")
    seen = board.revision
    board.disconnected("one", 2.0)
    assert (shown.lost_s, shown.connection) == (2.0, None)
    assert board.revision > seen > 10
    board.renewed("a", FIRST, "two", None, 3.0)
    assert (shown.lost_s, shown.connection) == (None, "two")
    board.disconnected("one", 4.0)  # which is nobody's
    board.disconnected("nobody's", 4.0)
    assert shown.lost_s is None
    assert whats(board) == ["registered", "connection lost", "came back"]


def test_a_connection_may_be_that_of_several_ranks(make_record: MakeRecord) -> None:
    board, two = Board(), Topology(1, 1, 2, 1)
    for coords in two.coords():
        board.registered("a", make_record(two, coords), "one", 1.0)
    board.renewed("a", RankCoords(0, 0, 1, 0), "other", None, 2.0)
    board.disconnected("one", 3.0)
    lost = [board.find("a", coords).lost_s for coords in two.coords()]  # type: ignore[union-attr]
    assert lost == [3.0, None]


def test_nothing_is_known_of_connections_that_are_not_kept(record: RankRecord) -> None:
    board = Board()
    board.registered("a", record, "one", 1.0)
    board.renewed("a", FIRST, None, None, 2.0)
    board.disconnected("one", 3.0)
    assert whats(board) == ["registered"]


def test_a_rank_that_ended_leaves_an_event_alone(record: RankRecord) -> None:
    board = Board()
    board.registered("a", record, "one", 1.0)
    board.ended("a", record.rank, "shut down", 2.0)
    board.disconnected("one", 3.0)
    assert (len(board), whats(board)) == (0, ["registered", "shut down"])
    assert board._of_connection == {}


def test_another_life_begins_with_nothing(make_record: MakeRecord) -> None:
    board = Board()
    board.registered("a", make_record(ONE, FIRST, epoch=1), "one", 1.0)
    board.renewed("a", FIRST, "one", Report(b"x" * 100, frozenset(), NOTHING), 1.5)
    board.registered("a", make_record(ONE, FIRST, epoch=2), "two", 2.0)
    shown = board.find("a", FIRST)
    assert shown is not None
    assert (shown.rank.epoch, shown.report, shown.connection) == (2, None, "two")
    board.disconnected("one", 3.0)
    assert shown.lost_s is None
    assert board._bytes == 0


def test_registering_again_is_no_event(record: RankRecord) -> None:
    board = Board()
    board.registered("a", record, "one", 1.0)
    board.registered("a", record, "one", 2.0)
    assert whats(board) == ["registered"]


def test_ranks_that_a_new_generation_replaced_are_forgotten(make_record: MakeRecord) -> None:
    registry, board, two = Registry(10), Board(), Topology(1, 1, 2, 1)
    for coords in two.coords():
        record = make_record(two, coords)
        registry.register("a", record, 1.0, leased=False)
        board.registered("a", record, None, 1.0)
    board.sweep(registry, 1.0)
    assert len(board) == 2
    newer = make_record(ONE, FIRST, epoch=2)
    registry.register("a", newer, 2.0, leased=True)
    board.registered("a", newer, None, 2.0)
    board.sweep(registry, 2.0)
    assert len(board) == 1
    registry.expire(20.0)
    board.sweep(registry, 20.0)  # the instance is gone as a whole
    assert (len(board), whats(board)[-2:]) == (0, ["replaced", "replaced"])


def test_reports_are_bounded_in_all(make_record: MakeRecord) -> None:
    board, two = Board(bytes_max=150), Topology(1, 1, 2, 1)
    first, second = two.coords()
    for coords in two.coords():
        board.registered("a", make_record(two, coords), None, 1.0)
    report = Report(b"x" * 100, frozenset(), NOTHING)
    board.renewed("a", first, None, report, 2.0)
    board.renewed("a", first, None, report, 3.0)  # in the place of the former one
    board.renewed("a", second, None, report, 3.0)
    assert board.find("a", first).report == report  # type: ignore[union-attr]
    assert (board.find("a", second).report, board.left_out) == (None, 1)  # type: ignore[union-attr]
    board.ended("a", make_record(two, first).rank, "shut down", 4.0)
    board.renewed("a", second, None, report, 5.0)
    assert board.find("a", second).report == report  # type: ignore[union-attr]


def test_a_rank_whose_lease_lapsed_is_shown_for_a_while(
    make_record: MakeRecord, record: RankRecord
) -> None:
    board = Board()
    board.registered("a", record, None, 1.0)
    report = Report(b"{}", frozenset(), Tally(7, 1, 2, 0))
    board.renewed("a", FIRST, None, report, 2.0)
    board.lapsed("a", record.rank, 17.0)
    assert whats(board) == ["registered", "lease lapsed"]
    (gone,) = board.gone(17.0)
    assert (gone.at_s, gone.instance, gone.rank) == (17.0, "a", record.rank)
    assert gone.tally == report.tally
    # It is no longer gone once it is back, be it in another life.
    board.registered("a", make_record(ONE, FIRST, epoch=2), None, 18.0)
    assert board.gone(18.0) == ()
    board.lapsed("a", record.rank, 40.0)
    assert len(board.gone(40.0 + GONE_KEPT_S - 1)) == 1
    assert board.gone(40.0 + GONE_KEPT_S) == ()
    # Whoever shuts a server down knows of it.
    board.registered("a", record, None, 41.0)
    board.ended("a", record.rank, "shut down", 42.0)
    assert board.gone(42.0) == ()


def test_of_ranks_whose_leases_lapsed_the_last_ones_are_kept(record: RankRecord) -> None:
    board = Board()
    for number in range(GONE_MAX + 2):
        board.lapsed(f"a{number}", record.rank, float(number) / GONE_MAX)
    board.lapsed("a2", record.rank, 2.0)
    gone = board.gone(2.0)
    assert len(gone) == GONE_MAX
    assert (gone[0].instance, gone[-1].instance) == ("a3", "a2")


def test_events_are_bounded_and_numbered(record: RankRecord) -> None:
    board = Board()
    for time_s in range(EVENTS_MAX):
        board.registered("a", record, None, time_s)
        board.ended("a", record.rank, "shut down", time_s)
    assert len(board.events) == EVENTS_MAX
    assert board.events[0].number == 2 * EVENTS_MAX
    assert board.events[-1].number == EVENTS_MAX + 1


# --- plans ---


@pytest.mark.parametrize(
    ("prefill", "decode", "config"),
    [
        (Topology(1, 1, 4, 1), (1, 1, 2, 1), {}),
        (Topology(1, 1, 2, 1), (8, 1, 4, 1), {}),
        (Topology(2, 1, 2, 2), (1, 1, 1, 1), {}),
        (Topology(2, 1, 2, 2), (1, 1, 2, 2), {}),
        (Topology(1, 2, 2, 1), (1, 1, 2, 1), {}),
        (Topology(1, 1, 4, 1), (1, 1, 4, 1), {"enable_kv_cache_sharding": True}),
    ],
)
def test_plans_are_what_matching_says(
    make_record: MakeRecord,
    prefill: Topology,
    decode: tuple[int, int, int, int],
    config: dict[str, object],
) -> None:
    plan = planned(make_record(prefill, FIRST, **config).config, decode)
    assert plan["problem"] is None
    asked = {(tp, pp): set(places) for tp, pp, places in plan["asked"]}  # type: ignore[attr-defined]
    for coords in Topology(*decode).coords():
        for dp in range(prefill.dp_size):
            found = sources(prefill, Topology(*decode), coords, dp, every_tp_rank=bool(config))
            expected = {(one.coords.cp, one.coords.tp, one.coords.pp) for one in found}
            assert asked[coords.tp, coords.pp] == expected


def test_plans_that_cannot_be_made_say_why(
    make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_record(Topology(1, 1, 1, 2), FIRST).config
    assert "start decode with that of prefill" in str(planned(config, (1, 1, 1, 3))["problem"])
    assert "65536" in str(planned(config, (1, 2**15, 1, 3))["problem"])
    monkeypatch.setattr(planned_module, "PAIRS_MAX", 7)
    assert planned(config, (1, 1, 4, 1)) == {
        "topology": (1, 1, 4, 1),
        "asked": [],
        "problem": "more than 7 pairs of ranks",
    }
