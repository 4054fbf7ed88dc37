# SPDX-License-Identifier: Apache-2.0
"""What was removed from a tier, told at once in a file: to remove it from the tier takes its time,
and a process that is killed meanwhile would find it again.

The file has names of objects (key and signature), and signatures alone for those of which all
objects were removed. What it names is dropped at the next start, also what was stored again since
under such a signature.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from kvstore.tiers.base import NAME_BYTES

__all__ = ["Names", "Tombstones", "all_of"]

_KEY_BYTES: Final = NAME_BYTES // 2
_ALL: Final = b"\xff" * _KEY_BYTES
"""Stands for all keys. As the digest of tokens it is as likely as any other: one in 2**128."""


def all_of(signature: bytes) -> bytes:
    """Stands for the names of all objects of a signature."""
    return _ALL + signature


class Names:
    """Names of objects that were removed."""

    def __init__(self, dead: AbstractSet[bytes], *, is_all: bool = False) -> None:
        """``dead``: names, and what stands for many; ``is_all``: all that there can be."""
        self._dead = dead
        self._is_all = is_all

    def __contains__(self, name: bytes) -> bool:
        return self._is_all or name in self._dead or all_of(name[_KEY_BYTES:]) in self._dead


class Tombstones:
    """Of one directory. ``remove`` and ``clear`` are thread-safe."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it. Raises ``OSError``."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd: Final = os.open(path, flags, 0o600)
        self._lock: Final = threading.Lock()
        self._cut()
        self.is_empty = os.fstat(self._fd).st_size == 0

    def close(self) -> None:
        """Nothing is written after this."""
        os.close(self._fd)

    def remove(self, names: Iterable[bytes]) -> None:
        """Objects are not found any more, whoever is killed. Raises ``OSError``."""
        raw = b"".join(names)
        if raw:
            self.is_empty = False
            with self._lock:
                if os.write(self._fd, raw) != len(raw):
                    self._cut()
                    raise OSError("the disk is full")

    def _cut(self) -> None:
        """Removes a part of a name at the end, behind which no name could be read any more."""
        nbytes = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, nbytes - nbytes % NAME_BYTES)

    def clear(self, signature: bytes) -> None:
        """All objects of a signature are not. Raises ``OSError``."""
        self.remove([all_of(signature)])

    def reset(self) -> None:
        """All of it is removed from the tier itself."""
        if not self.is_empty:
            os.ftruncate(self._fd, 0)
            self.is_empty = True

    def removed(self, names: Collection[bytes]) -> list[bytes]:
        """Those of the names that were removed."""
        raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        dead = Names(
            {raw[i : i + NAME_BYTES] for i in range(0, len(raw) - NAME_BYTES + 1, NAME_BYTES)}
        )
        return [one for one in names if one in dead]
