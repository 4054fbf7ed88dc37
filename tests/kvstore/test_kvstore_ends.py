# SPDX-License-Identifier: Apache-2.0
"""What a closed store leaves behind: nothing."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import pytest
from store_makers import SIG, TIMEOUT_S, Room, config, descriptors, engine, keys, until
from store_meeting import owning

import te
from kvstore.client.connecting import Connections
from kvstore.objects.outcomes import Got, Put
from kvstore.owner.owner import Owner
from kvstore.owner.service import Service
from kvstore.protocol.asking import Asker, NoAnswer
from kvstore.protocol.messages import Clear
from kvstore.protocol.sockets import Sockets, Where

MIB = 1 << 20


def put_and_get(directory: Path) -> None:
    with owning(config(directory, 8 * MIB)), owning(config(directory)) as guest:
        room = Room(guest, 4, 5000)
        until(lambda: guest.put(keys(4), SIG, room.pieces) == [Put.STORED] * 4)
        until(lambda: guest.get(keys(4), SIG, room.pieces) == [Got.RIGHT] * 4)


def test_closed_stores_give_back_their_descriptors_at_once(directory: Path) -> None:
    """Not when Python next looks for garbage, which in a big process may be never."""
    put_and_get(directory)  # zmq makes some that it keeps
    gc.collect()
    before = descriptors()
    gc.disable()
    try:
        put_and_get(directory)
        until(lambda: descriptors() <= before)
    finally:
        gc.enable()


def test_a_store_that_is_not_closed_before_the_interpreter_ends_logs_no_bug(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The interpreter ends the threads of all pools first. Others may run for long after that."""
    with contextlib.ExitStack() as stack:
        owned = Owner(stack.enter_context(te.Engine(engine())), config(directory, 4 * MIB))
        stack.callback(owned.close)
        sockets = Sockets()
        stack.callback(sockets.close)
        service = Service(owned, sockets, f"ipc://{directory}/owner")
        stack.callback(service.close)
        connections = Connections(lambda _: None, lambda _: None)
        stack.callback(connections.close)
        asker = Asker(sockets, Where(service.endpoint), "abc")
        stack.callback(asker.close)
        for pool in (service._ticks, service._slow.threads, connections._threads):
            pool.shutdown()
        with pytest.raises(NoAnswer, match="the owner is being closed"):
            asker.ask(Clear(SIG), TIMEOUT_S)
        until(lambda: service._closing)
        for _ in range(2):
            connections.want(1)
    assert "a bug" not in caplog.text
