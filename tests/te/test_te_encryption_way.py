# SPDX-License-Identifier: Apache-2.0
"""Engines that encrypt, and somebody on the network who changes what goes by, record by record."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
from te_far import wait_until
from te_on_the_way import GREETINGS, Change, Middle, middle

import te
from te.transports.tcp import kernel_tls
from te.transports.tcp import transport as tcp

KEYS = (b"k" * 32,)
TIMEOUT_S = 60.0
NBYTES = 1 << 20
RECORD = 64 << 10
CHANGED = "an encrypted record that its engine did not send here, or not so"


def engine() -> te.Engine:
    return te.Engine(
        te.Config(
            transports=("tcp",),
            keys=KEYS,
            encrypt=True,
            rails=1,
            connect_timeout_s=TIMEOUT_S,
            stall_timeout_s=TIMEOUT_S,
        )
    )


def written(card: bytes, target: te.Engine) -> tuple[te.Transfer, int]:
    """One write to it by way of that card, and how many bytes have arrived: none but those that
    were sent."""
    source = np.arange(NBYTES, dtype=np.uint32).view(np.uint8)[:NBYTES] | 1
    there = np.zeros(NBYTES, np.uint8)
    with engine() as writer:
        writer.register(source)
        region = target.register(there)
        tag = te.new_tag()
        target.expect(tag)
        try:
            peer = writer.connect(card, TIMEOUT_S)
            blocks = te.Blocks.of(source.ctypes.data, there.ctypes.data, NBYTES)
            transfer = peer.write(blocks, tag)
            with contextlib.suppress(te.TransferFailed):
                transfer.wait(TIMEOUT_S)
            assert target.arrived(tag) or transfer.poll() is te.Status.FAILED
        finally:
            target.fence(tag, TIMEOUT_S)
            target.deregister(region, TIMEOUT_S)
    landed = there != 0
    assert np.array_equal(there[landed], source[landed])
    return transfer, int(landed.sum())


@pytest.fixture(
    params=[
        pytest.param(tcp._RECORDS, id="records"),
        pytest.param(tcp._KERNEL, id="kernel", marks=pytest.mark.rdma),
    ]
)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bytes:
    problem = None if request.param == tcp._KERNEL else "it is left out by a test"
    monkeypatch.setattr(kernel_tls, "problem", lambda: problem)
    return bytes(request.param)


@pytest.fixture
def target(how: bytes) -> Iterator[te.Engine]:
    with engine() as found:
        yield found


@pytest.fixture
def way(target: te.Engine, how: bytes) -> Iterator[Middle]:
    with middle(target.card(), is_tls=how == tcp._KERNEL) as found:
        yield found


def test_what_nobody_touched_lands(target: te.Engine, way: Middle) -> None:
    transfer, landed = written(way.card, target)
    assert (transfer.poll(), landed) == (te.Status.DONE, NBYTES)
    assert len(way.seen[0]) > GREETINGS + NBYTES // RECORD


AT = 5


def at_record(change: Change) -> Change:
    """From that record on."""

    def changed(items: Iterator[bytes]) -> Iterator[bytes]:
        for _ in range(GREETINGS + AT):
            yield next(items)
        yield from change(items)

    return changed


def flip(place: int) -> Change:
    def change(items: Iterator[bytes]) -> Iterator[bytes]:
        record = bytearray(next(items))
        record[place] ^= 0x10
        yield bytes(record)
        yield from items

    return change


def flip_size(is_high: bool) -> Change:
    """In its most, or least, significant byte."""

    def change(items: Iterator[bytes]) -> Iterator[bytes]:
        record = next(items)
        is_tls = record.startswith(b"\x17\x03\x03")
        place = (3 if is_high else 4) if is_tls else (3 if is_high else 0)
        yield from flip(place)(chain((record,), items))

    return change


def repeat(items: Iterator[bytes]) -> Iterator[bytes]:
    record = next(items)
    yield record
    yield record
    yield from items


def swap(items: Iterator[bytes]) -> Iterator[bytes]:
    first, second = next(items), next(items)
    yield second
    yield first
    yield from items


def leave_out(items: Iterator[bytes]) -> Iterator[bytes]:
    next(items)
    yield from items


def truncate(items: Iterator[bytes]) -> Iterator[bytes]:
    yield next(items)[:1000]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(flip_size(is_high=False), CHANGED, id="size"),
        pytest.param(flip_size(is_high=True), CHANGED, id="size too large"),
        pytest.param(flip(5), CHANGED, id="first byte"),
        pytest.param(flip(5000), CHANGED, id="byte"),
        pytest.param(flip(-17), CHANGED, id="last byte"),
        pytest.param(flip(-1), CHANGED, id="tag"),
        pytest.param(repeat, CHANGED, id="repeated"),
        pytest.param(swap, CHANGED, id="out of order"),
        pytest.param(leave_out, CHANGED, id="left out"),
        # Where the target was about to answer, that fails.
        pytest.param(
            truncate, "in the middle of a transfer|reset by peer|Broken pipe", id="cut off"
        ),
    ],
)
def test_what_was_tampered_with_does_not_land(
    target: te.Engine, way: Middle, caplog: pytest.LogCaptureFixture, change: Change, reason: str
) -> None:
    caplog.set_level(logging.INFO)
    way.changes[0] = at_record(change)
    transfer, landed = written(way.card, target)
    assert transfer.poll() is te.Status.FAILED
    assert landed <= (AT + 1) * RECORD
    wait_until(lambda: re.search(reason, caplog.text), "the cause in the log")


def test_what_a_source_said_is_no_answer_to_it(target: te.Engine, way: Middle) -> None:
    def reflect(items: Iterator[bytes]) -> Iterator[bytes]:
        for _ in range(GREETINGS):
            yield next(items)
        next(items)
        yield way.seen[0][GREETINGS]

    way.changes[1] = reflect
    transfer, _ = written(way.card, target)
    assert transfer.poll() is te.Status.FAILED
    assert transfer.reason is not None
    assert CHANGED in transfer.reason


def test_the_wish_to_encrypt_cannot_be_taken_out_of_a_hello(
    target: te.Engine, way: Middle, how: bytes
) -> None:
    """It is proved with it."""

    def strip(items: Iterator[bytes]) -> Iterator[bytes]:
        yield next(items)
        hello, wish = next(items), how
        assert hello.endswith(wish)
        size = int.from_bytes(hello[12:16], "little") - len(wish)
        yield hello[:12] + size.to_bytes(4, "little") + hello[16 : -len(wish)]
        yield from items

    way.changes[0] = strip
    with pytest.raises(te.HandshakeError, match="answered without a proof"):
        written(way.card, target)
