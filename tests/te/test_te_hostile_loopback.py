# SPDX-License-Identifier: Apache-2.0
"""Strangers on loopback: its connections carry nothing, and a secret number leads to its ends."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from te_contract import TIMEOUT_S, Pair, Way, paired
from te_far import wait_until
from te_raw import RAW_ID, RawSource, dial, hello, refusal
from te_wire import PATHS, edges, pack, rules_on, smallest
from wire_spec.table import Over

import te
from te.transports.base import LinkKey
from te.transports.loopback._core import LoopbackLink
from te.transports.loopback.transport import _open

SAYS = "a frame where there are none"
WAY = Way("loopback", lambda: lambda **config: te.Engine(te.Config(transports=("loopback",))))
(PATH,) = [one for one in PATHS if one.over is Over.TCP and one.from_source]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired(WAY, 1 << 16) as pair:
        yield pair


@contextlib.contextmanager
def raw_link(pair: Pair) -> Iterator[RawSource]:
    """To the target, as if an engine of this process had dialled, which says whatever it likes."""
    number = secrets.randbits(62)
    key = LinkKey(RAW_ID, 1, number)
    with pair.make() as stranger:
        _open[key] = [LoopbackLink(stranger._plane, False)]
        try:
            raw = RawSource(pair.target.card(), "loopback", link=number)
            with raw.sock:
                yield raw
        finally:
            del _open[key]


@pytest.mark.slow
def test_any_frame_ends_its_link_with_a_reason_and_no_other(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """As the table of the wire format says that they may be over TCP, and beyond each bound."""
    rules = rules_on(PATH)
    frames = [pack(rule.kind, smallest(rule)) for rule in rules if rule.item is None]
    beyond = [edge for rule in rules for edge in edges(rule) if not edge.is_allowed]
    frames += [pack(one.rule.kind, smallest(one.rule, **one.given)) for one in beyond]
    for frame in frames:
        caplog.clear()
        with caplog.at_level(logging.WARNING), raw_link(pair) as raw:
            raw.send(frame)
            assert raw.closed()
            wait_until(lambda: "broke the protocol: " in caplog.text, "the reason is logged")
        if frame in frames[: len(frames) - len(beyond)]:
            assert SAYS in caplog.text
        assert pair.peer.alive
        assert pair.write(0, 0, 100).wait(TIMEOUT_S) is te.Status.DONE
    wait_until(lambda: pair.target.stats().rails == 1, "only the pair's link is left")


def test_random_bytes_end_their_link_and_no_other(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(5)
    for _ in range(30):
        caplog.clear()
        with caplog.at_level(logging.WARNING), raw_link(pair) as raw:
            raw.send(rng.randbytes(rng.randrange(48, 3000)))
            with contextlib.suppress(OSError):
                assert raw.closed()
            wait_until(lambda: "broke the protocol: " in caplog.text, "the reason is logged")
        assert pair.write(0, 0, 100).wait(TIMEOUT_S) is te.Status.DONE


@pytest.mark.parametrize("has_ended", [False, True])
def test_who_dials_again_is_told_that_its_link_has_been_welcomed(
    pair: Pair, has_ended: bool
) -> None:
    """As an engine does whose welcome was lost on the way."""
    card, links = pair.target.card(), pair.target._acceptor._links
    with raw_link(pair) as raw, dial(card) as sock:
        (key,) = _open
        wait_until(lambda: links.get(key) is not None, "its link is known")
        if has_ended:
            raw.sock.close()
            wait_until(lambda: links.get(key) is None, "its link is forgotten")
        sock.sendall(hello(sock, card, "loopback", joins=False, link=key.number))
        assert "was welcomed; connect again" in refusal(sock).reason
    assert pair.write(0, 0, 100).wait(TIMEOUT_S) is te.Status.DONE


def test_who_is_of_another_process_is_refused(pair: Pair) -> None:
    """Nobody else has put an end where its number leads."""
    card = pair.target.card()
    with dial(card) as sock:
        sock.sendall(hello(sock, card, "loopback"))
        assert "of another process" in refusal(sock).reason
    with dial(card) as sock:
        sock.sendall(hello(sock, card, "loopback", body=b"x"))
        assert sock.recv(1) == b""
    assert pair.write(0, 0, 100).wait(TIMEOUT_S) is te.Status.DONE
    assert (pair.dst[:100] == pair.src[:100]).all()
    assert not np.any(pair.dst[100:] != 0xEE)
