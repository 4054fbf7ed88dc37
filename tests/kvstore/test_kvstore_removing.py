# SPDX-License-Identifier: Apache-2.0
"""Owners are asked side by side to remove objects: those that are silent cost one deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from store_makers import SIG, keys, until
from store_objects import KEYS, N, put_all

from kvstore.client import managing
from kvstore.objects.outcomes import Removed
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import Answer, Done, Gone
from kvstore.store import Store


class Asked(Future[Answer]):
    """Knows how long it was waited for."""

    def __init__(self, waits: list[float | None]) -> None:
        super().__init__()
        self._waits = waits

    def result(self, timeout: float | None = None) -> Answer:
        self._waits.append(timeout)
        return super().result(timeout)


class Remote:
    """An owner that answers when it is told to."""

    def __init__(self, number: int, waits: list[float | None]) -> None:
        self.source = SimpleNamespace(number=number)
        self.futures: list[Asked] = []
        self._waits = waits
        self._asked = 0
        self.then: Callable[[], object] = lambda: None

    def clear_soon(self, _: bytes) -> Asked:
        return self.remove_soon((), b"")

    def remove_soon(self, keys: Sequence[object], _: bytes) -> Asked:
        self.futures.append(Asked(self._waits))
        self._asked = len(keys)
        self.then()
        return self.futures[-1]

    def answer(self) -> None:
        """It had every second one."""
        found = [row % 2 for row in range(self._asked)]
        self.futures[-1].set_result(Gone(sum(found), bytes(found)))


@pytest.fixture
def waits() -> list[float | None]:
    return []


@pytest.fixture
def remotes(
    owner: Store, monkeypatch: pytest.MonkeyPatch, waits: list[float | None]
) -> list[Remote]:
    found = [Remote(number, waits) for number in range(1, 4)]
    by_number: dict[int, Any] = {one.source.number: one for one in found}
    monkeypatch.setattr(owner._owners, "usable", lambda: list(by_number))
    monkeypatch.setattr(owner._owners, "handle", by_number.__getitem__)
    return found


def remove(store: Store) -> None:
    store.remove(KEYS, SIG)


def clear(store: Store) -> None:
    store.clear(SIG)


@pytest.mark.parametrize("call", [remove, clear])
def test_all_are_asked_before_one_is_waited_for(
    call: Callable[[Store], None],
    owner: Store,
    remotes: list[Remote],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer() -> None:
        for one in remotes:
            one.answer()

    remotes[-1].then = answer
    call(owner)
    assert [len(one.futures) for one in remotes] == [1, 1, 1]
    assert not caplog.records


@pytest.mark.parametrize("call", [remove, clear])
def test_silent_owners_cost_one_deadline_and_one_line(
    call: Callable[[Store], None],
    owner: Store,
    remotes: list[Remote],
    waits: list[float | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner._owners._config = replace(owner._config, request_timeout_s=0.01)
    remotes[1].then = remotes[1].answer
    call(owner)
    assert waits[1:] == [0.0, 0.0], "the first one has had all the time"
    assert "not removed: owner 1 does not answer in time (and 1 more owners)" in caplog.text
    assert len(caplog.records) == 1


def test_owners_that_have_failed_once_are_not_asked_for_the_rest(
    owner: Store,
    remotes: list[Remote],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(managing, "CLAIM_OBJECTS_MAX", 5)
    remotes[0].then = lambda: remotes[0].futures[-1].set_exception(NoAnswer("on purpose"))
    remotes[1].then = remotes[1].answer
    remotes[2].then = lambda: remotes[2].futures[-1].set_result(Done())
    owner.remove(keys(15), SIG)
    assert [len(one.futures) for one in remotes] == [1, 3, 1]
    assert "objects were not removed: on purpose (and 1 more owners)" in caplog.text


def test_whatever_one_owner_had_is_removed(owner: Store, remotes: list[Remote]) -> None:
    for one in remotes:
        one.then = one.answer
    assert owner.remove(keys(4), SIG) == [Removed.MISSING, Removed.REMOVED] * 2
    remotes[1].then = lambda: remotes[1].futures[-1].set_result(Gone(0, b""))
    assert owner.remove(keys(4), SIG) == [Removed.UNREACHABLE] * 4, "it says it not of each"


def test_cleared_objects_are_counted(guest: Store, owner: Store) -> None:
    until(guest._owners.usable, "the owner is known")
    put_all(guest)
    assert guest.clear(bytes(16)) == 0
    assert guest.clear(SIG) == N
    assert owner.clear(SIG) == 0
