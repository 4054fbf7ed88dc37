# SPDX-License-Identifier: Apache-2.0
"""What is asked of all owners that may have an object: how large it is, to keep it, to remove
it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.deadline import Deadline
from kvstore.client.handles import Handle
from kvstore.client.pool import Pool
from kvstore.objects.changes import ANY, Found, Keys
from kvstore.objects.outcomes import Pinned, Removed
from kvstore.owner.claims import CLAIM_OBJECTS_MAX
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import Answer, Gone
from kvstore.rules.pins import PIN_S_MAX

__all__ = ["Managing"]

logger = logging.getLogger(__name__)

MIN_PIN_S: Final = 0.001


class Managing:
    """Of one process. Thread-safe; see ``Store``."""

    def __init__(self, owners: Pool) -> None:
        self._owners = owners

    def sizes(self, keys: Keys, signature: bytes) -> npt.NDArray[np.int64]:
        """See ``Store.sizes``."""
        sizes = np.zeros(len(keys), np.int64)
        for rows, handle in self._holders(keys):
            try:
                sizes[rows] = np.maximum(sizes[rows], handle.sizes(keys[rows], signature))
            except NoAnswer as exc:
                logger.warning("sizes of objects are not known: %s", exc)
        return sizes

    def remove(self, keys: Keys, signature: bytes) -> list[Removed]:
        """See ``Store.remove``."""
        found = np.zeros(len(keys), np.bool_)
        handles = self._handles()
        is_whole = len(handles) == len(self._owners.usable())
        is_whole = is_whole and all(one.usable for one in self._owners.seen())
        for first in range(0, len(keys), CLAIM_OBJECTS_MAX):
            some = keys[first : first + CLAIM_OBJECTS_MAX]
            asked = [(one, one.remove_soon(some, signature)) for one in handles]
            answers = self._answered(asked, "objects were not removed", len(some))
            is_whole = is_whole and len(answers) == len(handles)
            handles = [one for one, _ in answers]
            for _, gone in answers:
                found[first : first + len(some)] |= np.frombuffer(gone.found, np.uint8) != 0
        if not is_whole:
            return [Removed.UNREACHABLE] * len(keys)
        return [Removed.REMOVED if one else Removed.MISSING for one in found.tolist()]

    def remove_soon(self, keys: Keys, signature: bytes) -> None:
        """As ``remove``. Nobody waits: an owner that does not hear it keeps them."""
        for handle in self._handles():
            for first in range(0, len(keys), CLAIM_OBJECTS_MAX):
                handle.remove_soon(keys[first : first + CLAIM_OBJECTS_MAX], signature)

    def clear(self, signature: bytes) -> int:
        """See ``Store.clear``."""
        asked = [(one, one.clear_soon(signature)) for one in self._handles()]
        answers = self._answered(asked, "the objects of a signature were not removed", 0)
        return sum(gone.count for _, gone in answers)

    def pin(self, keys: Keys, signature: bytes, ttl_s: float) -> list[Pinned]:
        """See ``Store.pin``."""
        if not MIN_PIN_S <= ttl_s <= PIN_S_MAX:
            raise ValueError(f"ttl_s={ttl_s} must be between {MIN_PIN_S} and {PIN_S_MAX:g} seconds")
        outcomes = [Pinned.MISSING] * len(keys)
        for rows, handle in self._holders(keys):
            try:
                found, why = handle.pin(keys[rows], signature, ttl_s)
            except NoAnswer as exc:
                found, why = [Pinned.MISSING] * len(rows), str(exc)
            if why:
                logger.warning("not all objects were pinned: %s", why)
            for row, one in zip(rows.tolist(), found, strict=True):
                if outcomes[row] is not Pinned.PINNED and one is not Pinned.MISSING:
                    outcomes[row] = one
        return outcomes

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """See ``Store.unpin``."""
        for rows, handle in self._holders(keys):
            try:
                handle.unpin(keys[rows], signature)
            except NoAnswer as exc:
                logger.warning("objects were not unpinned: %s", exc)

    def _handles(self) -> list[Handle]:
        """The owners that can be used."""
        handles = [self._owners.handle(number) for number in self._owners.usable()]
        return [one for one in handles if one is not None]

    def _holders(self, keys: Keys) -> Iterator[tuple[npt.NDArray[np.intp], Handle]]:
        """The owners that are said to have some of the keys with any signature, and which rows."""
        for number in self._owners.usable():
            held = self._owners.held_by(number, keys, ANY)
            rows = np.flatnonzero(held["found"] != Found.MISSING)
            handle = self._owners.handle(number) if len(rows) else None
            if handle is not None:
                for first in range(0, len(rows), CLAIM_OBJECTS_MAX):
                    yield rows[first : first + CLAIM_OBJECTS_MAX], handle

    def _answered(
        self, asked: Sequence[tuple[Handle, Future[Answer]]], not_done: str, keys: int
    ) -> list[tuple[Handle, Gone]]:
        """Waits for owners side by side; those that have answered, of each of so many keys."""
        until, silent = Deadline(self._owners.request_timeout_s), list[str]()
        answers: list[tuple[Handle, Gone]] = []
        for handle, future in asked:
            try:
                answer = future.result(until.left_s)
            except NoAnswer as exc:
                silent.append(str(exc))
            except TimeoutError:
                silent.append(f"owner {handle.source.number} does not answer in time")
            else:
                if isinstance(answer, Gone) and len(answer.found) == keys:
                    answers.append((handle, answer))
                else:
                    silent.append(f"an owner answers with {type(answer).__name__}")
        if silent:
            more = f" (and {len(silent) - 1} more owners)" if len(silent) > 1 else ""
            logger.warning("%s: %s%s", not_done, silent[0], more)
        return answers
