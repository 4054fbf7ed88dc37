# SPDX-License-Identifier: Apache-2.0
"""What the store has: this process uses the owner of its host, as servers do, lends nothing, and
looks into the owner's table."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

import te
from bootstrap_server.admission.secret import Keys
from kvstore.client.status import OwnerSeen
from kvstore.networking import config_of
from kvstore.objects.changes import KEY_BYTES
from kvstore.store import Store

__all__ = ["StoreSource", "StoreState", "open_store"]

logger = logging.getLogger(__name__)

#: How often it is looked whether owners answer.
LOOK_S: Final = 0.5
#: A store without an owner that answers is said to be silent after so long.
SILENT_S: Final = 3.0
#: Prompts of which nothing was found, or nothing loaded, one after another, before that is said.
NEVER: Final = 50
#: Pages of one look-up: a microsecond each.
PAGES_MAX: Final = 8192

#: ``live``: owners answer, and what they have is used. ``silent``: none answers. ``never hits``:
#: no prompt was found in it lately, or what was found was not loaded.
StoreState: TypeAlias = Literal["live", "silent", "never hits"]


def open_store(settings: str, keys: Keys) -> Store:
    """``settings``: a JSON object, as servers have them; what it says of memory to be lent does not
    count. ``keys`` are used if it names no secret file. ``ValueError`` for what is no such object,
    or cannot be used."""
    try:
        values = json.loads(settings)
    except ValueError as error:
        raise ValueError(f"{settings!r} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{settings!r} is no JSON object")
    try:
        return Store(config_of(values, keys=keys).lending_nothing)
    except te.Error as error:
        raise ValueError(str(error)) from error


class StoreSource:
    """The ``Pool`` of ``placement``. ``run`` looks after it; the loop's thread alone uses it, until
    ``close``, after which nothing is known."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """``store`` is closed by ``close``."""
        self._store: Store | None = store
        self._clock = clock
        self._began_s = clock()
        self._heard_s: float | None = None
        self._is_silent = self._is_vain = False
        #: Look-ups that have found nothing, and loads that did not come, since one that did.
        self._unfound = self._unloaded = 0
        self.owners = self.objects = 0
        self.looks = self.found = 0
        self.expected_tokens = self.loaded_tokens = 0.0

    def close(self) -> None:
        """Idempotent. What has asked this holds it to the interpreter's end, when nothing of a
        store can be freed any more: so the store is let go."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def age_s(self, now_s: float) -> float | None:
        """Time since an owner has answered; None if none has."""
        return None if self._heard_s is None else now_s - self._heard_s

    @property
    def state(self) -> StoreState:
        if self._is_silent or self._heard_s is None:
            return "silent"
        return "never hits" if self._is_vain else "live"

    def first_of(self, digests: Sequence[bytes]) -> int:
        """How many of these pages, from the first on, the store has without a gap."""
        if not digests or not self.owners or self._store is None:
            return 0
        packed = b"".join(one[:KEY_BYTES] for one in digests[:PAGES_MAX])
        known = self._store.known(np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES))
        lacks = np.flatnonzero(~known)
        count = int(lacks[0]) if len(lacks) else len(known)
        self.looks += 1
        self.found += count > 0
        self._unfound = 0 if count else self._unfound + bool(self.objects)
        return count

    def told(self, expected: float, found: float) -> None:
        """A server was expected to load so many tokens, and has loaded so many."""
        self.expected_tokens += expected
        self.loaded_tokens += found
        if expected or found:
            self._unloaded = 0 if found else self._unloaded + 1

    async def run(self) -> None:
        """Looks after the store until it is cancelled."""
        while True:
            self._heard(await asyncio.to_thread(self._ask))
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Whether its owners answer, and whether it is of use. Waits for them."""
        self._heard(self._ask())

    def _ask(self) -> Sequence[OwnerSeen]:
        """In a thread of its own: one that stands still does not answer for 2 s."""
        store = self._store
        return () if store is None else store.ask_lenders()

    def _heard(self, owners: Sequence[OwnerSeen]) -> None:
        now_s = self._clock()
        usable = [one for one in owners if one.usable]
        self.owners, self.objects = len(usable), sum(one.objects for one in usable)
        if usable:
            self._heard_s = now_s
        since_s = self._began_s if self._heard_s is None else self._heard_s
        is_silent = now_s - since_s >= SILENT_S
        if is_silent and not self._is_silent:
            logger.warning(
                "no owner of the store answers: what it has is not known, and counts as nothing"
            )
        elif self._is_silent and not is_silent:
            logger.info("the store answers: %d owners", self.owners)
        self._is_silent = is_silent
        self._tell_vain()

    def _tell_vain(self) -> None:
        is_vain = self._unfound >= NEVER or self._unloaded >= NEVER
        if is_vain and not self._is_vain:
            what = (
                f"nothing of the last {self._unfound} prompts is in it"
                if self._unfound >= NEVER
                else f"servers have loaded nothing of {self._unloaded} prompts that are in it"
            )
            logger.warning(
                "the store is of no use to the router: %s; is it the servers' (--store), of the "
                "same model and page size?",
                what,
            )
        self._is_vain = is_vain

    def as_json(self) -> dict[str, Any]:
        """For ``GET /v1/router``."""
        age_s = self.age_s(self._clock())
        return {
            "state": self.state,
            "age_s": None if age_s is None else round(age_s, 1),
            "owners": self.owners,
            "objects": self.objects,
            "looks": self.looks,
            "found": self.found,
            "expected_tokens": round(self.expected_tokens),
            "loaded_tokens": round(self.loaded_tokens),
        }
