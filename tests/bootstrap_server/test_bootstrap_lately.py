# SPDX-License-Identifier: Apache-2.0
"""What reports say of the last minutes. Pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server.page.lately import SPACING_S, WINDOW_S, Lately, Tally, trouble

#: How often ranks report.
EVERY_S = 5.0


def told(*reports: Tally, every_s: float = EVERY_S) -> tuple[Lately, float]:
    """The reports one after the other, and when the last one came."""
    lately, now_s = Lately(), 1000.0
    for tally in reports:
        now_s += every_s
        lately.report(tally, now_s)
    return lately, now_s


def test_nothing_is_known_before_the_first_report():
    assert Lately().since(5.0) is None
    assert trouble(Lately(), 5.0) is None


def test_what_was_before_the_first_report_is_no_news():
    """The registry may have started long after the rank."""
    lately, now_s = told(Tally(1000, 500, 400, 2))
    assert lately.since(now_s) == (Tally(0, 0, 0, 2), 2)
    assert trouble(lately, now_s) is None


def test_a_decode_server_that_dies_is_trouble_however_much_went_well_before():
    """The figures of a real one: 25 requests were under way, and one came later."""
    good = Tally(1_000_000, 0, 3, 1)
    lately, now_s = told(good, good._replace(done=1_000_005, failed=25, aborted=4, peers=0))
    assert trouble(lately, now_s) == (
        "in the last 5 min 25 of 31 rooms failed, 1 of 1 decode ranks were lost"
    )
    assert trouble(lately, now_s + WINDOW_S) is not None


def test_rooms_that_the_router_gives_up_are_trouble():
    lately, now_s = told(Tally(100, 0, 0, 1), Tally(110, 0, 8, 1))
    assert trouble(lately, now_s) == "in the last 5 min 8 of 18 rooms were aborted"


def test_a_few_bad_ends_among_many_are_none():
    lately, now_s = told(Tally(0, 0, 0, 1), Tally(1000, 40, 200, 1))
    assert trouble(lately, now_s) is None
    lately, now_s = told(Tally(0, 0, 0, 1), Tally(0, 4, 4, 1))
    assert trouble(lately, now_s) is None


def test_trouble_passes_when_it_is_over():
    lately, now_s = told(Tally(100, 0, 0, 2), Tally(100, 50, 0, 2))
    while trouble(lately, now_s) is not None:
        now_s += EVERY_S
        lately.report(Tally(100, 50, 0, 2), now_s)
        assert now_s < 1000.0 + 2 * WINDOW_S
    assert now_s >= 1000.0 + WINDOW_S


def test_a_decode_rank_that_is_back_was_not_lost():
    lately, now_s = told(*(Tally(9, 0, 0, peers) for peers in (2, 1, 2)))
    assert trouble(lately, now_s) is None


def test_that_no_decode_rank_is_left_stays_trouble():
    lately, now_s = told(Tally(9, 0, 0, 2), *[Tally(9, 0, 0, 0)] * int(2 * WINDOW_S / EVERY_S))
    assert trouble(lately, now_s) == "no decode rank is connected any more"


def test_a_decode_rank_reports_no_decode_ranks_and_lacks_none():
    lately, now_s = told(*[Tally(9, 0, 0, 0)] * 3)
    assert trouble(lately, now_s, "prefill") == "no decode rank is connected any more"
    assert trouble(lately, now_s, "decode") is None
    lately.report(Tally(9, 9, 0, 0), now_s)
    assert trouble(lately, now_s, "decode") == "in the last 5 min 9 of 9 rooms failed"


def test_a_rank_that_nobody_has_asked_yet_is_not_in_trouble():
    lately, now_s = told(*[Tally(0, 0, 0, 0)] * 3)
    assert trouble(lately, now_s) is None


def test_counts_that_begin_anew_are_no_news():
    lately, now_s = told(Tally(100, 9, 0, 1), Tally(3, 0, 0, 1), Tally(4, 0, 0, 1))
    assert lately.since(now_s) == (Tally(1, 0, 0, 1), 1)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 100.0), st.integers(0, 9), st.integers(0, 9), st.integers(0, 4)),
        min_size=1,
        max_size=120,
    )
)
def test_what_is_told_is_of_the_window_and_little_is_kept(steps):
    lately, now_s, reports = Lately(), 0.0, []
    done = failed = 0
    for passed_s, more_done, more_failed, peers in steps:
        now_s += passed_s
        done, failed = done + more_done, failed + more_failed
        reports.append((now_s, Tally(done, failed, 0, peers)))
        lately.report(reports[-1][1], now_s)
        ended, before = lately.since(now_s)
        inside = [tally for at_s, tally in reports if at_s > now_s - WINDOW_S]
        least, most = done - inside[0].done, done - reports[0][1].done
        assert least <= ended.done <= most
        assert max(tally.peers for tally in inside) <= before
        assert len(lately._kept) <= WINDOW_S / SPACING_S + 2
        assert ended.peers == peers
