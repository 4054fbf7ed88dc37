# SPDX-License-Identifier: Apache-2.0
"""Objects that an owner reads in the memory of a process of its host. They are stored once that
process has said that they had not changed meanwhile."""

from __future__ import annotations

import numpy as np

from kvstore.objects.changes import KEY_BYTES
from kvstore.objects.pieces import U64, Pieces
from kvstore.owner.answers import keys_of
from kvstore.owner.owner import Owner
from kvstore.protocol.mapped import Mapped
from kvstore.protocol.messages import Answer, Done, Fetch, Fetched, Refused, Unread
from kvstore.protocol.reach import NONCE_NBYTES, Reached
from kvstore.rules.object_table import Claim, texts_of

__all__ = ["Fetching"]


class Fetching:
    """Of one connection; for one thread at a time."""

    def __init__(self, owner: Owner, tray: Mapped, client: Reached | None) -> None:
        """``client``: the process at the other end; None if its memory cannot be read."""
        self._owner = owner
        self._tray = tray
        self._client = client
        self._held: tuple[Claim, U64] | None = None

    @property
    def is_open(self) -> bool:
        """Whether objects wait for ``keep`` or ``drop``."""
        return self._held is not None

    def fetch(self, question: Fetch) -> Answer:
        """Copies objects. Waits for the memory that they lie in."""
        self.drop()
        keys = keys_of(question.keys)
        client = self._client
        if client is None:
            # Of the first line it could, perhaps: then it is copied out of the tray.
            return Unread("the memory of the process at this line cannot be read")
        words = (len(keys) + 1) * question.pieces
        room = self._tray.nbytes - NONCE_NBYTES
        if not len(keys) or len(question.keys) % KEY_BYTES or 8 * words > room:
            return Refused(
                f"{len(question.keys)} bytes of keys with {question.pieces} pieces each do not fit"
                f" a tray of {room}"
            )
        # A copy: the other side may change it at any time.
        told = np.frombuffer(self._tray.memory, "<u8", words).reshape(-1, question.pieces).copy()
        if int(told[-1].max()) > question.nbytes or int(told[-1].sum()) != question.nbytes:
            return Refused(f"the pieces are not of {question.nbytes} bytes together")
        try:
            pieces = Pieces(told[:-1], told[-1])
            claim, sums = self._owner.storing.fetch(
                client.foreign, keys, question.signature, pieces
            )
        except OSError as exc:
            return Unread(str(exc.strerror))
        except ValueError as exc:
            return Refused(str(exc))
        if claim.slots:
            self._held = claim, sums
            if not client.is_same:
                self.drop()
                self._forget_client()
                return Unread("another process was read than the one at this line")
        return Fetched(texts_of(claim.verdicts))

    def keep(self) -> Answer:
        """Publishes what was fetched last; who calls has to ``tell``."""
        held, self._held = self._held, None
        if held is None:
            return Refused("nothing was fetched")
        self._owner.storing.keep(*held)
        return Done()

    def drop(self) -> None:
        """It is not stored."""
        held, self._held = self._held, None
        if held is not None:
            self._owner.storing.drop(held[0])

    def close(self) -> None:
        """The connection has ended."""
        self.drop()
        self._forget_client()

    def _forget_client(self) -> None:
        """Its memory is not read any more."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
