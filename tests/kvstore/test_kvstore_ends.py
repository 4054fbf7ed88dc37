# SPDX-License-Identifier: Apache-2.0
"""What a closed store leaves behind: nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_makers import SIG, TIMEOUT_S, Room, config, descriptors, engine, keys, until
from store_meeting import owning
from store_objects import put_all

import te
from kvstore import serving
from kvstore.client.connecting import Connections
from kvstore.host.place import Place
from kvstore.objects.outcomes import Got, Put
from kvstore.owner import owner as owner_module
from kvstore.owner.owner import Owner
from kvstore.owner.service import Service
from kvstore.protocol.asking import Asker, NoAnswer
from kvstore.protocol.messages import Clear
from kvstore.protocol.sockets import Sockets, Where
from kvstore.store import Store
from kvstore.tiers.base import Laid, Written
from kvstore.tiers.disk import Disk

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
        for pool in (service._slow.threads, connections._threads):
            pool.shutdown()
        with pytest.raises(NoAnswer, match="the owner is being closed"):
            asker.ask(Clear(SIG), TIMEOUT_S)
        until(lambda: service._closing)
        for _ in range(2):
            connections.want(1)
    assert "a bug" not in caplog.text


def test_an_owner_whose_disk_hangs_ends_all_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could start the next one before that: it has the host's lock."""
    begun, ended, statuses = threading.Event(), threading.Event(), list[int]()
    written = Disk.write

    def write(disk: Disk, objects: Sequence[Laid]) -> Written:
        begun.set()
        assert ended.wait(TIMEOUT_S)
        return written(disk, objects)

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    @contextmanager
    def started(store: Store) -> Iterator[None]:
        put_all(store)
        own = store._owners.own
        assert own is not None
        assert own._tiering is not None
        with own._lock:
            own._table.demote_all()
        own._tiering.wake()
        assert begun.wait(TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    monkeypatch.setattr(Disk, "write", write)
    monkeypatch.setattr(owner_module, "DRAIN_S", 0.0)
    monkeypatch.setattr(serving, "ENDING_S", 0.1)
    monkeypatch.setattr(serving.os, "_exit", end)
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    settings = config(directory, 8 * MIB, disk=directory / "disk", disk_size=16 * MIB)
    with contextlib.closing(lock):
        serving.serve(settings, place, lock, 600.0, started)
    assert statuses == [1]
    assert "does not end within 0.1 s, and is ended" in caplog.text
