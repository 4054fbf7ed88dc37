# SPDX-License-Identifier: Apache-2.0
"""The memory that an agent has registered with te."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final

import te
from sglang_mooncake.faces.nixl.names import Backend, InvalidParam, NotFound
from sglang_mooncake.faces.nixl.prepared import Cover
from sglang_mooncake.faces.nixl.registrations import Range, Registrations

__all__ = ["DEREGISTER_TIMEOUT_S", "Memory"]

DEREGISTER_TIMEOUT_S: Final = 1.0
"""How long `Memory.deregister` waits for what still uses a region. NIXL does not wait at all, and
lets a late write land in memory that is somebody else's by then."""


class Memory:
    """Any thread may call anything. Sizes are in bytes. Peers may read and write all of it."""

    def __init__(self, engine: te.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._known: Final[Registrations[te.Region]] = Registrations()
        #: Deregistered, while others of the same registration could not be yet.
        self._ended: Final[set[te.Region]] = set()
        self._cover: tuple[int, Cover] = (-1, Cover(self._known.cover()))

    def register(self, ranges: Sequence[Range]) -> None:
        """All of them or none. ``nixlBackendError`` with te's reason, ``nixlInvalidParamError`` for
        a range without bytes."""
        with self._lock:
            done: list[Range] = []
            try:
                for one in ranges:
                    self._register(one)
                    done.append(one)
            except BaseException:
                self._deregister(done)
                raise

    def deregister(self, ranges: Sequence[Range]) -> None:
        """All of them.

        Raises:
            nixlNotFoundError: one was not registered, as often as it is given back; nothing is
                changed then.
            nixlBackendError: a transfer still uses the memory, which must not be freed yet. The
                same call can be made again.
        """
        with self._lock:
            for one, count in Counter(ranges).items():
                if self._known.times(one) < count:
                    raise NotFound(
                        f"{one.nbytes} bytes at {one.address:#x} of {one.segment.name} and device"
                        f" {one.device} are not registered {count} times"
                    )
            self._deregister(ranges)

    def ranges(self) -> tuple[int, list[Range]]:
        """Their generation, and all registrations of now."""
        with self._lock:
            return self._known.generation, self._known.ranges()

    def missing(self, ranges: Sequence[Range]) -> Range | None:
        """The first that is not registered."""
        with self._lock:
            return next((one for one in ranges if one not in self._known), None)

    @property
    def cover(self) -> Cover:
        """Of all registrations of now."""
        with self._lock:
            generation = self._known.generation
            if self._cover[0] != generation:
                self._cover = (generation, Cover(self._known.cover()))
            return self._cover[1]

    def _register(self, one: Range) -> None:
        if not one.nbytes:
            raise InvalidParam(f"no bytes at {one.address:#x} to register")
        made: list[tuple[int, int, te.Region]] = []
        try:
            for address, nbytes in self._known.gaps(one):
                region = self._engine.register(address, nbytes, remote="read-write")
                made.append((address, nbytes, region))
        except (te.Error, OSError) as exc:
            for _, _, region in made:
                self._engine.deregister(region)
            raise Backend(f"{one.nbytes} bytes at {one.address:#x}: {exc}") from exc
        self._known.add(one, made)

    def _deregister(self, ranges: Sequence[Range]) -> None:
        freed = self._known.freed(*ranges)
        for region in freed:
            if region in self._ended:
                continue
            try:
                self._engine.deregister(region, DEREGISTER_TIMEOUT_S)
            except te.Error as exc:
                raise Backend(f"the memory must not be freed yet: {exc}") from exc
            self._ended.add(region)
        self._ended.difference_update(freed)
        for one in ranges:
            self._known.remove(one)
