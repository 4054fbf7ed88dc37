# SPDX-License-Identifier: Apache-2.0
"""Reads objects part by part out of owners' memory that is mapped here. Their owner is asked
nothing: it may stand still, or be gone."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from kvstore.client.reading import Group, HeaderRooms
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import Records
from kvstore.objects.copying import Copier, gather
from kvstore.objects.headers import HEADER, HEADER_BYTES
from kvstore.objects.outcomes import Got
from kvstore.objects.pieces import U64, Pieces
from kvstore.protocol.calling import Window

__all__ = ["MappedGroup"]


class MappedGroup(Group):
    """As ``Group``, with this difference: a part is copied by who waits for it, not before, and
    nothing is under way at any other time. The processor can write the destination."""

    def __init__(self, group: Group, window: Window, copier: Copier) -> None:
        """``group``: nothing of it was begun yet."""
        super().__init__(group.source, group.rows, group.slots, group.wanted)
        self._window: Final = window
        self._copier: Final = copier
        self._parts: list[tuple[Pieces, int]] = []
        self._copied = 0
        self._copying_s = 0.0

    def begin(self, pieces: Pieces, offset: int) -> None:
        """See ``Group``."""
        if self.failed is not None:
            return
        if not self._window.has(int(self.slots.max()), offset + pieces.object_bytes):
            self.fail(Got.MOVED, "what the owner has announced is not in its memory")
            return
        self._parts.append((pieces, offset))
        self.begun_s.append(time.monotonic())

    @property
    def took_s(self) -> float:
        """What copying has taken; of what was given up, the time that it had."""
        if self.failed is Got.TIMED_OUT and self.begun_s:
            return time.monotonic() - self.begun_s[0]
        return self._copying_s

    def wait(self, deadline_s: float) -> None:
        """See ``Group``."""
        while self.failed is None and self._copied < len(self._parts):
            self.wait_for(self._copied, deadline_s)

    def wait_for(self, part: int, deadline_s: float) -> None:
        """See ``Group``. In the order of ``begin``."""
        if self.failed is not None:
            return
        begun_s = time.monotonic()
        if begun_s > deadline_s:
            self.fail(Got.TIMED_OUT, "no time is left")
            return
        pieces, offset = self._parts[part]
        slots = np.uint64(self._window.slots_address + offset) + self.slots * np.uint64(UNIT_BYTES)
        codes = self._copier.bring(slots, self._headers, self.wanted, pieces, verify=False)
        self._copied = part + 1
        self._copying_s += time.monotonic() - begun_s
        if codes.any():
            self.fail(Got.MOVED, "an object has moved")

    def check(self, rooms: HeaderRooms, deadline_s: float) -> Records:  # noqa: ARG002
        """See ``Group``."""
        found = np.zeros(len(self.rows), HEADER)
        gather(Pieces.whole(self._headers, HEADER_BYTES), found.ctypes.data)
        return found

    @property
    def _headers(self) -> U64:
        """Where they begin."""
        headers: U64 = self.slots * np.uint64(HEADER_BYTES)
        return headers + np.uint64(self._window.headers_address)
