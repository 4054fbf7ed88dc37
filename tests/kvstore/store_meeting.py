# SPDX-License-Identifier: Apache-2.0
"""Owners in the process of a test, which find each other as those of several hosts do: by a list,
which is kept in memory here. For import in tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bootstrap_server.admission.secret import Keys
from kvstore.config import Config
from kvstore.memory.memory_file import MemoryFile
from kvstore.owning import OwningStore
from kvstore.protocol.sockets import Where

KEYS: Final = Keys.from_secrets([b"0123456789abcdef of owners in tests"])

_found: Final[defaultdict[Path, dict[str, tuple[Where]]]] = defaultdict(dict)
"""Where owners listen, by the directory of their test and by their names."""


def enter(directory: Path, name: str, endpoint: str) -> None:
    """An owner of the test listens there."""
    _found[directory][name] = (Where(endpoint, KEYS.control[0]),)


def leave(directory: Path, name: str) -> None:
    """The owner does not listen any more."""
    _found[directory].pop(name, None)


def endpoints(directory: Path) -> Mapping[str, tuple[Where]]:
    """Where the owners of a test listen, by name."""
    return dict(_found[directory])


class Member:
    """The list, as one owner sees it. See ``kvstore.client.owners.Membership``."""

    def __init__(self, directory: Path) -> None:
        self._path = directory
        self._name = ""
        self.data_keys, self.control_keys = KEYS.data, KEYS.control
        self.listen_at = "tcp://127.0.0.1:*"

    def announce(self, name: str, endpoint: str) -> None:
        self._name = name
        enter(self._path, name, endpoint)

    def endpoints(self) -> Mapping[str, tuple[Where]]:
        return endpoints(self._path)

    def close(self) -> None:
        leave(self._path, self._name)


def owning(config: Config, memory: MemoryFile | None = None, *, lends: bool = True) -> OwningStore:
    """The store as an owner has it in its process, beside others of the directory that are made in
    the same way."""
    return OwningStore(config, memory, lends=lends, members=Member(config.directory))
