# SPDX-License-Identifier: Apache-2.0
"""Which owners store an object, and which of several processes has it stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.objects.changes import Keys

__all__ = ["choose", "share_of"]

U64 = npt.NDArray[np.uint64]


def choose(
    keys: Keys,
    names: Sequence[bytes],
    weights: Sequence[float],
    hosts: Sequence[str],
    copies: int,
    own: int | None,
) -> npt.NDArray[np.intp]:
    """Indexes of owners for each key, the first choice first: shape (n, copies), or fewer columns
    if there are fewer owners.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, SPAA 2005): every client chooses the
    same owners, and an owner that comes or goes moves its own share alone. A host gets a second
    copy once there is one on each host.

    Args:
        names: 16 bytes for each owner, which all clients know it by.
        weights: its share, such as its memory in bytes.
        hosts: where it is.
        own: the index of this process's owner, which is always the first choice, being nearest.
    """
    words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
    scores = np.empty((len(words), len(names)))
    for i, (name, weight) in enumerate(zip(names, weights, strict=True)):
        salt = np.frombuffer(name, np.uint64)
        mixed = _mix(_mix(words[:, 0] ^ salt[0]) ^ words[:, 1] ^ salt[1])
        uniform = (mixed >> np.uint64(11)).astype(np.float64) + 0.5
        scores[:, i] = -weight / np.log(uniform / 2.0**53)
    if own is not None:
        scores[:, own] = np.inf
    is_second = np.zeros(scores.shape, np.bool_)
    places = np.array(hosts)
    for host in np.unique(places) if copies > 1 else ():
        of_host = np.flatnonzero(places == host)
        best = of_host[scores[:, of_host].argmax(axis=1)]
        is_second[:, of_host] = of_host != best[:, None]
    order: Any = np.lexsort((-scores, is_second), axis=1)
    chosen: npt.NDArray[np.intp] = order[:, :copies]
    return chosen


def share_of(keys: Keys, part: int, parts: int) -> npt.NDArray[np.intp]:
    """The rows of the keys that one of several processes stores which all have the same objects;
    keys are digests, so that their shares are equal."""
    return np.flatnonzero(keys[:, 0].astype(np.intp) % parts == part)


def _mix(words: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
