# SPDX-License-Identifier: Apache-2.0
"""Links over RDMA, on devices that move nothing, whose other side breaks the rules: it loses its
link, and nobody else notices."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from te_direct import (
    NullEngine,
    RawDirectDestination,
    RawDirectSource,
    ask,
    raw_direct_destination,
    table,
    word,
)
from te_far import wait_until
from te_frames import AckStatus, Kind, abandon, ack, descriptors, end, header, segment, trailer
from te_raw import RAW_ID

import te
from te.core.wire import RANGES_LIMIT
from te_bench._null import Wires

TIMEOUT_S = 60.0
TAG = 5
BEGUN_MAX = 256
TABLE_MAX = 500


@dataclass
class Bystander:
    """An honest peer of the engine under attack, over the same devices."""

    peer: te.Peer
    blocks: te.Blocks

    def goes_on(self) -> None:
        assert self.peer.write(self.blocks).wait(TIMEOUT_S)
        assert self.peer.write(self.blocks).poll() is not te.Status.FAILED


@contextlib.contextmanager
def bystander(source: te.Engine, target: te.Engine) -> Iterator[Bystander]:
    near, far = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    regions = source.register(near), target.register(far, remote="read-write")
    yield Bystander(
        source.connect(target.card()),
        te.Blocks.of(regions[0].address, regions[1].address, 4096),
    )


def twice(source: RawDirectSource) -> None:
    source.send(ask(1, 4, tag=TAG))
    source.granted()
    source.send(ask(1, 4, tag=TAG))


def too_many(source: RawDirectSource) -> None:
    source.send(*(ask(1 + i, 1, tag=TAG) for i in range(BEGUN_MAX + 1)))


def inside_a_grant(*frames: bytes) -> Callable[[RawDirectSource], None]:
    def attack(source: RawDirectSource) -> None:
        source.send(ask(1, 4, total=4, tag=TAG))
        source.granted()
        source.send(*frames)

    return attack


def lost_before_asked(source: RawDirectSource) -> None:
    assert source.rail() is not None
    source.send(word(Kind.RAIL_LOST, 0, 1, [(1, 65_000)]), ask(1, 1, tag=TAG))


def lost_behind_the_last_piece(source: RawDirectSource) -> None:
    source.send(ask(1, 4, tag=TAG), word(Kind.RAIL_LOST, 0, 1, [(1, 4)]))


def lost_twice(source: RawDirectSource) -> None:
    pair = source.rail()
    assert pair is not None
    source.send(ask(1, 1, tag=TAG))
    pair.send_marks([source.granted()])
    assert source.await_frame(Kind.ACK).status == AckStatus.LANDED  # By then the rail is known.
    source.send(*[word(Kind.RAIL_LOST, 0, 1, [])] * 2)


def a_mark_of_no_piece(source: RawDirectSource) -> None:
    pair = source.rail()
    assert pair is not None
    source.send(ask(1, 4, tag=TAG))
    assert pair.send_marks([source.granted() + 4])


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (twice, "transfer 1 is asked for twice"),
        (too_many, f"more than {BEGUN_MAX} unfinished transfers"),
        (lost_before_asked, "a piece that it cannot have"),
        (lost_behind_the_last_piece, "a piece that it cannot have"),
        (lost_twice, "a piece that it cannot have"),
        (a_mark_of_no_piece, "a piece that its transfer does not have"),
        (
            inside_a_grant(segment(1, TAG, [(4096, 4)], 4), b"1234", trailer()),
            "kind 16 is not expected",
        ),
        (inside_a_grant(descriptors(Kind.PULL, 1, [(1, 1, 4)])), "kind 20 is not expected"),
        (inside_a_grant(descriptors(Kind.READ, 2, [(1, 1, 4)])), "kind 21 is not expected"),
        (inside_a_grant(end(1, TAG)), "transfer without blocks"),
        (inside_a_grant(abandon(1, TAG, 5)), "cannot have written so much"),
        (inside_a_grant(*[abandon(1, TAG, 1)] * 2), "cannot have written so much"),
        (inside_a_grant(ask(2, 4, total=3)), "total 3, which must be at least its count, 4"),
        (inside_a_grant(ask(2, (1 << 16) + 1)), "ASK has count 65537"),
        (inside_a_grant(table([(1, 2)])), "kind 23 is not expected"),
        (inside_a_grant(header(Kind.CREDIT, flags=2)), "kind 27 is not expected"),
        (inside_a_grant(word(Kind.RAIL_LOST, 8, 1, [])), "RAIL_LOST has transfer 8"),
        (inside_a_grant(word(Kind.RAIL_LOST, 0, 1, [], flags=1)), "flags 1, which must be 0"),
    ],
)  # fmt: skip
def test_a_source_that_breaks_the_rules(
    attack: Callable[[RawDirectSource], None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    wires = Wires()
    with (
        NullEngine(wires) as friend, NullEngine(wires) as engine,
        bystander(friend, engine) as other, caplog.at_level(logging.WARNING),
    ):  # fmt: skip
        engine.expect(TAG)
        source = RawDirectSource(engine.card(), wires)
        with contextlib.closing(source):
            attack(source)
            assert source.closed()
        wait_until(lambda: any(RAW_ID in one.getMessage() for one in caplog.records), "a reason")
        reason = next(one.getMessage() for one in caplog.records if RAW_ID in one.getMessage())
        assert "broke the protocol" in reason
        assert says in reason
        engine.fence(TAG, TIMEOUT_S)
        other.goes_on()


def pending(source: te.Engine, peer: te.Peer) -> te.Transfer:
    memory = np.zeros(4096, np.uint8)
    region = source.register(memory)
    return peer.write(te.Blocks.of(region.address, 1 << 20, 4096))


def asked(raw: RawDirectDestination) -> int:
    return raw.await_frame(Kind.ASK).transfer


def many_tables(raw: RawDirectDestination) -> None:
    asked(raw)
    for i in range(RANGES_LIMIT // TABLE_MAX + 1):
        first = i * TABLE_MAX
        raw.send(table([(2 * k + 1, 2 * k + 2) for k in range(first, first + TABLE_MAX)], i == 0))


def granted_twice(raw: RawDirectDestination) -> None:
    number = asked(raw)
    raw.send(table([(1 << 20, 1 << 21)]), *[ack(number, AckStatus.GRANTED)] * 2)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (many_tables, "more ranges of registered memory"),
        (granted_twice, "transfer 1, acknowledged as GRANTED"),
        (lambda raw: raw.send(ack(9, AckStatus.GRANTED)), "transfer 9, acknowledged as GRANTED"),
        (lambda raw: raw.send(table([(5, 5)])), "empty, or not in their order"),
        (lambda raw: raw.send(table([(9, 10), (5, 6)])), "empty, or not in their order"),
        (lambda raw: raw.send(table([(9, 11), (10, 12)])), "empty, or not in their order"),
        (lambda raw: raw.send(table([(9, 10)], rights=0)), "rights that there are not"),
        (lambda raw: raw.send(table([(9, 10)], rights=8)), "rights that there are not"),
        (
            lambda raw: raw.send(table([(9, 11)]), table([(10, 12)], first=False)),
            "empty, or not in their order",
        ),
        (lambda raw: raw.send(header(Kind.TABLE, flags=2)), "TABLE has flags 2"),
        (lambda raw: raw.send(ask(1, 1)), "kind 22 is not expected"),
        (
            lambda raw: raw.send(word(Kind.RAIL_CLOSED, 0, 1, [(1, 1)] * 65)),
            "RAIL_CLOSED has count 65",
        ),
        (lambda raw: raw.send(ack(asked(raw), AckStatus.LANDED)), "acknowledged as LANDED"),
        (lambda raw: raw.send(ack(asked(raw), AckStatus.ABANDONED)), "acknowledged as ABANDONED"),
    ],
)
def test_a_destination_that_breaks_the_rules(
    answer: Callable[[RawDirectDestination], None], says: str
) -> None:
    wires = Wires()
    with (
        NullEngine(wires, nics=1, stall_timeout_s=TIMEOUT_S) as engine,
        NullEngine(wires, nics=1) as friend, bystander(engine, friend) as other,
        raw_direct_destination(wires, engine) as (peer, raw),
    ):  # fmt: skip
        transfer = pending(engine, peer)
        answer(raw)
        with pytest.raises(te.TransferFailed, match=says):
            transfer.wait(TIMEOUT_S)
        assert not peer.alive
        other.goes_on()


def test_more_ranges_than_peers_take_are_refused_at_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page, limit = 4096, 64  # The real one takes seconds.
    monkeypatch.setattr("te.memory.RANGES_LIMIT", limit)
    with NullEngine(Wires(), nics=1, region_bytes_max=page) as engine:
        memory = np.zeros((limit + 2) * page, np.uint8)
        engine.register(memory.ctypes.data, (limit - 1) * page)
        rest = int(memory.ctypes.data) + (limit - 1) * page
        with pytest.raises(te.RegistrationError, match=f"at most {limit} are allowed"):
            engine.register(rest, 2 * page)
        engine.register(rest, page)
