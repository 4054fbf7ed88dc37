# SPDX-License-Identifier: Apache-2.0
"""Owners in the process of a test, which find each other as those of several hosts do: by a list,
which is kept in memory here. For import in tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from bootstrap_server.admission.secret import Keys
from kvstore.config import Config
from kvstore.membership.directory import Directory
from kvstore.memory.memory_file import MemoryFile
from kvstore.protocol.sockets import Where
from kvstore.store import Store

KEYS: Final = Keys.from_secrets([b"0123456789abcdef of owners in tests"])

_found: Final[defaultdict[Path, dict[str, tuple[Where]]]] = defaultdict(dict)
"""Where owners listen, by the directory of their test and by their names."""


def enter(directory: Path, name: str, endpoint: str) -> None:
    """An owner of the test listens there."""
    near = str(Directory(directory).near_at(name))
    _found[directory][name] = (Where(endpoint, KEYS.control[0], near),)


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
        self._directory = Directory(directory)
        self._name = ""
        self.data_keys = self._directory.data_keys
        self.control_keys = KEYS.control

    def listen_at(self, _name: str) -> str:
        return "tcp://127.0.0.1:*"

    def near_at(self, name: str) -> Path | None:
        return self._directory.near_at(name)

    def announce(self, name: str, endpoint: str) -> None:
        self._name = name
        enter(self._path, name, endpoint)

    def endpoints(self) -> Mapping[str, tuple[Where]]:
        return endpoints(self._path)

    def close(self) -> None:
        leave(self._path, self._name)
        self._directory.close()


def owning(config: Config, memory: MemoryFile | None = None, *, lends: bool = True) -> Store:
    """The part of the store that an owner has in its process, beside others of the directory that
    are made in the same way."""
    return Store(config, memory, lends=lends, members=Member(config.directory))


def owning_by_settings(config: Config) -> Store:
    """As ``owning``, for one that finds others as its settings say, which are other processes."""
    return Store(replace(config, owner="rank"))
