# SPDX-License-Identifier: Apache-2.0
"""Who waits for news of an owner, and when he gets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.owner.followers import ANSWER_S, FOLLOWERS_MAX, NEWS_S, UNNOTICED_S, Followers

REQUEST = b"12345678"


def name(number: int) -> bytes:
    return number.to_bytes(2, "big")


def many(count: int, number: int = 0, now_s: float = 0.0) -> Followers:
    found = Followers()
    for one in range(count):
        assert found.add(name(one), REQUEST, number, now_s)
    return found


def test_news_go_out_at_once_to_a_few() -> None:
    followers = many(3)
    assert len(followers.due(1, 0.0)) == 3
    followers.add(name(0), REQUEST, 1, 0.0)
    assert followers.due(1, 0.0) == []
    (one,) = followers.due(2, 0.0)
    assert (one.client, one.request_id, one.number) == (name(0), REQUEST, 1)
    assert len(followers) == 0


def test_one_is_looked_at_alone() -> None:
    followers = many(3)
    (one,) = followers.due(1, 0.0, name(1))
    assert one.client == name(1)
    assert len(followers) == 2


def test_nobody_waits_longer_than_a_second_without_news() -> None:
    followers = many(2)
    assert followers.due(0, ANSWER_S * 0.99) == []
    assert len(followers.due(0, ANSWER_S)) == 2


def test_a_second_question_takes_the_place_of_the_first() -> None:
    followers = many(1)
    assert followers.add(name(0), b"another!", 5, 0.0)
    (one,) = followers.due(6, 0.0)
    assert (one.request_id, one.number) == (b"another!", 5)


def test_there_is_a_bound() -> None:
    followers = many(FOLLOWERS_MAX)
    assert not followers.add(b"one more", REQUEST, 0, 0.0)
    assert followers.add(name(7), REQUEST, 3, 0.0), "he waits already"
    assert len(followers) == FOLLOWERS_MAX


def test_answers_without_news_make_no_pause() -> None:
    followers = many(1000)
    assert len(followers.due(0, ANSWER_S)) == 1000
    followers.add(name(1), REQUEST, 0, ANSWER_S)
    assert len(followers.due(1, ANSWER_S)) == 1


@pytest.mark.slow
@given(
    count=st.integers(1, 300),
    changes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60),
)
def test_messages_are_few_and_nothing_is_kept_from_anybody(
    count: int, changes: list[tuple[int, int]]
) -> None:
    """Every follower asks again at once. Changes come at any time, in ticks of 20 ms."""
    tick_s = 0.02
    followers, made, told, now_s = many(count), 0, 0, 0.0
    knows = [0] * count
    news_at_s = 0.0

    def take(client: bytes | None = None) -> None:
        nonlocal told, news_at_s
        for one in followers.due(made, now_s, client):
            number = int.from_bytes(one.client, "big")
            assert one.number == knows[number]
            told += made != one.number
            knows[number], news_at_s = made, now_s
            followers.add(one.client, REQUEST, made, now_s)

    for amount, ticks in changes:
        made += amount
        take()
        for _ in range(ticks):
            now_s += tick_s
            take()
    pause_s = min(count * NEWS_S, ANSWER_S) if count * NEWS_S > UNNOTICED_S else 0.0
    now_s += pause_s
    take()
    assert set(knows) == {made}
    if pause_s:
        assert told <= count * (now_s / pause_s + 1)
