# SPDX-License-Identifier: Apache-2.0
"""Slots are used again under the eyes of their readers: no get that is called right has other bytes
than those that were stored."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from store_host import owner_here
from store_makers import SIG, TIMEOUT_S, Room, config, engine, until
from store_meeting import owning

import te
from kvstore import _bytes
from kvstore.objects.changes import Keys
from kvstore.objects.copying import Copier
from kvstore.objects.headers import HEADER, HEADER_BYTES
from kvstore.objects.outcomes import Got
from kvstore.objects.pieces import U64
from kvstore.store import Store

NBYTES = 4096
NAMES = 2000
WAYS = [pytest.param(te.config.TRANSPORTS, id="mapped"), pytest.param(("tcp",), id="tcp")]


def named(numbers: npt.NDArray[np.integer]) -> Keys:  # type: ignore[type-arg]
    raw = np.zeros((len(numbers), 2), "<u8")
    raw[:, 0] = numbers
    return raw.view(np.uint8).reshape(-1, 16)


def written(room: Room, numbers: npt.NDArray[np.integer]) -> None:  # type: ignore[type-arg]
    """An object is its number, again and again."""
    room.bytes.view("<u8")[:] = np.asarray(numbers, "<u8")[:, None]


def race(
    directory: Path,
    gets: int,
    seed: int,
    verify: bool,
    batch: int = 32,
    transports: tuple[str, ...] = te.config.TRANSPORTS,
) -> tuple[Counter[Got], int]:
    """Two threads of the owner's process store what they like, in a slab that holds a part of it;
    another store reads. Returns the outcomes, and how many right objects had wrong bytes."""
    outcomes: Counter[Got] = Counter()
    mismatches = 0
    ended = threading.Event()
    settings = {"free_low": 0.3, "free_high": 0.5, "chunk_bytes": 64 << 10}
    lent = config(directory, batch * (22 << 10), **settings)
    reads = config(directory, verify=verify, engine=engine(transports=transports))
    is_mapped = transports != ("tcp",)
    with (
        (owner_here if is_mapped else owning)(lent) as owner,
        (Store if is_mapped else owning)(reads) as guest,
    ):

        def churn(which: int) -> None:
            rng = np.random.default_rng([seed, which])
            room = Room(owner, batch, NBYTES)
            while not ended.is_set():
                numbers = rng.choice(NAMES, batch, replace=False)
                written(room, numbers)
                owner.put(named(numbers), SIG, room.pieces)

        writers = [threading.Thread(target=churn, args=[i]) for i in range(2)]
        for one in writers:
            one.start()
        try:
            until(lambda: len(guest) > batch)
            rng, room = np.random.default_rng(seed), Room(guest, batch, NBYTES)
            # Writers, or who makes room for them, may stand still for the time of all gets.
            while outcomes.total() < gets or not (outcomes[Got.MOVED] or mismatches):
                known = np.flatnonzero(guest.exists(named(np.arange(NAMES)), SIG, NBYTES))
                if len(known) < batch:
                    continue
                numbers = rng.choice(known, batch, replace=False)
                room.bytes[:] = 0
                found = guest.get(named(numbers), SIG, room.pieces)
                right = np.array([one is Got.RIGHT for one in found])
                wrong = (room.bytes.view("<u8") != numbers[:, None]).any(axis=1)
                mismatches += int((right & wrong).sum())
                outcomes.update(found)
        finally:
            ended.set()
            for one in writers:
                one.join(TIMEOUT_S)
    return outcomes, mismatches


@pytest.mark.slow
@pytest.mark.parametrize("transports", WAYS)
@pytest.mark.parametrize("verify", [False, True])
def test_readers_never_take_another_object_for_theirs(
    directory: Path, verify: bool, transports: tuple[str, ...]
) -> None:
    outcomes, mismatches = race(directory, 10_000, 1, verify, transports=transports)
    assert mismatches == 0, outcomes
    assert outcomes[Got.RIGHT] > 0
    assert outcomes[Got.MOVED] > 0, "the race was run, and lost without harm"
    assert not outcomes[Got.CORRUPTED], "what was read whole is right"


@pytest.mark.slow
@pytest.mark.by_turns("a million")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transports", WAYS)
def test_a_million_gets(directory: Path, transports: tuple[str, ...]) -> None:
    """``pytest -m slow tests/kvstore/test_kvstore_race.py``"""
    outcomes, mismatches = race(
        directory, 1_000_000, 2, verify=False, batch=256, transports=transports
    )
    assert mismatches == 0, outcomes
    assert outcomes[Got.MOVED] > 0


@pytest.mark.slow
@pytest.mark.parametrize("transports", WAYS)
def test_without_the_generation_they_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch, transports: tuple[str, ...]
) -> None:
    """What the tests above stand on: everything is compared but the generation and the key, as a
    store would that trusts its index."""

    def blind(read: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        equal: np.ndarray = (read["state"] == wanted["state"]) & (
            read["fingerprint"] == wanted["fingerprint"]
        )
        return equal

    def blindly(codes: np.ndarray, found: Callable[[int], np.ndarray], wanted: np.ndarray) -> Any:
        for i in np.flatnonzero(codes == _bytes.MOVED).tolist():
            if blind(found(i), wanted[i : i + 1])[0]:
                codes[i] = _bytes.RIGHT
        return codes

    def blind_bring(self: Copier, slots: U64, headers: U64, wanted: np.ndarray, *more: Any) -> Any:
        def found(i: int) -> np.ndarray:
            return np.frombuffer(ctypes.string_at(int(headers[i]), HEADER_BYTES), HEADER)

        return blindly(bring(self, slots, headers, wanted, *more), found, wanted)

    def blind_judge(self: Copier, read: np.ndarray, wanted: np.ndarray, *more: Any) -> Any:
        return blindly(judge(self, read, wanted, *more), lambda i: read[i : i + 1], wanted)

    bring, judge = Copier.bring, Copier.judge
    monkeypatch.setattr(Copier, "bring", blind_bring)
    monkeypatch.setattr(Copier, "judge", blind_judge)
    for seed in range(20):
        if race(directory, 10_000, seed, verify=False, transports=transports)[1]:
            return
    pytest.fail("the race above is too slow to show anything")
