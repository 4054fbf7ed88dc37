# SPDX-License-Identifier: Apache-2.0
"""Objects that an owner takes at once: small ones from afar, larger ones from processes of the same
host, and any from its own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_far import Far
from store_makers import SIG, TIMEOUT_S, Room, config, contents, engine, keys, until
from store_meeting import owning

from kvstore.client import puts
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.protocol import messages
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import STORED_BYTES_MAX
from kvstore.store import Store

N, NBYTES = 8, 5000
KEYS = keys(N)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def by_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_this_way(*_: Any) -> None:
        raise AssertionError("it was claimed and written")

    monkeypatch.setattr(puts, "put_group", not_this_way)


def filled(at: Store, count: int = N, nbytes: int = NBYTES) -> Room:
    room = Room(at, count, nbytes)
    room.bytes[:] = contents(count, nbytes)
    return room


@pytest.mark.parametrize("way", ["guest", "tcp_guest"])
@pytest.mark.parametrize("sizes", [(NBYTES,), (1, 999, 4000)])
def test_what_was_stored_comes_back(
    request: pytest.FixtureRequest, owner: Store, way: str, sizes: tuple[int, ...]
) -> None:
    guest: Store = request.getfixturevalue(way)
    until(guest._owners.usable, "the owner is known")
    for at, names in ((guest, KEYS), (owner, keys(N, 1))):
        room, back = filled(at), Room(at, N, NBYTES)
        assert at.put(names, SIG, room.split(*sizes)) == [Put.STORED] * N
        assert at.put(names, SIG, room.split(*sizes)) == [Put.EXISTS] * N
        until(lambda: at.exists(names, SIG, NBYTES).all(), "it is announced")  # noqa: B023
        assert at.get(names, SIG, back.split(*sizes)) == [Got.RIGHT] * N
        assert (back.bytes == room.bytes).all()
    assert owner._owners.own is not None
    assert owner._owners.own.stats().published == 2 * N


def test_those_that_are_there_are_left_out(guest: Store, owner: Store) -> None:
    until(guest._owners.usable, "the owner is known")
    room = filled(guest)
    assert owner.put(KEYS[2:4], SIG, filled(owner).pieces.of([2, 3])) == [Put.STORED] * 2
    outcomes = guest.put(KEYS, SIG, room.pieces)
    assert outcomes == [Put.STORED] * 2 + [Put.EXISTS] * 2 + [Put.STORED] * 4
    until(lambda: guest.exists(KEYS, SIG, NBYTES).all(), "they are announced")
    back = Room(guest, N, NBYTES)
    assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()


def test_a_put_that_is_larger_than_the_memory_is_stored_in_part(directory: Path) -> None:
    with owning(config(directory, 256 << 10, chunk_bytes=64 << 10, free_low=0.0)) as owner:
        room = filled(owner, 50)
        for seed in range(2):  # Also where others have to leave for it.
            found = owner.put(keys(50, seed), SIG, room.pieces)
            assert found == [Put.STORED] * 24 + [Put.NO_SPACE] * 26


def test_larger_batches_and_memory_that_cannot_be_read_are_written(
    owner: Store, guest: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(guest._owners.usable, "the owner is known")
    written: list[int] = []

    def put_group(_handle: Any, names: Any, *_: Any) -> list[Put]:
        written.append(len(names))
        return [Put.STORED] * len(names)

    monkeypatch.setattr(puts, "put_group", put_group)
    large = Room(guest, 4, STORED_BYTES_MAX // 4)
    assert guest.put(keys(4, 5), SIG, large.pieces) == [Put.STORED] * 4
    assert not written, "just small enough"
    larger = Room(guest, 4, STORED_BYTES_MAX // 4 + 1)
    guest.put(keys(4, 6), SIG, larger.pieces)
    assert written == [4]
    unreadable = Room(guest, 1, 4096)
    guest.deregister(unreadable.region)
    guest.register(unreadable.bytes.ctypes.data, 4096)
    guest.put(keys(1, 7), SIG, Pieces.whole([unreadable.bytes.ctypes.data], 4096))
    assert written == [4, 1]


def test_any_batch_is_taken_from_the_owners_own_process(owner: Store) -> None:
    room, back = filled(owner, 12, 400_000), Room(owner, 12, 400_000)
    assert owner.put(keys(12, 3), SIG, room.split(1, 1023, 398_976)) == [Put.STORED] * 12
    assert owner.get(keys(12, 3), SIG, back.split(300_000, 100_000)) == [Got.RIGHT] * 12
    assert (back.bytes == room.bytes).all()


def test_a_message_of_another_length_is_refused(guest: Store, owner: Store) -> None:
    until(guest._owners.usable, "the owner is known")
    (far,) = guest._owners._following.owners()
    store_9 = messages.Store(keys(2).tobytes(), SIG, 5, b"123456789")
    with pytest.raises(NoAnswer, match="9 bytes are not 2 objects of 5"):
        far.asker.ask(store_9, TIMEOUT_S)
    too_long = bytes(messages.STORED_BYTES_MAX + 1)
    with pytest.raises(NoAnswer, match="the question cannot be read"):
        far.asker.ask(messages.Store(keys(1).tobytes(), SIG, 5, too_long), TIMEOUT_S)
    with pytest.raises(NoAnswer, match="Take cannot be asked this way"):
        far.asker.ask(messages.Take(keys(1).tobytes(), SIG, 5, 1000), TIMEOUT_S)
    assert len(owner) == 0


@pytest.mark.slow
def test_an_owner_that_does_not_answer_costs_the_deadline(
    directory: Path, start_far: Callable[..., Far], caplog: pytest.LogCaptureFixture
) -> None:
    far = start_far(8 * MIB, 0, NBYTES)
    with owning(config(directory, engine=engine(connect_timeout_s=1.0))) as guest:
        until(guest._owners.usable, "the owner is known")
        far.signal(signal.SIGSTOP)
        found = guest.put(KEYS, SIG, filled(guest).pieces, timeout_s=0.2)
        assert found == [Put.TIMED_OUT] * N
        far.signal(signal.SIGCONT)
        until(guest._owners.usable, "it is back")
        until(lambda: set(guest.put(KEYS, SIG, filled(guest).pieces)) <= {Put.STORED, Put.EXISTS})
