# SPDX-License-Identifier: Apache-2.0
"""The list of owners in Redis: what is in it, and what happens while it is away."""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Iterator

import pytest
from store_makers import until
from store_redis import KEYS, RedisServer, redis_server

from bootstrap_server.secret import Keys
from kvstore import members
from kvstore.members import Members, host_towards

HOST = "127.0.0.1"
NAME = "0" * 31 + "1"
PLACE = "tcp://127.0.0.1:4711"
OTHER = Keys.from_secrets([b"another secret of the tests"])


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "PERIOD_S", 0.02)


def test_owners_are_found_and_leave(redis: RedisServer) -> None:
    ours, theirs = Members(redis.url, HOST, KEYS), Members(redis.url, HOST, KEYS)
    assert theirs.listen_at(NAME) == "tcp://127.0.0.1:*"
    theirs.announce(NAME, PLACE)
    until(lambda: NAME in ours.endpoints(), "the owner is found")
    where = ours.endpoints()[NAME]
    assert where.endpoint == PLACE
    assert where.key == KEYS.control[0]
    theirs.close()
    until(lambda: not ours.endpoints(), "it has taken its entry out")
    ours.close()


def test_who_does_not_renew_its_entry_is_forgotten(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Members(redis.url, HOST, KEYS), Members(redis.url, HOST, KEYS)
    theirs.announce(NAME, PLACE)
    until(lambda: ours.endpoints(), "it is found")
    monkeypatch.setattr(members, "FORGOTTEN_S", 1)
    until(lambda: len(ours.endpoints()) == 1, "an entry that is renewed stays")
    theirs._ended.set()
    theirs._thread.join()
    until(lambda: not ours.endpoints(), "it is forgotten")
    theirs.close()
    ours.close()


def test_a_list_that_has_lost_everything_is_written_again(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Members(redis.url, HOST, KEYS), Members(redis.url, HOST, KEYS)
    theirs.announce(NAME, PLACE)
    until(lambda: ours.endpoints(), "it is found")
    with caplog.at_level(logging.INFO, "kvstore.members"):
        redis.kill()
        until(lambda: caplog.text.count("cannot be asked") == 2, "both say that it is away")
        assert ours.endpoints(), "what was known is known"
        redis.start()
        until(lambda: caplog.text.count("answers again") == 2, "both find it again")
    late = Members(redis.url, HOST, KEYS)
    until(lambda: NAME in late.endpoints(), "a new process finds the owner")
    assert NAME in ours.endpoints()
    for one in (ours, theirs, late):
        one.close()


def test_entries_that_cannot_be_used_are_left_out(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    of_others = f"{'0' * 32} {members._key_id(OTHER.control[0])} {PLACE}"
    client = redis.client()
    for entry in (of_others, b"\xff\xfe", f"{NAME} {'0' * 16} file:///etc/passwd", "x" * 100_000):
        client.zadd(members.KEYS[0], {entry: 1e12})
    client.close()
    ours = Members(redis.url, HOST, KEYS)
    ours.announce(NAME, PLACE)
    until(lambda: list(ours.endpoints()) == [NAME], "its own entry alone")
    assert caplog.text.count("this process does not have its secret") == 1
    assert caplog.text.count("it is not an owner's") == 3
    ours.close()


def test_while_a_secret_is_replaced_both_are_taken(redis: RedisServer) -> None:
    old, new = b"the old secret of the tests", b"the new secret of the tests"
    ours = Members(redis.url, HOST, Keys.from_secrets([new, old]))
    theirs = Members(redis.url, HOST, Keys.from_secrets([old, new]))
    theirs.announce(NAME, PLACE)
    until(lambda: ours.endpoints(), "it is found")
    assert ours.endpoints()[NAME].key == Keys.from_secrets([old]).control[0]
    ours.close()
    theirs.close()


def test_one_that_is_away_at_the_start_is_told_and_waited_for(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis.kill()
    ours = Members(redis.url, HOST, KEYS)
    assert "no new process of the store is found until it can" in caplog.text
    ours.announce(NAME, PLACE)
    assert not ours.endpoints()
    redis.start()
    until(lambda: NAME in ours.endpoints(), "the list is back")
    redis.kill()
    ours.close()


@pytest.mark.parametrize("url", ["host:6379", "http://host", "redis://", "redis:///0"])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not a URL of redis://, .* with a host"):
        Members(url, HOST, KEYS)


def test_passwords_are_not_told() -> None:
    with pytest.raises(ValueError, match="index='http://…@host' is not a URL"):
        Members("http://user:password@host", HOST, KEYS)


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ValueError, match=r"pip install 'sglang-mooncake\[redis\]'"):
        Members("redis://host", HOST, KEYS)


def test_the_address_that_leads_to_the_index() -> None:
    assert host_towards("redis://127.0.0.1:6379/0") == "127.0.0.1"
    assert host_towards("redis://[::1]") == "::1"
    with pytest.raises(socket.gaierror):
        host_towards("redis://no-such-host.invalid")
