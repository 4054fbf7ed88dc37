# SPDX-License-Identifier: Apache-2.0
"""Which of the connections that have proved nothing has to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server.admission.crowd import Crowd, source_of

pytestmark = pytest.mark.pure


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 40)), max_size=300))
def test_the_oldest_of_the_fullest_source_goes(events: list[tuple[int, bool, int]]) -> None:
    crowd: Crowd[int] = Crowd(12, 5)
    here: dict[int, str] = {}
    for number, (source, comes, which) in enumerate(events):
        if comes:
            crowd.enter(number, str(source))
            here[number] = str(source)
        else:
            crowd.leave(which)
            crowd.leave(which)
            here.pop(which, None)
        while (gone := crowd.surplus()) is not None:
            sizes = {name: list(here.values()).count(name) for name in here.values()}
            assert sizes[here[gone]] == max(sizes.values())
            assert gone == next(one for one, name in here.items() if name == here[gone])
            assert len(here) > 12 or max(sizes.values()) > 5
            crowd.leave(gone)
            del here[gone]
        assert len(crowd) == len(here) <= 12
        assert all(one in crowd for one in here)
        assert all(list(here.values()).count(name) <= 5 for name in here.values())
    for one in here:
        crowd.leave(one)
    assert crowd.first_to_go() is None
    assert not crowd._of_size
    assert not crowd._of_source


def test_one_loud_source_costs_no_other_its_place() -> None:
    crowd: Crowd[tuple[str, int]] = Crowd(100, 60)
    for number in range(40):
        crowd.enter((f"10.0.0.{number}", 0), f"10.0.0.{number}")
    for number in range(1000):
        crowd.enter(("loud", number), "loud")
        while (gone := crowd.surplus()) is not None:
            assert gone[0] == "loud"
            crowd.leave(gone)
    assert len(crowd) == 100


def test_who_enters_again_is_the_youngest() -> None:
    crowd: Crowd[int] = Crowd(3, 3)
    for one in (1, 2, 3, 1):
        crowd.enter(one, "a")
    assert len(crowd) == 3
    assert crowd.surplus() is None
    assert crowd.first_to_go() == 2


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("an unknown address", "an unknown address"),
    ],
)
def test_what_counts_as_one_source(address: str, source: str) -> None:
    assert source_of(address) == source
