# SPDX-License-Identifier: Apache-2.0
"""The store in the process that owns the memory of a host."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

import te
from kvstore.client.managing import Managing
from kvstore.client.memory import Memory
from kvstore.client.owners import Membership, Owners
from kvstore.client.status import QUESTION, StoreStatus
from kvstore.config import Config
from kvstore.host.answers import PoolAnswers
from kvstore.host.directory import Directory
from kvstore.host.telling import Teller
from kvstore.membership.members import Members, host_towards
from kvstore.memory.memory_file import MemoryFile
from kvstore.owner.answering import Answerer
from kvstore.store import Store

__all__ = ["OwningStore"]


class OwningStore(Store):
    """Has an engine and the memory, and knows the owners of other hosts."""

    def __init__(
        self,
        config: Config,
        memory: MemoryFile | None = None,
        *,
        lends: bool = True,
        members: Membership | None = None,
    ) -> None:
        """Starts the engine, lends ``Config.memory``, and looks for other owners.

        Args:
            config: of this owner.
            memory: to be lent; without it, new one. ``Config.memory`` must fit.
            lends: without it, other hosts are not told of the memory: what they have comes to this
                one by way of it, and what is put here goes to them.
            members: how it finds others; without it, by ``Config.index``, if there is one.

        Raises what ``te.Engine`` raises; ``ValueError`` for a directory that is not safe, or an
        index that cannot be used; ``OSError`` if there is not enough memory.
        """
        self._given = memory, members
        self._lends = lends
        self.teller: Final = Teller(1 + secrets.randbits(62))
        super().__init__(config)

    def _open(self, undo: contextlib.ExitStack) -> None:
        config = self._config
        memory, members = self._given
        host = config.host or config.engine.host
        if members is None and config.index:
            host = _host_of(config)
            members = Members(config.index, host, config.keys)
        if members is None:
            with contextlib.closing(Directory(config.directory)) as directory:
                keys: Sequence[bytes] = (directory.key(),)
        else:
            undo.callback(members.close)
            keys = members.data_keys
        settings = replace(config.engine, keys=tuple(keys), host=host)
        engine = undo.enter_context(te.Engine(settings))
        engine.add_answers({QUESTION: lambda _: self.status()})
        self._memory = Memory(lambda: engine)
        owners = Owners(
            self._memory.engine, config, members, self.load_times, memory, lends=self._lends
        )
        undo.callback(owners.close)
        if owners.own is not None:
            self._memory.know(owners.own.region, owners.own.buffer)
        self._owners = self._pool = owners
        self._managing = Managing(owners)

    def answering(self, path: Path) -> AbstractContextManager[Answerer]:
        """Answers processes of this host that use this one's memory, and all other owners through
        it (``kvstore.host``), on a Unix socket; first it waits until it knows what owners of other
        hosts hold (``Owners.wait_for_other_hosts``). ``OSError`` if it cannot listen."""
        pool, used = self._pool, self._config.memory
        own = pool.own
        assert own is not None, "who lends nothing has no users"
        pool.wait_for_other_hosts()
        parts = (own, pool, self._memory, self.gets, self._copier, used)
        answers = PoolAnswers(*parts, self.status, self.teller, lends=self._lends)
        return contextlib.closing(Answerer(own, path, answers, pool.table.fd, answers.take))

    def status(self) -> StoreStatus:
        """See ``Store``."""
        own, memory = self._pool.own, self._config.memory if self._lends else 0
        stats = None if own is None else own.stats()
        return msgspec.structs.replace(super().status(), memory=memory, own=stats)


def _host_of(config: Config) -> str:
    """The address of this host that others use. ``ValueError``."""
    try:
        return config.host or host_towards(config.index)
    except OSError as exc:
        raise ValueError(
            f"no address of this host leads to the index: {exc}; give one that other hosts reach"
            " as host"
        ) from exc
