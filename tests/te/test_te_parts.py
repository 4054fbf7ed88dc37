# SPDX-License-Identifier: Apache-2.0
"""Small parts: configuration, cards, tags, the landing gate, transfers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te
from te.arrivals import Arrivals
from te.handshake import PROTOCOL_VERSION, Card, Hello, decode_body, decode_card, encode
from te.landing import LandingGate
from te.transfers import Transfer


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"transports": ("rdma",)}, "'rdma' is not available in this build; available: tcp"),
        ({"transports": ()}, "at least one"),
        ({"transports": ("tcp", "tcp")}, "each once"),
        ({"host": ""}, "empty"),
        ({"host": "0.0.0.0"}, "cannot be put on a card"),
        ({"host": "::"}, "cannot be put on a card"),
        ({"port": 70000}, "port=70000 must be between 0 and 65535"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s=0.0"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s=nan"),
        ({"max_queued_transfers": 0}, "max_queued_transfers=0"),
        ({"segment_blocks": 1023}, "segment_blocks=1023 must be between 1 and 1022"),
        ({"segment_bytes": 0}, "segment_bytes=0"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"socket_buffer_bytes": -1}, "socket_buffer_bytes=-1"),
    ],
)
def test_config_refuses(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        te.Config(**changes)  # type: ignore[arg-type]


def a_card(**changes: object) -> Card:
    fields: dict[str, object] = {"protocol": PROTOCOL_VERSION, "id": "0" * 32, "epoch": 5}
    fields |= {"host": "h", "port": 1, "transports": ["tcp"], "regions": []}
    return Card(**fields | changes)  # type: ignore[arg-type]


def test_cards_of_other_versions_name_both() -> None:
    data = msgspec.msgpack.encode({"protocol": 7, "something": "new"})
    with pytest.raises(te.VersionError, match="te protocol 7, this engine speaks 1; run the same"):
        decode_card(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        encode(a_card())[:-1],
        encode(a_card(id="short")),
        encode(a_card(port=0)),
        encode(a_card(transports=[])),
        encode(a_card()) + bytes(1 << 20),
    ],
)
def test_garbage_is_not_a_card(data: bytes) -> None:
    with pytest.raises(te.HandshakeError, match="card"):
        decode_card(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_card_or_a_handshake_error(data: bytes) -> None:
    for decode in (decode_card, lambda body: decode_body(body, Hello)):
        with contextlib.suppress(te.HandshakeError):
            decode(data)


def test_tags_open_count_and_close() -> None:
    arrivals = Arrivals()
    for value in (0, -1, 1 << 64):
        with pytest.raises(ValueError, match="between 1 and"):
            arrivals.expect(value)
    arrivals.expect(3)
    with pytest.raises(ValueError, match="tag 0x3 is open already"):
        arrivals.expect(3)
    first = arrivals.find(3)
    assert first is not None
    assert arrivals.landed(first)
    assert (arrivals.count(3), arrivals.close(3), arrivals.close(3)) == (1, 1, 0)
    assert (arrivals.find(3), arrivals.count(3)) == (None, 0)
    # Opened again, it is not open to what began under the first opening.
    arrivals.expect(3)
    assert not arrivals.landed(first)
    assert arrivals.count(3) == 0


def test_the_gate_waits_only_for_the_landing_under_way() -> None:
    gate = LandingGate()
    gate.quiesce(0.0)
    with gate, pytest.raises(te.FenceTimeout, match=r"within 0.01 s"):
        gate.quiesce(0.01)
    gate.quiesce(0.0)


def test_the_gate_is_fair_to_those_who_wait() -> None:
    gate, stop = LandingGate(), threading.Event()

    def land_without_pause() -> None:
        while not stop.is_set():
            with gate:
                pass

    lander = threading.Thread(target=land_without_pause)
    lander.start()
    try:
        for _ in range(50):
            gate.quiesce(5.0)
    finally:
        stop.set()
        lander.join()


def a_transfer(**hooks: object) -> Transfer:
    arguments: dict[str, object] = {"on_cancel": lambda: None, "on_settle": lambda _: None}
    return Transfer(10, **arguments | hooks)  # type: ignore[arg-type]


def test_callbacks_run_once_and_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    transfer, seen = a_transfer(), []

    def broken(_: Transfer) -> None:
        raise KeyError("a user's mistake")

    transfer.add_done_callback(broken)
    transfer.add_done_callback(lambda one: seen.append(one.poll()))
    with caplog.at_level(logging.ERROR):
        transfer.settle(te.Status.DONE)
    transfer.add_done_callback(lambda one: seen.append(one.poll()))
    assert seen == [te.Status.DONE] * 2
    assert "a user's mistake" in caplog.text
    assert transfer.duration_s == transfer.duration_s


def test_outcomes_of_waiting() -> None:
    transfer = a_transfer()
    with pytest.raises(te.WaitTimeout, match=r"no outcome after 0\.001 s"):
        transfer.wait(0.001)
    transfer.settle(te.Status.FAILED, "the cause")
    with pytest.raises(te.TransferFailed, match="the cause"):
        transfer.wait(0.0)
    assert (transfer.poll(), transfer.reason) == (te.Status.FAILED, "the cause")


def test_cancel_asks_once_and_not_when_settled() -> None:
    asked: list[int] = []
    transfer = a_transfer(on_cancel=lambda: asked.append(1))
    transfer.cancel()
    transfer.cancel()
    assert (asked, transfer.cancel_requested) == ([1], True)
    done = a_transfer(on_cancel=lambda: asked.append(2))
    done.settle(te.Status.DONE)
    done.cancel()
    assert (asked, done.cancel_requested) == ([1], False)


def test_await_from_asyncio() -> None:
    async def main() -> te.Status:
        transfer, impatient = a_transfer(), a_transfer()
        threading.Timer(0.01, transfer.settle, [te.Status.CANCELLED]).start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_outcome(impatient), 0.001)
        impatient.settle(te.Status.DONE)
        return await transfer

    async def _outcome(transfer: Transfer) -> te.Status:
        return await transfer

    assert asyncio.run(main()) is te.Status.CANCELLED
