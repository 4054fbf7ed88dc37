# SPDX-License-Identifier: Apache-2.0
"""A request that the prefill side's registry will never serve ends on both sides at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from handover import Handover, handover, until
from test_instances import instance

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    Instance,
    NeverServed,
    Unreachable,
    Why,
)
from bootstrap_server.admission.secret import Keys
from sglang_mooncake.given_up import GivenUpWatch
from sglang_mooncake.instances import NOTHING_LISTENS_S, PrefillInstances
from sglang_mooncake.registries import Registries
from sglang_mooncake.rooms.states import RoomState

ADDRESS = "10.0.0.1:8998"
OURS, THEIRS = (Keys.from_secrets([text * 43]) for text in (b"a", b"b"))


class Fetch:
    """A `fetch` that raises what it is told to."""

    def __init__(self) -> None:
        self.error: BootstrapError = NeverServed("it has another secret", Why.SECRET)

    def __call__(self, address: str) -> Instance:
        raise self.error


@contextmanager
def looked_up(fetch: Fetch, now_s: list[float]) -> Iterator[PrefillInstances]:
    with closing(PrefillInstances(Registries(), fetch, lambda: now_s[0])) as known:
        yield known


def look_up(known: PrefillInstances) -> None:
    known.ensure(ADDRESS)
    until(lambda: not known.looks_up(ADDRESS), "the look-up is over")


def test_a_refusal_counts_for_rooms_that_were_there_before_it():
    now_s = [10.0]
    with looked_up(Fetch(), now_s) as known:
        look_up(known)
        assert known.verdict(ADDRESS, 10.0) == "it has another secret"
        assert known.verdict(ADDRESS, 10.1) is None, "a newer room has its own look-up"
        assert known.verdict("10.0.0.2:8998", 10.0) is None


def test_where_nothing_listens_a_server_may_be_starting_for_a_moment():
    now_s, fetch = [10.0], Fetch()
    fetch.error = Unreachable("connection refused", nothing_listens=True)
    with looked_up(fetch, now_s) as known:
        look_up(known)
        assert known.verdict(ADDRESS, 10.0) is None
        now_s[0] += NOTHING_LISTENS_S
        look_up(known)
        assert known.verdict(ADDRESS, 10.0) == "connection refused"


@pytest.mark.parametrize("error", [BootstrapError("full"), Unreachable("timed out")])
def test_other_problems_are_waited_for(error):
    now_s, fetch = [10.0], Fetch()
    fetch.error = error
    with looked_up(fetch, now_s) as known:
        now_s[0] += 2 * NOTHING_LISTENS_S
        look_up(known)
        assert known.verdict(ADDRESS, 0.0) is None


def test_the_log_says_once_that_a_server_refuses_us_and_when_that_is_over(caplog):
    now_s, fetch = [10.0], Fetch()
    with looked_up(fetch, now_s) as known:
        for _ in range(3):
            look_up(known)
        assert caplog.text.count("it has another secret") == 1
        known._note_known(ADDRESS, instance(), None)
        assert f"{ADDRESS} serves this server now" in caplog.text


def test_addresses_without_wildcards_are_asked_at_the_start():
    given = Registries(("10.0.0.1:8998", "10.0.0.2", "10.1.0.0/16:8998", "a-*.svc:8998", "[::1]:1"))
    assert given.exact == ("10.0.0.1:8998", "[::1]:1")


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(("here", "there"), [(OURS, THEIRS), (OURS, Keys()), (Keys(), OURS)])
def test_with_another_secret_both_sides_end(here, there):
    with handover(keys=here, decode_keys=there) as pair, watched(pair, here):
        source = pair.prefill.side.open_room(5, register_dp_rank=False)
        target = pair.decode.side.new_room(5)
        pair.decode.side.instances.ensure(pair.address)

        def decode_ends() -> bool:
            pair.decode.side.check_served(target, pair.address)
            return target.view.over

        until(decode_ends, "the decode room ends")
        until(lambda: source.view.over, "the prefill room ends")
        assert target.view.state is RoomState.FAILED
        assert target.view.reason is not None
        assert "secret" in target.view.reason
        assert source.view.state is RoomState.ABORTED
        assert source.view.reason is not None
        assert "secret" in source.view.reason


@contextmanager
def watched(pair: Handover, keys: Keys) -> Iterator[None]:
    with closing(
        GivenUpWatch(
            lambda: BootstrapClient(pair.address, keys=keys.registry), pair.prefill.side.given_up
        )
    ) as watch:
        watch.start()
        yield


@pytest.mark.usefixtures("short_grace")
def test_a_notice_that_came_before_its_room_ends_it():
    with handover() as pair:
        pair.prefill.side.given_up(5, "it has another secret")
        source = pair.prefill.side.open_room(5, register_dp_rank=False)
        until(lambda: source.view.over, "the prefill room ends")


def test_a_notice_of_a_room_that_a_decode_rank_asks_for_changes_nothing():
    with handover() as pair:
        pair.decode.know(pair.address)
        source, target = pair.open_both(5)
        pair.name_pages(target, [1], 0)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        pair.prefill.side.given_up(5, "a stranger's word")
        pair.prefill.send(source, [2], 0, 0)
        until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")


def test_a_request_that_names_another_port_does_not_wait_for_decode_ranks():
    with handover() as pair:
        side = pair.prefill.side
        source = side.open_room(5, register_dp_rank=False)
        side.misdirect(source, "the request names port 1")
        until(lambda: source.view.over, "the prefill room ends")
        assert (source.view.state, source.view.reason) == (
            RoomState.FAILED,
            "the request names port 1",
        )
