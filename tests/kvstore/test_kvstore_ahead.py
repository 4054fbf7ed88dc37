# SPDX-License-Identifier: Apache-2.0
"""Claims that are made before their objects are known: a put of what fits one asks once, and stores
what it was asked for or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_makers import SIG, TIMEOUT_S, Room, config, contents, engine, keys, until
from store_meeting import owning
from store_objects import KEYS, NBYTES, N, filled, handle_of
from test_kvstore_object_table import NAMES, store, table_of

import te
from kvstore.client.aheads import Aheads
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.owner.claims import Content
from kvstore.owner.owner import Owner
from kvstore.protocol.asking import Asker
from kvstore.protocol.messages import Ahead, Claim, Publish, Question
from kvstore.rules.object_table import AHEAD_FREE, Verdict
from kvstore.store import Store


@pytest.fixture
def far_guest(owner: Store, directory: Path) -> Iterator[Store]:
    """Its objects are too many bytes for one message to the owner, and its memory is not mapped."""
    with owning(config(directory, engine=engine(transports=("tcp",)))) as one:
        until(one._owners.usable, "the owner is known")
        yield one


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """What owners were asked, except what follows them."""
    questions: list[Question] = []
    ask = Asker.ask

    def noted(self: Asker, question: Question, timeout_s: float) -> object:
        questions.append(question)
        return ask(self, question, timeout_s)

    monkeypatch.setattr(Asker, "ask", noted)
    return questions


def own_of(owner: Store) -> Owner:
    assert owner._owners.own is not None
    return owner._owners.own


def put(store: Store, seed: int, count: int = N, nbytes: int = NBYTES) -> list[Put]:
    room = filled(store, count, nbytes, seed)
    return store.put(keys(count, seed), SIG, room.pieces)


def is_right(store: Store, seed: int, count: int = N, nbytes: int = NBYTES) -> bool:
    room = Room(store, count, nbytes)
    got = store.get(keys(count, seed), SIG, room.pieces)
    return set(got) == {Got.RIGHT} and bool((room.bytes == contents(count, nbytes, seed)).all())


def test_from_the_second_put_of_a_shape_on_the_owner_is_asked_once(
    owner: Store, far_guest: Store, asked: list[Question]
) -> None:
    for seed in range(4):
        assert put(far_guest, seed) == [Put.STORED] * N
    assert [type(one) for one in asked] == [Claim] + [Publish] * 4
    assert put(far_guest, 5, N - 3) == [Put.STORED] * (N - 3)
    assert type(asked[-1]) is Publish
    for seed, count in ((0, N), (1, N), (2, N), (3, N), (5, N - 3)):
        for one in (owner, far_guest):
            assert is_right(one, seed, count), "its bytes are those of its key"
    assert own_of(owner).stats().objects == 5 * N - 3


def test_slots_that_nothing_was_written_to_are_free_again(owner: Store, far_guest: Store) -> None:
    own = own_of(owner)
    assert put(far_guest, 0) == [Put.STORED] * N
    ahead = own.stats().bytes_used // 2
    assert put(far_guest, 1, 7, NBYTES) == [Put.STORED] * 7
    of_objects = ahead // N * (N + 7)
    assert own.stats().bytes_used == of_objects + ahead // N * 7, "and seven more are claimed ahead"


def test_what_somebody_has_stored_meanwhile_is_there_already(
    owner: Store, far_guest: Store
) -> None:
    assert put(far_guest, 0) == [Put.STORED] * N
    used = own_of(owner).stats().bytes_used
    some, room = keys(N, 1), filled(far_guest, seed=1)
    # Nobody has told the guest.
    assert owner.put(some[2:4], SIG, filled(owner, seed=1).pieces.of([2, 3])) == [Put.STORED] * 2
    handle = handle_of(far_guest, 1)
    grant = handle.claimed_ahead(some, SIG, NBYTES)
    assert grant is not None
    slots = handle.source.slots(np.array(grant.slots, np.uint64))
    handle.source.peer.write(room.pieces.blocks(slots, 0, to_slots=True), grant.tag).wait(TIMEOUT_S)
    why, verdicts = handle.publish(grant, Copier().checksums(room.pieces), TIMEOUT_S)
    assert not why
    wanted = [Verdict.GRANTED] * N
    wanted[2:4] = [Verdict.EXISTS] * 2
    assert verdicts == wanted
    until(lambda: is_right(far_guest, 1), "the guest is told of what it has published")
    assert is_right(owner, 1)
    assert own_of(owner).stats().bytes_used == used + used // 2, "two slots were given back"


def test_one_that_is_over_is_not_missed(
    owner: Store, far_guest: Store, asked: list[Question]
) -> None:
    own = own_of(owner)
    assert put(far_guest, 0) == [Put.STORED] * N
    used = own.stats().bytes_used
    now = own.storing._clock
    own.storing._clock = lambda: now() + 3600.0
    own.tick()
    own.storing._clock = now
    until(lambda: own.stats().bytes_used == used // 2, "the owner has freed the slots")
    assert own.stats().abandoned == 0, "no object was lost"
    assert put(far_guest, 1) == [Put.STORED] * N
    assert [type(one) for one in asked] == [Claim, Publish, Claim, Publish]
    assert is_right(owner, 1)


def test_one_of_another_shape_is_given_up(owner: Store, far_guest: Store) -> None:
    own = own_of(owner)
    assert put(far_guest, 0) == [Put.STORED] * N
    used = own.stats().bytes_used
    assert put(far_guest, 1, 8, 2 * NBYTES) == [Put.STORED] * 8
    stored = used // 2 + 8 * 10 * UNIT_BYTES
    until(lambda: own.stats().bytes_used == stored, "its slots are free")
    assert is_right(owner, 1, 8, 2 * NBYTES)


def test_wrong_checksums_cost_the_object_and_bring_no_other_bytes(
    owner: Store, far_guest: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a source that was changed while it was stored."""
    with monkeypatch.context() as patch:
        patch.setattr(
            Copier, "checksums", lambda _, pieces: np.arange(len(pieces), dtype=np.uint64)
        )
        assert put(far_guest, 0) == [Put.STORED] * N
    room = Room(owner, N, NBYTES)
    assert set(owner.get(KEYS, SIG, room.pieces)) == {Got.CORRUPTED}
    until(lambda: not owner.exists(KEYS, SIG, NBYTES).any(), "they are removed")


def test_without_checksums_the_owner_computes_them(owner: Store, far_guest: Store) -> None:
    """For memory that the processor cannot read, of which the store has an address alone."""
    room = np.zeros((N, NBYTES), np.uint8)
    room[:] = contents(N, NBYTES, 3)
    region = far_guest.register(room.ctypes.data, room.nbytes)
    starts = room.ctypes.data + np.arange(N, dtype=np.uint64) * np.uint64(NBYTES)
    for seed in (3, 4):  # The second one is written to slots that were claimed ahead.
        room[:] = contents(N, NBYTES, seed)
        stored = far_guest.put(keys(N, seed), SIG, Pieces.whole(starts, NBYTES))
        assert stored == [Put.STORED] * N
        assert is_right(owner, seed)
    far_guest.deregister(region)


@pytest.mark.parametrize(
    ("named", "nbytes"), [(N - 1, N * NBYTES), (N + 1, N * NBYTES), (N, (N - 1) * NBYTES)]
)
def test_what_was_not_written_whole_is_not_stored(
    owner: Store, far_guest: Store, named: int, nbytes: int
) -> None:
    own = own_of(owner)
    assert put(far_guest, 0) == [Put.STORED] * N
    used = own.stats().bytes_used
    handle = handle_of(far_guest, 1)
    grant = handle.claimed_ahead(keys(N, 1), SIG, NBYTES)
    assert grant is not None
    room = filled(far_guest, seed=1)
    slots = handle.source.slots(np.array(grant.slots, np.uint64))
    some = room.pieces.of(range(nbytes // NBYTES))
    blocks = some.blocks(slots[: len(some)], 0, to_slots=True)
    handle.source.peer.write(blocks, grant.tag).wait(TIMEOUT_S)
    held = own.storing.begin_publishing(grant.claim_id)
    assert held is not None
    until(held.is_closed, "the fence")
    content = Content(np.zeros(named, np.uint64), keys(named, 1), SIG)
    assert own.storing.end_publishing(held, content)[0] == (
        f"1 writes of {nbytes} bytes arrived, not one of {named * NBYTES}"
    )
    assert own.stats().bytes_used == used // 2, "its slots are free"
    assert not owner.exists(keys(N, 1), SIG, NBYTES).any()


def test_more_objects_than_slots_are_refused_though_so_many_bytes_came(
    owner: Store, far_guest: Store
) -> None:
    """One slot was written twice."""
    own = own_of(owner)
    assert put(far_guest, 0) == [Put.STORED] * N
    handle = handle_of(far_guest, 1)
    grant = handle.claimed_ahead(keys(N, 1), SIG, NBYTES)
    assert grant is not None
    room = filled(far_guest, seed=1)
    slots = handle.source.slots(np.array(grant.slots, np.uint64))
    one = room.pieces.of([0]).blocks(slots[:1], 0, to_slots=True)
    blocks = te.Blocks.concat([room.pieces.blocks(slots, 0, to_slots=True), one])
    handle.source.peer.write(blocks, grant.tag).wait(TIMEOUT_S)
    held = own.storing.begin_publishing(grant.claim_id)
    assert held is not None
    until(held.is_closed, "the fence")
    content = Content(np.zeros(N + 1, np.uint64), keys(N + 1, 1), SIG)
    assert "arrived, not one of" in own.storing.end_publishing(held, content)[0]
    assert not owner.exists(keys(N, 1), SIG, NBYTES).any()


def test_a_client_has_one_and_they_are_a_small_part_of_the_memory(
    owner: Store, far_guest: Store
) -> None:
    own = own_of(owner)
    assert put(far_guest, 0) == [Put.STORED] * N
    engine = far_guest._memory.engine
    assert own.storing._aheads._nbytes == {te.Identity(engine.id, engine.epoch): N * NBYTES}
    handle = handle_of(far_guest, 1)
    grant = handle.claim(keys(1, 9), SIG, NBYTES, TIMEOUT_S)
    held = own.storing.begin_publishing(grant.claim_id)
    assert held is not None
    assert own.storing.claim_ahead(held, 1) is None, "it has one"
    held.writer = te.Identity("0" * 32, 1)
    assert own.storing.claim_ahead(held, 1) is not None
    held.writer = te.Identity("1" * 32, 1)
    assert own.storing.claim_ahead(held, 0) is None
    assert own.storing.claim_ahead(held, 2) is None, "of 8 MiB 256 KiB may be claimed ahead"
    own.storing.abandon(grant.claim_id)


def test_a_table_claims_ahead_while_much_is_free() -> None:
    table, _, _ = table_of(2)  # 16 slots of one unit
    claim = table.claim_ahead(4, UNIT_BYTES, 5.0)
    assert claim is not None
    assert table.claim_ahead(4, UNIT_BYTES, 5.0) is None, f"{AHEAD_FREE} times as many are not free"
    assert table.claim_ahead(1, 1 << 30, 5.0) is None, "larger than any slot"
    store(table, NAMES[:1])
    assert table.claim(NAMES[1:2], SIG, UNIT_BYTES, 9.0).verdicts == [Verdict.GRANTED]
    assert table.take_claim(claim.id) is claim
    again = np.concatenate([NAMES[:3], NAMES[2:3]])
    named = table.name(claim, again, SIG)
    assert named.verdicts == [
        Verdict.EXISTS,
        Verdict.BEING_STORED,
        Verdict.GRANTED,
        Verdict.BEING_STORED,
    ]
    assert named.slots == [claim.slots[2]]
    table.publish(named, [7])
    assert table.places(NAMES[2:3], SIG, UNIT_BYTES) == [(claim.slots[2], 1)]
    assert table.slab.used_bytes == 3 * UNIT_BYTES
    other = table.claim_ahead(2, UNIT_BYTES, 5.0)
    assert other is not None
    assert table.overdue(5.1) == [other]
    table.take_claim(other.id)
    table.abandon(other)
    assert table.slab.used_bytes == 3 * UNIT_BYTES
    nothing = table.claim_ahead(1, UNIT_BYTES, 5.0)
    assert nothing is not None
    table.take_claim(nothing.id)
    table.publish(table.name(nothing, NAMES[:1], SIG), np.zeros(0, np.uint64))
    assert table.slab.used_bytes == 3 * UNIT_BYTES


def test_it_is_used_once_and_for_half_of_its_time() -> None:
    now = [100.0]
    aheads = Aheads(lambda: now[0])
    assert aheads.take() is None
    aheads.keep(Ahead(7, 9, np.array([3, 4], "<u4").tobytes(), 10_000), 4096, 100.0)
    now[0] = 104.9
    claimed = aheads.take()
    assert claimed is not None
    assert (claimed.grant.claim_id, claimed.grant.tag, claimed.grant.slots) == (7, 9, [3, 4])
    assert aheads.take() is None
    aheads.keep(Ahead(7, 9, bytes(4), 10_000), 4096, 100.0)
    now[0] = 105.0
    assert aheads.take() is None
    aheads.keep(Ahead(7, 9, bytes(4), 10_000), 4096, 105.0)
    aheads.drop()
    assert aheads.take() is None
    for bad in (Ahead(7, 0, bytes(4), 1), Ahead(7, 1 << 64, bytes(4), 1), Ahead(7, 9, b"", 1)):
        with pytest.raises(ValueError, match="are no claim"):
            aheads.keep(bad, 4096, 0.0)
    with pytest.raises(ValueError, match="3 bytes of slots are no claim"):
        aheads.keep(Ahead(7, 9, bytes(3), 1), 4096, 0.0)
