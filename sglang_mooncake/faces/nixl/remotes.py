# SPDX-License-Identifier: Apache-2.0
"""The other agents that an agent knows, by their names: from the metadata that the application has
brought, and from nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

import te
from sglang_mooncake.faces.nixl.links import Link
from sglang_mooncake.faces.nixl.metadata import Metadata, decode
from sglang_mooncake.faces.nixl.names import InvalidParam, Mismatch, NotAllowed, NotFound
from sglang_mooncake.faces.nixl.prepared import Cover
from te.handshake import decode_card

__all__ = ["Remote", "Remotes"]

Identity = tuple[str, int]
"""Of te's engine: its id and its epoch."""


class Remote:
    """One agent. What was prepared for it has this object, and is useless once it was removed."""

    def __init__(self, name: str, identity: Identity, link: Link) -> None:
        self.name: Final = name
        self.identity: Final = identity
        self.link: Final = link
        self.is_removed = False
        self._generation = -1
        self._ranges: npt.NDArray[np.uint64] = np.empty((0, 2), np.uint64)
        #: With the ranges that it is of: one thread may ask while another one learns.
        self._cover: tuple[npt.NDArray[np.uint64], Cover] = (self._ranges, Cover(self._ranges))

    def learn(self, told: Metadata) -> None:
        """What it has registered. Of two whole accounts the later one holds, whichever came last;
        a part is added to what is known."""
        if told.is_whole:
            if told.generation < self._generation:
                return
            self._generation, self._ranges = told.generation, told.ranges
        else:
            self._ranges = np.unique(np.concatenate((self._ranges, told.ranges)), axis=0)

    @property
    def cover(self) -> Cover:
        ranges = self._ranges
        known, cover = self._cover
        if known is not ranges:
            cover = Cover(ranges)
            self._cover = (ranges, cover)
        return cover


class Remotes:
    """Any thread may call anything. Connections are made in the background."""

    def __init__(self, own_name: str, make_link: Callable[[bytes], Link]) -> None:
        self._own, self._make_link = own_name, make_link
        self._lock = threading.Lock()
        self._known: Final[dict[str, Remote]] = {}
        #: Those of removed agents stay for as long as transfers over them go on.
        self._links: Final[WeakValueDictionary[Identity, Link]] = WeakValueDictionary()

    def add(self, data: bytes) -> str:
        """The name of the agent that made the metadata.

        Raises:
            nixlInvalidParamError: it is this agent's own.
            nixlMismatchError: it is no metadata of an agent over te.
            nixlNotAllowedError: another agent of that name is known; it is to be removed first.
            nixlNotFoundError: a part that does not say how to reach an agent, which is not known.
        """
        told = decode(data)
        if told.name == self._own:
            raise InvalidParam(f"{told.name!r:.200} is this agent itself")
        identity = _identity(told.card) if told.card else None
        with self._lock:
            remote = self._known.get(told.name)
            if identity is None:
                if remote is None:
                    raise NotFound(f"no agent {told.name!r:.200} is known to which this belongs")
            elif remote is None:
                remote = Remote(told.name, identity, self._link(identity, told.card))
                self._known[told.name] = remote
            elif remote.identity != identity:
                raise NotAllowed(
                    f"another agent of the name {told.name!r:.200} is known: remove it first"
                )
            else:
                remote.link.card = told.card
            remote.learn(told)
        if identity is not None:
            remote.link.connect()
        return told.name

    def remove(self, name: str) -> None:
        """Forgets it, and what was prepared for it is useless. ``nixlNotFoundError``.

        Its connection stays for as long as the other engine lives: who adds the same agent again,
        as some do for each request, has it at once."""
        with self._lock:
            remote = self._known.pop(name, None)
        if remote is None:
            raise NotFound(f"no agent {name!r:.200} is known")
        remote.is_removed = True

    def get(self, name: str) -> Remote:
        """``nixlNotFoundError``."""
        with self._lock:
            remote = self._known.get(name)
        if remote is None:
            raise NotFound(f"no agent {name!r:.200} is known")
        return remote

    def _link(self, identity: Identity, card: bytes) -> Link:
        """With the lock held. Who is added again has the link of before while transfers over it go
        on: te counts all of one peer, and it is the link that learns when there is room again."""
        link = self._links.get(identity)
        if link is None or link.problem is not None:
            link = self._make_link(card)
            self._links[identity] = link
        link.card = card
        return link


def _identity(card: bytes) -> Identity:
    try:
        decoded = decode_card(card)
    except te.HandshakeError as exc:
        raise Mismatch(f"metadata with a card of another release: {exc}") from exc
    return decoded.id, decoded.epoch
