# SPDX-License-Identifier: Apache-2.0
"""Reads of parts of objects, layer by layer: a session finds the objects once, and keeps them in
memory meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sglang_mooncake.faces.mooncake_store.codes import INVALID, MISSING, OK
from sglang_mooncake.faces.mooncake_store.objects import Memory, Objects, Range

__all__ = ["KEYS_MAX", "Sessions", "runs_of"]

PIN_S: Final = 60.0
"""A session that was not ended keeps nothing for longer."""
KEYS_MAX: Final = 1 << 20
"""In all sessions that were not ended. More are refused."""


@dataclass
class _Open:
    nbytes: int
    sessions: int
    pins: int


class Sessions:
    """Any thread may call anything. A key may be in several sessions."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(self, names: Sequence[str]) -> list[int]:
        """0 for each object that is there, else Mooncake's number."""
        keys = self._objects.keys(names)
        pinned = self._objects.pin(keys, PIN_S)
        sizes = self._objects.sizes(keys).tolist()
        numbers = []
        with self._lock:
            for name, nbytes, is_pinned in zip(names, sizes, pinned, strict=True):
                known = self._open.get(name)
                if not nbytes:
                    numbers.append(MISSING)
                elif known is not None and known.nbytes == nbytes:
                    known.sessions += 1
                    known.pins += is_pinned
                    numbers.append(OK)
                elif known is None and len(self._open) >= KEYS_MAX:
                    numbers.append(INVALID)
                else:
                    # Another size: it was removed and stored again.
                    self._open[name] = _Open(nbytes, 1, int(is_pinned))
                    numbers.append(OK)
        return numbers

    def end(self, names: Sequence[str]) -> None:
        """Of keys in no session nothing is left to be ended."""
        pinned = []
        with self._lock:
            for name in names:
                known = self._open.get(name)
                if known is None:
                    continue
                known.sessions -= 1
                if known.pins > known.sessions:
                    known.pins -= 1
                    pinned.append(name)
                if not known.sessions:
                    del self._open[name]
        if pinned:
            self._objects.unpin(self._objects.keys(pinned))

    def read(
        self,
        names: Sequence[str],
        buffers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """For each object, which is in a session, how many bytes came; or Mooncake's number. All of
        its ranges come, or it has failed. ``ValueError`` if the lists differ in length."""
        if not len(names) == len(buffers) == len(sizes) == len(offsets):
            raise ValueError(
                f"{len(names)} keys, buffers for {len(buffers)}, sizes for {len(sizes)} and offsets"
                f" for {len(offsets)}"
            )
        with self._lock:
            known = [self._open.get(one) for one in names]
        numbers, ranges = [INVALID] * len(names), list[Range]()
        for row, one in enumerate(known):
            if one is None or not len(buffers[row]) == len(sizes[row]) == len(offsets[row]):
                continue
            runs = runs_of(buffers[row], sizes[row], offsets[row])
            if all(at >= 0 and at + memory.total <= one.nbytes for at, memory in runs):
                ranges += [Range(row, one.nbytes, at, memory) for at, memory in runs]
                numbers[row] = 0
        came = self._objects.get_ranges(self._objects.keys(names), ranges)
        for part, number in zip(ranges, came, strict=True):
            if numbers[part.row] >= 0:
                numbers[part.row] = number if number < 0 else numbers[part.row] + number
        return numbers


def runs_of(
    buffers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
) -> list[tuple[int, Memory]]:
    """Ranges of one object, those that follow each other as one: where it begins, and where its
    bytes go. Those of no bytes are left out."""
    found: list[tuple[int, Memory]] = []
    for address, nbytes, offset in zip(buffers, sizes, offsets, strict=True):
        if not nbytes:
            continue
        if found and found[-1][0] + found[-1][1].total == offset:
            begun, memory = found.pop()
            more = Memory((*memory.addresses, address), (*memory.nbytes, nbytes))
            found.append((begun, more))
        else:
            found.append((offset, Memory((address,), (nbytes,))))
    return found
