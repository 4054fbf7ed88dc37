# SPDX-License-Identifier: Apache-2.0
"""Notices of rooms that decode servers have given up: kept, bounded, told to those with a proof."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import requests
from bootstrap_http import url
from bootstrap_waits import patient_client
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server import BootstrapServer, NeverServed, Unreachable
from bootstrap_server.ranks.given_up import (
    GIVEN_UP_PATH,
    NOTICE_BYTES_MAX,
    ROOMS_PER_NOTICE_MAX,
    GivenUpRoom,
    GivenUpRooms,
    Notice,
)

KEY, OTHER = b"k" * 32, b"o" * 32


def address(server: BootstrapServer) -> str:
    return f"127.0.0.1:{server.port}"


@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.integers(0, 3))), st.integers(0, 30))
def test_each_room_is_told_once_to_who_follows_the_revisions(notices, asked_every):
    table, revision, told, now_s = GivenUpRooms(), 0, [], 0.0
    for number, (rooms, _) in enumerate(notices):
        table.note(Notice(tuple(rooms), f"reason {number}"), now_s)
        if number % (asked_every + 1) == 0:
            found = table.after(revision, now_s)
            revision, told = found.revision, told + list(found.rooms)
    told += table.after(revision, now_s).rooms
    assert sorted(told) == sorted({room for rooms, _ in notices for room in rooms})


def test_notices_are_bounded_and_end():
    table = GivenUpRooms(capacity=3, expiry_s=60.0)
    table.note(Notice((1, 2, 3, 4), "x" * 10_000), 0.0)
    found = table.after(0, 0.0)
    assert list(found.rooms) == [2, 3, 4]
    assert len(found.rooms[4].reason) <= 400
    table.note(Notice((5,), "y"), 59.0)
    assert list(table.after(0, 60.0).rooms) == [5]
    with pytest.raises(ValueError, match="at most"):
        table.note(Notice(tuple(range(ROOMS_PER_NOTICE_MAX + 1)), "z"), 0.0)


def test_a_registry_that_was_restarted_tells_all_that_it_knows():
    table = GivenUpRooms()
    table.note(Notice((1,), "x"), 0.0)
    assert table.after(1_000, 0.0).rooms == {1: GivenUpRoom("x")}


def test_who_has_followed_a_former_life_of_a_registry_misses_nothing():
    """As many rooms were given up since its restart as before it."""
    with (
        BootstrapServer(host="127.0.0.1", port=0) as former,
        BootstrapServer(host="127.0.0.1", port=0) as registry,
    ):
        for server, room in ((former, 1), (registry, 2)):
            with closing(patient_client(address(server))) as decode:
                decode.give_up([room], "x")
        with closing(patient_client(address(former))) as rank:
            followed = rank.given_up(0, 0.0).revision
        with closing(patient_client(address(registry))) as rank:
            assert rank.given_up(followed, 0.0).rooms == {2: GivenUpRoom("x")}


def test_a_prefill_rank_that_waits_hears_what_a_stranger_says_of_a_room():
    with (
        BootstrapServer(host="127.0.0.1", port=0, keys=[KEY]) as server,
        closing(patient_client(address(server), keys=[KEY])) as rank,
        closing(patient_client(address(server))) as decode,
    ):
        heard = []
        waits = threading.Thread(target=lambda: heard.append(rank.given_up(0, 60.0)))
        waits.start()
        decode.give_up([7, 8], "it has another secret", refused=True)
        waits.join(60)
        (found,) = heard
        assert found.rooms == dict.fromkeys(
            (7, 8), GivenUpRoom("it has another secret", refused=True)
        )
        assert rank.given_up(found.revision, 0.0).rooms == {}


def test_only_those_with_a_proof_read_notices():
    with (
        BootstrapServer(host="127.0.0.1", port=0, keys=[KEY]) as server,
        closing(patient_client(address(server), keys=[OTHER])) as other,
    ):
        with pytest.raises(NeverServed):
            other.given_up(0, 0.0)
        assert requests.get(url(server, GIVEN_UP_PATH), timeout=60).status_code == 401


@pytest.mark.parametrize("keys", [[], [KEY]])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x" * (NOTICE_BYTES_MAX + 1), 413),
        (b'{"rooms": [1]}', 400),
        (b'{"rooms": ["1"], "reason": ""}', 400),
        (b'{"rooms": %s, "reason": ""}' % str([1] * (ROOMS_PER_NOTICE_MAX + 1)).encode(), 400),
        (b"\xff\xfe", 400),
    ],
)
def test_a_bad_notice_is_refused(keys, body, status):
    with BootstrapServer(host="127.0.0.1", port=0, keys=keys) as server:
        answer = requests.post(url(server, GIVEN_UP_PATH), data=body, timeout=60)
        assert answer.status_code == status
        in_parts = requests.post(url(server, GIVEN_UP_PATH), data=iter([b"{}"]), timeout=60)
        assert in_parts.status_code == 413


def test_errors_say_whether_asking_again_can_help():
    with (
        BootstrapServer(host="127.0.0.1", port=0, keys=[KEY]) as server,
        closing(patient_client(address(server))) as none,
        pytest.raises(NeverServed, match="its secret"),
    ):
        none.instance()
    with (
        closing(patient_client(address(server))) as client,
        pytest.raises(Unreachable) as gone,
    ):
        client.instance()
    assert gone.value.nothing_listens
