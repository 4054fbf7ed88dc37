# SPDX-License-Identifier: Apache-2.0
"""The owners that one process knows of, its own included: who they are, what they hold, whether
they can be used."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol
from urllib.parse import urlsplit

import numpy as np

import te
from kvstore._table import Table, sole_owner
from kvstore.client.connecting import Connections, Known
from kvstore.client.deadline import Deadline
from kvstore.client.following import Following
from kvstore.client.handles import Handle, LocalHandle, RemoteHandle
from kvstore.client.load_times import LoadTimes
from kvstore.client.pool import OWN, Version, keys_of
from kvstore.client.reading import Source
from kvstore.client.status import OwnerSeen
from kvstore.config import Config
from kvstore.memory.memory_file import MemoryFile
from kvstore.objects.changes import (
    CHANGE,
    KEY_BYTES,
    OWNERS_MAX,
    PLACE,
    Found,
    Keys,
    Records,
    fingerprint_of,
)
from kvstore.owner.card import OwnerCard
from kvstore.owner.claims import CLAIM_OBJECTS_MAX
from kvstore.owner.owner import Owner
from kvstore.owner.service import Service
from kvstore.owner.ticking import Ticking
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Window
from kvstore.protocol.messages import Answer, Publish, Published, Question, Touch
from kvstore.protocol.sockets import Sockets, Where
from kvstore.rules.object_table import Verdict

__all__ = ["Membership", "Owners"]

logger = logging.getLogger(__name__)

OWN_RANK: Final = 3
REMOTE_RANK: Final = 2
OTHER_HOSTS_S: Final = 10.0
"""Users of this host wait for 30 s until it has an owner (``lease.JOIN_TIMEOUT_S``)."""
POLL_S: Final = 0.01
TOUCHES_MAX: Final = 1024
"""Batches of keys that wait to be told to their owners."""


class Membership(Protocol):
    """How the owners of several hosts find each other, and prove that they belong together."""

    @property
    def data_keys(self) -> tuple[bytes, ...]:
        """For ``te.Config.keys``."""
        ...

    @property
    def control_keys(self) -> tuple[bytes, ...]:
        """For ``Sockets``."""
        ...

    @property
    def listen_at(self) -> str:
        """Where an owner shall listen."""
        ...

    def announce(self, name: str, endpoint: str) -> None:
        """The owner listens there; ``name`` is its engine's id."""
        ...

    def endpoints(self) -> Mapping[str, Collection[Where]]:
        """Where all owners are said to listen, by name. Does not wait."""
        ...

    def close(self) -> None:
        """The own owner is gone."""
        ...


class Owners:
    """All methods are thread-safe."""

    def __init__(
        self,
        engine: te.Engine,
        config: Config,
        members: Membership | None,
        load_times: LoadTimes,
        memory: MemoryFile | None = None,
        *,
        lends: bool = True,
    ) -> None:
        """Lends memory if ``Config.memory`` says so, and looks for others among the members;
        without members there are none. ``memory``: see ``Owner``. ``lends``: without it nobody is
        told of the memory, which holds for a while what others have. ``OSError`` if there is not
        enough memory."""
        self._engine = engine
        self._load_times = load_times
        self._config = config
        self.table: Final = Table()
        self.own: Owner | None = None
        self._lends = lends
        self._lock = threading.Lock()
        #: Other owners that answer.
        self._heard: set[int] = set()
        self._connections = Connections(self._connect, self._rank)
        self._applied = 0
        #: Of the own owner, for others.
        self._endpoint = ""
        self._touched: deque[tuple[Keys, bytes, int]] = deque()
        with contextlib.ExitStack() as undo:
            undo.callback(self._connections.close)
            keys = () if members is None else members.control_keys
            sockets = Sockets(keys, _ports(config.engine))
            undo.callback(sockets.close)
            if config.memory:
                self.own = Owner(engine, config, memory, populates=lends)
                undo.callback(self.own.close)
                self.own.listeners.append(self._apply_own)
                self._apply_own()  # What its file has.
                self._connections.make(OWN)
                undo.callback(Ticking(self.own).close)
                if lends and members is not None:
                    self._lend(self.own, sockets, members, undo)

            def others() -> Mapping[str, Collection[Where]]:
                found = {} if members is None else dict(members.endpoints())
                found.pop(engine.id, None)
                return found

            self._following = Following(
                self.table,
                self._set_heard,
                sockets,
                others,
                self._on_tick,
                self._connections.drop,
                config.request_timeout_s,
            )
            self._following.start()
            undo.callback(self._following.close)
            self._undo = undo.pop_all()

    def _lend(
        self, own: Owner, sockets: Sockets, members: Membership, undo: contextlib.ExitStack
    ) -> None:
        """Answers other hosts from now on, and tells them where."""
        service = Service(own, sockets, members.listen_at)
        undo.callback(service.close)
        self._endpoint = service.endpoint
        members.announce(self._engine.id, service.endpoint)

    def close(self) -> None:
        """Ends all of it; what this process has lent is gone."""
        self._undo.close()

    @property
    def request_timeout_s(self) -> float:
        """``Config.request_timeout_s``."""
        return self._config.request_timeout_s

    # -- look-ups

    def __len__(self) -> int:
        return len(self.table)

    @property
    def table_bytes(self) -> int:
        """Of the table."""
        return self.table.nbytes

    @property
    def ranks(self) -> bytes:
        """For ``Table.look_up``: 0 for owners that cannot be used. A copy."""
        return self.table.ranks

    def ranks_for(self, nbytes: int) -> bytes:  # noqa: ARG002
        """See ``Pool``: all can be."""
        return self.ranks

    @property
    def ranks_of_puts(self) -> bytes:
        """See ``Pool``."""
        return self.ranks_without(() if self._lends else (OWN,))

    def ranks_without(self, numbers: Collection[int]) -> bytes:
        """``ranks``, without some owners."""
        if not numbers:
            return self.ranks
        ranks = bytearray(self.ranks)
        for number in numbers:
            ranks[number] = 0
        return bytes(ranks)

    def look_up(
        self,
        keys: Keys,
        fingerprint: int,
        ranks: bytes | None = None,
        *,
        asks: bool = False,  # noqa: ARG002
    ) -> Records:
        """See ``Pool``: this process reads from all."""
        places = np.empty(len(keys), PLACE)
        ranks = self.ranks if ranks is None else ranks
        self.table.look_up(np.ascontiguousarray(keys), fingerprint, ranks, places)
        return places

    def held_by(self, number: int, keys: Keys, fingerprint: int) -> Records:
        """``look_up`` at one owner alone."""
        ranks = bytearray(OWNERS_MAX)
        ranks[number] = 1
        return self.look_up(keys, fingerprint, bytes(ranks))

    def keys(self, since: Version | None) -> tuple[Version, Keys] | None:
        """See ``Pool``."""
        return keys_of(self.table, self.ranks, since)

    def touch_soon(self, keys: Keys, signature: bytes, nbytes: int) -> None:
        """Has owners told within a tenth of a second that objects are read, so that they keep them.
        It wakes nobody, which would take the interpreter's lock from the caller (36 µs); of too
        many, some are left out."""
        if len(self._touched) < TOUCHES_MAX:
            self._touched.append((keys, signature, nbytes))

    def _on_tick(self) -> None:
        """In the loop's thread."""
        self._connections.tick()
        while self._touched:
            self._touch(*self._touched.popleft())

    def lending(self, first: int) -> list[tuple[int, OwnerCard, str, str]]:
        """The owners of other hosts that can be used now, from a number on, where they are, their
        names and their hosts."""
        found = list[tuple[int, OwnerCard, str, str]]()
        for number in self.usable():
            followed = self._following.owner(number)
            card = None if followed is None else followed.card
            if number >= first and followed is not None and card is not None:
                host = urlsplit(followed.where.endpoint).hostname or ""
                found.append((number, card, followed.name, host))
        return found

    def relay(self, number: int, name: str, question: Question, nbytes: int) -> Answer:
        """Asks the owner of another host for a process that writes there itself, and takes over
        where that one's objects of ``nbytes`` lie. ``NoAnswer``, also if the number is another
        owner's by now: claims are told apart by each owner for itself."""
        followed = self._following.owner(number)
        if followed is None or followed.name != name:
            raise NoAnswer(f"owner {name} is not known any more")
        answer = followed.asker.ask(question, self.request_timeout_s)
        if isinstance(question, Publish) and isinstance(answer, Published) and answer.placed:
            granted = [one == Verdict.GRANTED.value for one in answer.verdicts]
            keys = np.frombuffer(question.keys, np.uint8).reshape(-1, KEY_BYTES)
            try:
                some = keys[np.array(granted, np.bool_)] if granted else keys
                followed.learn(some, question.signature, nbytes, answer.placed)
            except (ValueError, IndexError) as exc:
                raise NoAnswer(f"owner {name} answers nonsense of what it has stored") from exc
        return answer

    def _touch(self, keys: Keys, signature: bytes, nbytes: int) -> None:
        places = self.look_up(keys, fingerprint_of(signature, nbytes))
        found = places["found"] == Found.HERE
        for number in np.unique(places["owner"][found]).tolist():
            some = keys[found & (places["owner"] == number)]
            followed = self._following.owner(number)
            if number == OWN and self.own is not None:
                self.own.touch(some, signature)
            elif followed is not None:
                followed.tell(Touch(some[:CLAIM_OBJECTS_MAX].tobytes(), signature))

    # -- owners

    def source(self, number: int, *, brought: bool = False) -> Source | None:  # noqa: ARG002
        """An owner to read from; None if there is no connection to it now, and then its use is
        paused. Does not wait."""
        card, known = self._card(number), self._connections.get(number)
        if card is None or known is None:
            return None
        if not known.peer.alive:
            self.pause(number, "its connection has ended")
            return None
        window = None
        if number == OWN:
            nbytes = card.chunks * card.object_bytes_max
            window = Window(card.headers_address, card.slots_address, nbytes)
        return Source(number, known.peer, card.headers_address, card.slots_address, window)

    def source_of_all(self, places: Records, *, brought: bool = False) -> Source | None:
        """That of the one owner that has all of these in memory; None if there is none such, or no
        connection to it now."""
        number = sole_owner(places)
        return None if number < 0 else self.source(number, brought=brought)

    def _connect(self, number: int) -> Known | None:
        """For ``Connections``."""
        card = self._card(number)
        if card is None:
            return None
        peer = self._engine.connect(card.engine)
        self._load_times.forget(number)  # It may be another owner, or another way to it.
        return Known(card.engine, peer)

    def pause(self, number: int, reason: str) -> None:
        """The connection to an owner has ended: it is not used until there is another."""
        known = self._connections.get(number)
        if known is not None and self._connections.lost(number, known):
            logger.warning("owner %d of the store is not used for a while: %s", number, reason)

    def seen(self) -> tuple[OwnerSeen, ...]:
        """Other owners, as this process knows them."""
        ranks = self.ranks
        return tuple(
            OwnerSeen(
                one.name,
                self.table.count(one.number),
                bool(ranks[one.number]),
                self._load_times.bytes_per_s(one.number),
            )
            for one in self._following.owners()
        )

    lenders = seen

    @property
    def knows_all(self) -> bool:
        """See ``Pool``."""
        return self._knows(lambda _: True)

    def wait_for_other_hosts(self) -> None:
        """Until it is known what their owners hold, ``Config.request_timeout_s`` and
        ``OTHER_HOSTS_S`` at most. Those of this host are not waited for: one may have been killed
        just now, and stand in the index."""
        here = urlsplit(self._endpoint).hostname
        until = Deadline(min(self.request_timeout_s, OTHER_HOSTS_S))
        while not self._knows(lambda where: urlsplit(where.endpoint).hostname != here):
            if until.is_over:
                logger.warning(
                    "not all owners of other hosts answer: what they hold is found once they do"
                )
                return
            time.sleep(POLL_S)

    def _knows(self, is_meant: Callable[[Where], bool]) -> bool:
        ranks = self.ranks
        found = all(ranks[one.number] for one in self._following.owners() if is_meant(one.where))
        return found and self._following.knows(is_meant)

    def usable(self) -> Sequence[int]:
        """The numbers of the owners that can be used now."""
        found: list[int] = np.flatnonzero(np.frombuffer(self.ranks, np.uint8)).tolist()
        return found

    def storing(self) -> Sequence[int]:
        """See ``Pool``."""
        return [one for one in self.usable() if self._lends or one != OWN]

    def handle(self, number: int) -> Handle | None:
        """An owner to store at; None if it cannot be reached."""
        source = self.source(number)
        if source is None:
            return None
        if number == OWN:
            return None if self.own is None else LocalHandle(self.own, self._engine, source)
        followed = self._following.owner(number)
        if followed is None:
            return None
        return RemoteHandle(followed, self._engine, source, self._config.request_timeout_s)

    def known_as(self, numbers: Sequence[int]) -> tuple[list[bytes], list[float], list[str]]:
        """For ``placement.choose``: what all clients know the owners by, how much they lend, and
        their hosts."""
        names, weights, hosts = [], [], []
        for number in numbers:
            card = self._card(number)
            followed = self._following.owner(number)
            name = self._engine.id if followed is None else followed.name
            names.append(bytes.fromhex(name))
            weights.append(1.0 if card is None else float(card.chunks * card.object_bytes_max))
            endpoint = self._endpoint if followed is None else followed.where.endpoint
            hosts.append(urlsplit(endpoint).hostname or "")
        return names, weights, hosts

    def _card(self, number: int) -> OwnerCard | None:
        if number == OWN:
            return None if self.own is None else self.own.card
        followed = self._following.owner(number)
        return None if followed is None else followed.card

    def _set_heard(self, number: int, is_heard: bool) -> bool:
        """Another owner answers, or does not. Returns whether it can be used since, or not any
        more."""
        if is_heard and number not in self._heard:
            self._heard.add(number)
            self._connections.hurry(number)
        elif is_heard:
            self._connections.want(number)
        else:
            self._heard.discard(number)
        return self._rank(number)

    def _rank(self, number: int) -> bool:
        """Owners are used that answer, and to which a connection stands."""
        with self._lock:
            rank = 0
            if self._connections.get(number) is not None:
                rank = OWN_RANK if number == OWN else REMOTE_RANK * (number in self._heard)
            changed = self.ranks[number] != rank
            self.table.set_rank(number, rank)
        return changed

    def _apply_own(self) -> None:
        """What the own owner has changed goes into the table before a put returns."""
        assert self.own is not None
        with self._lock:
            changes = self.own.since(self._applied, 1 << 30)
            if changes is None:  # More than are kept, between two calls.
                self.table.drop(OWN)
                self._applied, changes = self.own.snapshot(0, self.own.card.parts)
                self.table.apply(OWN, changes)
                return
            self.table.apply(OWN, np.ascontiguousarray(changes, CHANGE))
            self._applied += len(changes)


def _ports(engine: te.Config) -> Sequence[int]:
    """Where the owner's socket may listen: where the engine may, in a range that both share."""
    return () if engine.port_last is None else range(engine.port, engine.port_last + 1)
