# SPDX-License-Identifier: Apache-2.0
"""What a process that uses the host's owner has all owners do with objects: it asks that one, which
asks the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.client.handles import Handle
from kvstore.client.managing import Managing
from kvstore.client.pool import OWN
from kvstore.host.pool import HostPool
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Removed
from kvstore.owner.claims import CLAIM_OBJECTS_MAX

__all__ = ["HostManaging"]


class HostManaging(Managing):
    """See ``Managing``. The owner asks the others."""

    def __init__(self, owners: HostPool) -> None:
        super().__init__(owners)
        self._host = owners

    def remove(self, keys: Keys, signature: bytes) -> list[Removed]:
        """See ``Managing``. The next owner of the host takes over what the last one had."""
        self._host.settle(keys)
        is_asked = bool(self._owners.usable())
        outcomes = super().remove(keys, signature)
        return outcomes if is_asked else [Removed.UNREACHABLE] * len(keys)

    def clear(self, signature: bytes) -> int:
        """See ``Managing``."""
        self._host.settle(None)
        return super().clear(signature)

    def remove_soon(self, keys: Keys, signature: bytes) -> None:
        """See ``Managing``."""
        self._host.discard_soon(keys, signature)

    def _holders(self, keys: Keys) -> Iterator[tuple[npt.NDArray[np.intp], Handle]]:
        self._host.settle(keys)
        handle = self._owners.handle(OWN)
        rows = np.arange(len(keys), dtype=np.intp)
        if handle is not None:
            for first in range(0, len(rows), CLAIM_OBJECTS_MAX):
                yield rows[first : first + CLAIM_OBJECTS_MAX], handle
