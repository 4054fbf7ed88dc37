# SPDX-License-Identifier: Apache-2.0
"""What getting and putting need of the owners, however a process knows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from kvstore._table import Reader
from kvstore.client.handles import Handle
from kvstore.client.reading import Source
from kvstore.client.status import OwnerSeen
from kvstore.objects.changes import KEY_BYTES, Keys, Records

__all__ = ["OWN", "Pool", "Version", "keys_of"]

OWN: Final = 0
"""The number of the nearest owner in the table, which is this process's own or the host's; others
are above."""
Version: TypeAlias = tuple[Reader | None, int, bytes]
"""Of what is known: the table, how often it has changed, and the ranks."""


def keys_of(
    table: Reader | None, ranks: bytes, since: Version | None
) -> tuple[Version, Keys] | None:
    """For ``Pool.keys``. Without a table there are none."""
    version = table, 0 if table is None else table.changes, ranks
    if version == since:
        return None
    packed = b"" if table is None else table.keys(ranks)
    if packed is None:  # It changes too fast: what was known before counts still.
        return None
    return version, np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)


class Pool(Protocol):
    """All methods are thread-safe."""

    @property
    def request_timeout_s(self) -> float:
        """``Config.request_timeout_s``."""
        ...

    def __len__(self) -> int:
        """Objects that are known, copies counted."""
        ...

    @property
    def knows_all(self) -> bool:
        """Whether all owners that are said to be there are known, and can be used: what they hold
        is found."""
        ...

    @property
    def table_bytes(self) -> int:
        """Memory of this process for what owners hold."""
        ...

    @property
    def ranks(self) -> bytes:
        """For ``look_up``: 0 for owners that cannot be used."""
        ...

    def ranks_for(self, nbytes: int) -> bytes:
        """``ranks``, without owners of which objects of this size cannot be read here."""
        ...

    @property
    def ranks_of_puts(self) -> bytes:
        """``ranks``, without an owner whose objects do not count as stored: it lends nothing, and
        they come from others."""
        ...

    def ranks_without(self, numbers: Collection[int]) -> bytes:
        """``ranks``, without some owners."""
        ...

    def look_up(
        self, keys: Keys, fingerprint: int, ranks: bytes | None = None, *, asks: bool = False
    ) -> Records:
        """Where objects are said to lie: dtype ``PLACE``, one for each key. ``asks``: for who has
        owners bring what does not lie where this process reads without asking anybody."""
        ...

    def held_by(self, number: int, keys: Keys, fingerprint: int) -> Records:
        """``look_up`` at one owner alone."""
        ...

    def keys(self, since: Version | None) -> tuple[Version, Keys] | None:
        """See ``Store.keys``."""
        ...

    def touch_soon(self, keys: Keys, signature: bytes, nbytes: int) -> None:
        """Has owners told soon that objects are read, so that they keep them. Does not wait."""
        ...

    def source(self, number: int, *, brought: bool = False) -> Source | None:
        """An owner to read from; None if it cannot be read now. ``brought``: to read what was
        brought for this process, as an owner was asked for it (``look_up``, ``asks``)."""
        ...

    def source_of_all(self, places: Records, *, brought: bool = False) -> Source | None:
        """That of the one owner that has all of these in memory; None if there is none such, or it
        cannot be read now."""
        ...

    def pause(self, number: int, reason: str) -> None:
        """The connection to an owner has ended."""
        ...

    def handle(self, number: int) -> Handle | None:
        """An owner to store at; None if it cannot be reached."""
        ...

    def usable(self) -> Sequence[int]:
        """The numbers of the owners that can be asked."""
        ...

    def storing(self) -> Sequence[int]:
        """Those of them that objects are stored at."""
        ...

    def known_as(self, numbers: Sequence[int]) -> tuple[list[bytes], list[float], list[str]]:
        """For ``placement.choose``."""
        ...

    def seen(self) -> tuple[OwnerSeen, ...]:
        """Owners of other processes, as this one knows them."""
        ...

    def lenders(self) -> tuple[OwnerSeen, ...]:
        """Those that lend memory, and whether they answer; may ask one that knows, and wait
        ``request_timeout_s`` for it."""
        ...
