# SPDX-License-Identifier: Apache-2.0
"""Prefill servers that refuse a decode rank are looked at again, until they serve it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from handover import WAIT_S, until
from test_instances import instance

from bootstrap_server import (
    BootstrapError,
    Instance,
    MismatchError,
    NeverServed,
    Unreachable,
    Why,
)
from sglang_mooncake.instances import REFUSED_AGAIN_S, RETURN_GIVEN_UP_S, PrefillInstances
from sglang_mooncake.refused import REFUSED_MAX, Refused, RefusedServer
from sglang_mooncake.registries import Registries

ADDRESS = "10.0.0.1:8998"
ANOTHER = NeverServed("it has another secret", Why.SECRET)


class Server:
    """What the registry at `ADDRESS` answers, and whether its instance fits."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.says: Instance | BootstrapError = ANOTHER
        self.misfit: MismatchError | None = None
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def fetch(self, address: str) -> Instance:
        self.asked += 1
        assert self.answers.wait(WAIT_S)
        if isinstance(self.says, BootstrapError):
            raise self.says
        return self.says

    def fits(self, instance: Instance) -> None:
        if self.misfit is not None:
            raise self.misfit


@contextmanager
def looked_up(server: Server, *exact: str) -> Iterator[PrefillInstances]:
    with closing(
        PrefillInstances(
            Registries(exact), server.fetch, clock=lambda: server.now_s, fits=server.fits
        )
    ) as known:
        known.ensure(ADDRESS)
        until(lambda: not known.looks_up(ADDRESS), "the look-up is over")
        yield known


def look_again(known: PrefillInstances, server: Server) -> None:
    """As the loop does when the time has come."""
    asked = server.asked
    server.now_s += REFUSED_AGAIN_S
    known.tick()
    until(lambda: server.asked > asked, "it is asked again")

    def has_answered() -> bool:
        with known._lock:  # under which all of an answer is noted
            return not any(one.at_work for one in known._refused._entries.values())

    until(has_answered, "it has answered")


def test_a_mended_secret_is_found_without_a_request(caplog):
    server = Server()
    with looked_up(server) as known:
        (refused,) = known.refused()
        assert (refused.address, refused.why) == (ADDRESS, Why.SECRET)
        look_again(known, server)
        look_again(known, server)
        assert caplog.text.count("it has another secret") == 1
        server.says = instance()
        look_again(known, server)
        until(lambda: not known.refused(), "it serves us")
        assert known.get(ADDRESS) == instance()
        assert f"{ADDRESS} serves this server now" in caplog.text


def test_another_reason_is_said_again(caplog):
    server = Server()
    with looked_up(server) as known:
        server.says, server.misfit = instance(), MismatchError("page_size is 1", Why.PAGE_SIZE)
        look_again(known, server)
        (refused,) = known.refused()
        assert refused.why is Why.PAGE_SIZE
        assert "page_size is 1" in caplog.text
        assert known.get(ADDRESS) == instance(), "its ranks are to be told of their requests"
        server.misfit = None
        server.says = instance(2)
        look_again(known, server)
        assert not known.refused()


def test_what_a_hello_has_shown_counts_for_that_life_alone():
    server = Server()
    server.says = instance(1)
    with looked_up(server) as known:
        known.refuse(ADDRESS, instance(1), "other layers", Why.LAYOUT)
        look_again(known, server)
        assert known.why(ADDRESS) is Why.LAYOUT
        server.says = instance(2)
        look_again(known, server)
        assert known.why(ADDRESS) is None
        assert known.get(ADDRESS) == instance(2)


def test_a_hello_that_says_the_same_in_other_words_is_no_news(caplog):
    server = Server()
    server.says, server.misfit = instance(), MismatchError("page_size is 1", Why.PAGE_SIZE)
    with looked_up(server) as known:
        known.refuse(ADDRESS, instance(), "page size: the prefill server has 1", Why.PAGE_SIZE)
        look_again(known, server)
        (refused,) = known.refused()
        assert refused.sentence == "page_size is 1"
        assert caplog.text.count("page_size is 1") == 1
        assert "the prefill server has 1" not in caplog.text


def test_a_server_that_is_away_meanwhile_has_refused_us_still():
    server = Server()
    with looked_up(server) as known:
        server.says = Unreachable("nothing listens")
        look_again(known, server)
        assert known.why(ADDRESS) is Why.SECRET


def test_nobody_looks_for_ever_at_what_requests_have_named_once():
    server = Server()
    with looked_up(server) as known:
        server.now_s += RETURN_GIVEN_UP_S - 1
        known.ensure(ADDRESS)
        until(lambda: not known.looks_up(ADDRESS), "the look-up is over")
        server.now_s += RETURN_GIVEN_UP_S - 1
        known.tick()
        assert known.refused(), "a request has named it since"
        server.now_s += 1
        known.tick()
        assert not known.refused()


def test_one_that_is_forgotten_while_it_is_looked_at_stays_so():
    server = Server()
    with looked_up(server) as known:
        server.answers.clear()
        server.now_s += RETURN_GIVEN_UP_S - 1
        asked = server.asked
        known.tick()
        until(lambda: server.asked > asked, "it is asked again")
        server.now_s += 1
        known.tick()
        assert not known.refused()
        server.answers.set()
        known._return_workers.shutdown()  # waits for the answer
        assert not known.refused()


def test_what_the_operator_has_named_is_looked_at_for_ever():
    server = Server()
    with looked_up(server, ADDRESS) as known:
        server.now_s += 10 * RETURN_GIVEN_UP_S
        look_again(known, server)
        assert known.refused()


def test_the_table_has_a_bound():
    table = Refused(5.0, 900.0)
    for number in range(REFUSED_MAX + 1):
        assert table.note(RefusedServer(f"h:{number}", Why.SECRET, "no", 0.0), None, 0.0)
    assert len(table) == REFUSED_MAX
    assert table.why("h:0") is None


def test_one_that_is_being_looked_at_is_not_due():
    table = Refused(5.0, 900.0)
    table.note(RefusedServer(ADDRESS, Why.SECRET, "no", 0.0), None, 0.0)
    assert not table.due(4.9)
    assert table.due(5.0) == [ADDRESS]
    assert not table.due(20.0)
    table.looked(ADDRESS, 20.0)
    assert not table.due(24.9)
    assert table.due(25.0) == [ADDRESS]
