# SPDX-License-Identifier: Apache-2.0
"""Dialling that fails halfway: nothing is left behind, and nothing outlasts its deadline."""

from __future__ import annotations

import socket
import threading
import warnings

import pytest
from msgspec import structs
from te_far import wait_until
from te_raw import TIMEOUT_S, descriptors, raw_destination, take_hello, welcome

import te
from te.connect.dial import DIAL_S, DIALS_MAX
from te.handshake import decode_card, encode


@pytest.mark.slow
def test_a_second_rail_that_cannot_be_dialled_leaves_nothing_behind() -> None:
    with raw_destination() as (listener, card), te.Engine() as engine:
        before = descriptors()
        ended: list[bytes] = []

        def serve() -> None:
            first, _ = listener.accept()
            with first:
                first.sendall(welcome(take_hello(first), rails=2))
                for _ in range(DIALS_MAX):
                    second, _ = listener.accept()
                    second.close()
                first.settimeout(TIMEOUT_S)
                ended.append(first.recv(1))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(te.ConnectError, match="cannot connect"):
            engine.connect(card, TIMEOUT_S)
        thread.join(TIMEOUT_S)
        assert ended == [b""]
        wait_until(lambda: descriptors() <= before, "the first one is closed")
        wait_until(lambda: engine.stats().rails == 0, "it is counted no more")


def test_a_connection_that_is_closed_before_its_welcome_is_dialled_again() -> None:
    """As an engine does to which too many connect at once."""
    with raw_destination() as (listener, card), te.Engine() as engine:
        peers: list[te.Peer] = []
        thread = threading.Thread(target=lambda: peers.append(engine.connect(card, TIMEOUT_S)))
        thread.start()
        for _ in range(DIALS_MAX - 1):
            listener.accept()[0].close()
        last, _ = listener.accept()
        with last:
            last.sendall(welcome(take_hello(last)))
            thread.join(TIMEOUT_S)
            assert peers[0].alive


def test_a_connection_that_cannot_be_set_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(92, "Protocol not available")

    with raw_destination() as (_, card), te.Engine() as engine:
        monkeypatch.setattr("te.connect.dial.tune", refuse)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(te.ConnectError, match="Protocol not available"):
                engine.connect(card)
        assert not [one for one in caught if issubclass(one.category, ResourceWarning)]


def test_a_name_on_a_card_is_not_looked_up() -> None:
    with raw_destination() as (listener, card), te.Engine() as engine:
        named = encode(structs.replace(decode_card(card), host="localhost"))
        with pytest.raises(te.ConnectError, match="'localhost', which is no numeric address"):
            engine.connect(named)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_cards_of_engines_have_numeric_addresses() -> None:
    with te.Engine(te.Config(host="localhost")) as engine, te.Engine() as other:
        host = decode_card(engine.card()).host
        assert socket.getaddrinfo(host, 1, flags=socket.AI_NUMERICHOST)
        assert other.connect(engine.card(), TIMEOUT_S).alive


def test_a_host_that_does_not_answer_is_dialled_anew_and_not_when_tcp_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the way was cut for the first attempts."""
    waits_s: list[float] = []
    create_connection = socket.create_connection

    def cut(
        address: tuple[str, int], timeout_s: float, source: tuple[str, int] | None
    ) -> socket.socket:
        waits_s.append(timeout_s)
        if len(waits_s) <= 3:
            raise TimeoutError("timed out")
        return create_connection(address, timeout_s, source)

    monkeypatch.setattr("te.connect.dial.socket.create_connection", cut)
    tcp = te.Config(transports=("tcp",))
    with te.Engine(tcp) as engine, te.Engine(tcp) as other:
        assert other.connect(engine.card(), TIMEOUT_S).alive
    assert set(waits_s) == {DIAL_S}
    assert len(waits_s) > 3


def test_a_host_that_never_answers_is_dialled_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr("te.connect.dial.socket.create_connection", cut)
    tcp = te.Config(transports=("tcp",))
    with (
        te.Engine(tcp) as engine,
        te.Engine(tcp) as other,
        pytest.raises(te.ConnectError, match=r"did not answer within 0\.05 s"),
    ):
        other.connect(engine.card(), 0.05)
