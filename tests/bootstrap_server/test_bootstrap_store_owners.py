# SPDX-License-Identifier: Apache-2.0
"""Owners of a store meet at a registry. (With stores: tests/kvstore/test_kvstore_members.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import requests
from bootstrap_http import url
from bootstrap_waits import WAIT_S
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bootstrap_server import BootstrapServer
from bootstrap_server.ranks import store_owners
from bootstrap_server.ranks.errors import RegistryFull
from bootstrap_server.ranks.store_owners import STORE_OWNERS_PATH, EntryOf, StoreOwners

NAMES = [f"{number:032x}" for number in range(4)]
FIRST = 1000


class Owners(RuleBasedStateMachine):
    """They come, renew, move, end and are silent in any order. One that asks with the revision
    that it knows has the entries that there are, always."""

    def __init__(self) -> None:
        super().__init__()
        self.owners, self.now_s = StoreOwners(FIRST), 0.0
        self.kept: dict[str, tuple[str, float]] = {}
        self.known, self.entries = 0, list[str]()

    def _forget(self) -> None:
        self.kept = {name: one for name, one in self.kept.items() if one[1] >= self.now_s}

    def _heard(self, said: EntryOf) -> None:
        told = self.owners.exchange(said, self.now_s)
        self._forget()
        if told.entries is not None:
            self.entries = told.entries
        assert told.revision >= self.known
        self.known = told.revision
        assert sorted(self.entries) == sorted(entry for entry, _ in self.kept.values())

    @rule(name=st.sampled_from(NAMES), entry=st.sampled_from("ab"), kept_s=st.integers(1, 60))
    def renews(self, name: str, entry: str, kept_s: int) -> None:
        self.kept[name] = (entry, self.now_s + kept_s)
        self._heard(EntryOf(name=name, entry=entry, kept_s=kept_s, known=self.known))

    @rule(known=st.booleans())
    def looks(self, known: bool) -> None:
        self._heard(EntryOf(known=self.known if known else 0))

    @rule(name=st.sampled_from(NAMES))
    def ends(self, name: str) -> None:
        self.owners.leave(name)
        self.kept.pop(name, None)

    @rule(seconds=st.integers(0, 40))
    def time_goes_on(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def none_is_kept_twice(self) -> None:
        assert len(self.owners) <= len(NAMES)


TestOwners = Owners.TestCase


def test_what_a_former_registry_has_said_is_not_known() -> None:
    assert StoreOwners(FIRST).exchange(EntryOf(known=FIRST), 0.0).entries == []


def test_too_many_are_refused_and_those_there_are_renew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_owners, "OWNERS_MAX", 2)
    owners = StoreOwners()
    for name in NAMES[:2]:
        owners.exchange(EntryOf(name=name, entry="x"), 0.0)
    with pytest.raises(RegistryFull, match="2 owners"):
        owners.exchange(EntryOf(name=NAMES[2], entry="x"), 1.0)
    owners.exchange(EntryOf(name=NAMES[1], entry="y"), 1.0)
    found = owners.exchange(EntryOf(name=NAMES[2], entry="z"), 10.5).entries
    assert found == ["y", "z"], "the silent one has made room"


def test_they_meet_over_http(server: BootstrapServer) -> None:
    def put(**body: Any) -> Any:
        answer = requests.put(url(server, STORE_OWNERS_PATH), json=body, timeout=WAIT_S)
        return answer.status_code, answer.json()

    status, told = put(name=NAMES[0], entry="here")
    assert (status, told["entries"]) == (200, ["here"])
    assert put(known=told["revision"]) == (200, {"revision": told["revision"], "entries": None})
    assert put(name=NAMES[0], entry="here", known=told["revision"])[1]["entries"] is None
    left = requests.delete(url(server, STORE_OWNERS_PATH), json={"name": NAMES[0]}, timeout=WAIT_S)
    assert (left.status_code, put()[1]["entries"]) == (200, [])


def test_that_there_are_too_many_is_said(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_owners, "OWNERS_MAX", 0)
    body = {"name": NAMES[0], "entry": "x"}
    answer = requests.put(url(server, STORE_OWNERS_PATH), json=body, timeout=WAIT_S)
    assert (answer.status_code, "0 owners" in answer.json()["error"]) == (429, True)


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "x"},
        {"name": NAMES[0], "entry": "x" * 257},
        {"name": NAMES[0], "entry": "two\nlines"},
        {"kept_s": 0},
        {"kept_s": 3601},
        {"known": -1},
    ],
)
def test_what_is_no_entry_is_refused(server: BootstrapServer, bad: dict[str, Any]) -> None:
    answer = requests.put(url(server, STORE_OWNERS_PATH), json=bad, timeout=WAIT_S)
    assert answer.status_code == 400
    assert "bad body" in answer.json()["error"]
