# SPDX-License-Identifier: Apache-2.0
"""Who holds no secret costs nobody but himself: at an owner's port, and in the list of owners."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from store_makers import TIMEOUT_S, config, engine, until
from store_meeting import endpoints

import te
from bootstrap_server.admission import unauthenticated
from kvstore._table import Table
from kvstore.client import following as far_module
from kvstore.client.following import Following
from kvstore.owner.owner import Owner
from kvstore.owner.service import Service
from kvstore.protocol.asking import Asker
from kvstore.protocol.messages import VERSION, Greet, Hello
from kvstore.protocol.sockets import Sockets, Where
from kvstore.store import Store

KEY = b"k" * 32
MIB = 1 << 20


@pytest.fixture
def service(directory: Path) -> Iterator[Service]:
    """Of an owner of several hosts."""
    with contextlib.ExitStack() as stack:
        owned = Owner(stack.enter_context(te.Engine(engine())), config(directory, 4 * MIB))
        stack.callback(owned.close)
        sockets = Sockets((KEY,))
        stack.callback(sockets.close)
        made = Service(owned, sockets, "tcp://127.0.0.1:*")
        stack.callback(made.close)
        yield made


def test_strangers_at_an_owners_port_make_room_for_each_other(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq would keep each for the time of a handshake, as long as there are descriptors."""
    most = 4
    assert service._unauthenticated is not None
    monkeypatch.setattr(service._unauthenticated._crowd, "_of_source_most", most)
    holders = Sockets()
    asker = Asker(holders, Where(service.endpoint, KEY), "abc")
    assert isinstance(asker.ask(Greet(VERSION), TIMEOUT_S), Hello)
    port = urlsplit(service.endpoint).port
    assert port is not None
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            for _ in range(3 * most)
        ]
        for one in strangers[:-most]:
            while one.recv(4096):  # The begin of libzmq's greeting, maybe.
                pass
        assert len(service._unauthenticated) <= most
        assert isinstance(asker.ask(Greet(VERSION), TIMEOUT_S), Hello), "it has proved its secret"
        fresh = Asker(holders, Where(service.endpoint, KEY), "abc")
        assert isinstance(fresh.ask(Greet(VERSION), TIMEOUT_S), Hello), "so has who comes now"
        fresh.close()
    assert "ended a store connection from 127.0.0.1: too many store connections" in caplog.text
    asker.close()
    holders.close()


def test_a_stranger_that_sends_much_is_ended(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated, "BYTES_MAX", 10)
    port = urlsplit(service.endpoint).port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as stranger:
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        while stranger.recv(4096):
            pass


def test_false_entries_hide_no_owner(
    directory: Path, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get a turn, and no more: neither sockets for ever, nor a number."""
    monkeypatch.setattr(far_module, "TRYING_MAX", 4)
    monkeypatch.setattr(far_module, "LOOK_S", 0.0)
    false = [Where(f"ipc://{directory}/nobody-{number}") for number in range(6)]
    ((name, (right,)),) = endpoints(directory).items()
    found = {f"{number:032x}": (where,) for number, where in enumerate(false)}
    sockets, heard = Sockets(), set[int]()

    def set_heard(number: int, is_heard: bool) -> bool:
        heard.add(number) if is_heard else heard.discard(number)
        return True

    far = Following(
        Table(),
        set_heard,
        sockets,
        lambda: {**found, name: (false[0], right)},
        lambda: None,
        lambda _: None,
        0.0,
    )
    far.start()
    until(lambda: heard, "the owner is found behind them")
    (one,) = far.owners()
    assert (one.name, one.where) == (name, right)
    assert len(far._trying) <= 4
    # It may be late for a moment: this follower waits no longer than a second.
    until(lambda: heard == {one.number}, "it alone is heard")
    far.close()
    sockets.close()
