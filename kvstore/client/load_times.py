# SPDX-License-Identifier: Apache-2.0
"""What one process has measured of its loads, and how often loading was worth it."""

from __future__ import annotations

import threading
from typing import Any, Final

import msgspec
import numpy as np

from kvstore.client.admission import Admitted, Numbers, Speed, admit, expected_s
from kvstore.objects.changes import OWNERS_MAX

__all__ = ["AdmissionCounts", "LoadTimes", "source_of"]


def source_of(owners: Any, lower: Any) -> Any:
    """The numbers of sources, as admission tells them apart: an owner's memory, or its lower tier.
    Both are arrays, or both are numpy's scalars."""
    return owners + lower * np.uint16(OWNERS_MAX)


class AdmissionCounts(msgspec.Struct, frozen=True):
    """What became of objects that were found, and of the loads of those that were worth it."""

    #: Objects, each counted once for each request that asked for it.
    admitted: int = 0
    declined: int = 0
    #: Requests of which some objects were loaded for a measurement alone.
    probes: int = 0
    #: Loads of which it was known beforehand what they take; that, and what they took, in seconds.
    loads: int = 0
    expected_s: float = 0.0
    took_s: float = 0.0
    #: Those of them that took longer than computing their objects would have.
    unpaid: int = 0


class LoadTimes:
    """All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Seconds per byte of reads, by the number of the source.
        self._speeds: Final[dict[int, Speed]] = {}
        self._counts = AdmissionCounts()

    # -- measurements

    def measured(self, source: int, seconds: float, nbytes: int) -> None:
        """A read of so many bytes from a source took so long."""
        with self._lock:
            speed = self._speeds.get(source)
            if speed is None:
                speed = self._speeds[source] = Speed()
            speed.took(seconds, nbytes)

    def forget(self, owner: int) -> None:
        """The owner is another one now, or its connection is."""
        with self._lock:
            for source in (owner, owner + OWNERS_MAX):
                self._speeds.pop(source, None)

    def bytes_per_s(self, owner: int) -> float:
        """Of reads from an owner's memory; 0.0 while that is not known."""
        each_s = self._each_s(1).get(owner)
        return 1 / each_s if each_s else 0.0

    # -- judgements

    def admit(
        self, sources: Numbers, nbytes: int, compute_s: float | None, probe: bool
    ) -> Admitted:
        """``admission.admit`` for objects of ``nbytes``."""
        return admit(sources, self._each_s(nbytes), compute_s, probe=probe)

    def expected_s(self, sources: Numbers, nbytes: int) -> float | None:
        """``admission.expected_s`` for objects of ``nbytes``."""
        return expected_s(sources, self._each_s(nbytes))

    def _each_s(self, nbytes: int) -> dict[int, float]:
        with self._lock:
            known = ((source, one.seconds_per_unit) for source, one in self._speeds.items())
            return {source: each_s * nbytes for source, each_s in known if each_s is not None}

    # -- what came of it

    def count(self, admitted: Admitted) -> None:
        """Once for each request."""
        with self._lock:
            now = self._counts
            self._counts = msgspec.structs.replace(
                now,
                admitted=now.admitted + admitted.offered,
                declined=now.declined + admitted.declined,
                probes=now.probes + admitted.probe,
            )

    def loaded(self, expected_s: float, took_s: float, compute_s: float) -> None:
        """A load has ended. ``compute_s``: what computing its objects would have taken."""
        with self._lock:
            now = self._counts
            self._counts = msgspec.structs.replace(
                now,
                loads=now.loads + 1,
                expected_s=now.expected_s + expected_s,
                took_s=now.took_s + took_s,
                unpaid=now.unpaid + (took_s > compute_s),
            )

    @property
    def counts(self) -> AdmissionCounts:
        """Since the start."""
        return self._counts
