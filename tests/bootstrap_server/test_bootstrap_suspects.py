# SPDX-License-Identifier: Apache-2.0
"""Which ranks may have ended, by what a registry knows of them. Pure."""

from __future__ import annotations

import msgspec
import pytest

from bootstrap_server import Rank, RankCoords
from bootstrap_server.ranks.suspects import Suspects, suspects

HOST, OTHER = "10.0.0.1", "10.0.0.2"
NOBODY = Suspects((), ())


def rank(tp: int, port: int, epoch: int = 1, host: str = HOST) -> Rank:
    return Rank(RankCoords(0, 0, tp, 0), host, port, epoch)


def of(leased: list[Rank], newcomer: Rank, source: str = OTHER) -> Suspects:
    """With all connections closed."""
    return suspects(leased, newcomer, source, lambda _: True)


def test_all_ranks_of_the_host_whose_connections_are_closed_are_to_be_asked() -> None:
    leased = [rank(0, 50), rank(1, 51), rank(2, 52), rank(3, 53, host=OTHER)]
    found = suspects(leased, rank(0, 60, 2), HOST, lambda one: one.port != 51)
    assert found == Suspects((), (leased[0], leased[2]))


def test_who_keeps_its_connection_is_not_asked() -> None:
    assert suspects([rank(0, 50)], rank(0, 60, 2), HOST, lambda _: False) == NOBODY


def test_where_a_newer_life_listens_on_the_port_nobody_is_to_be_asked() -> None:
    """Both new ranks have the ports of the former ones, each that of the other."""
    former, newcomer = [rank(0, 50), rank(1, 51)], rank(0, 51, 2)
    assert of(former, newcomer) == Suspects((former[1],), (former[0],))
    second = rank(1, 50, 2)
    assert of([former[0], second], newcomer) == Suspects((former[0],), (second,))


def test_an_older_life_replaces_nobody() -> None:
    newer = rank(0, 50, 3)
    assert of([newer], rank(1, 50, 2)) == Suspects((), (newer,))


@pytest.mark.parametrize(
    ("host", "source", "is_asked"),
    [
        ("10.0.0.1", "10.9.9.9", True),
        ("2001:db8::1", "2001:db8::2", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "127.0.0.1", True),
        # Each host has an address of that name, or several have.
        ("127.0.0.1", "10.0.0.1", False),
        ("::1", "2001:db8::2", False),
        ("::ffff:127.0.0.1", "10.0.0.1", False),
        ("localhost", "127.0.0.1", False),
        ("prefill-1", "10.0.0.1", False),
        ("fe80::1%eth0", "fe80::1%eth0", False),
        ("169.254.169.254", "10.0.0.1", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("::", "::1", False),
        ("224.0.0.1", "10.0.0.1", False),
        ("10.0.0.1", "an unknown address", False),
    ],
)
def test_only_an_address_that_means_one_host_is_asked(
    host: str, source: str, is_asked: bool
) -> None:
    former = rank(0, 50, host=host)
    newcomer = msgspec.structs.replace(former, port=60, epoch=2)
    assert of([former], newcomer, source) == Suspects((), (former,) if is_asked else ())
