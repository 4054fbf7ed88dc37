# SPDX-License-Identifier: Apache-2.0
"""Where the owners of several hosts are: a list in Redis, Valkey, etcd or a registry of this
package, in which each owner renews its entry. It says where owners listen and nothing of what they
hold, which each owner tells its clients itself. So little depends on it: while it is away, or after
it has lost everything, all who know each other go on, and only a new process is not found until it
is back."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from bootstrap_server.admission.secret import Keys
from kvstore.membership import index_etcd, index_redis, index_registry
from kvstore.membership.index_etcd import EtcdIndex
from kvstore.membership.index_redis import RedisIndex
from kvstore.membership.index_registry import RegistryIndex
from kvstore.protocol.sockets import Where

__all__ = ["SCHEMES", "Members", "host_towards"]

logger = logging.getLogger(__name__)

KINDS: Final = (index_redis, index_etcd, index_registry)
SCHEMES: Final = tuple(scheme for kind in KINDS for scheme in kind.SCHEMES)
PERIOD_S: Final = 1.0
"""How often an owner renews its entry, and everybody looks."""
FORGOTTEN_S: Final = 10
"""An entry that was not renewed for so long is removed."""
TIMEOUT_S: Final = 2.0
_MEMBER: Final = re.compile(r"([0-9a-f]{32}) ([0-9a-f]{16}) (tcp://\[?([0-9a-f.:]+)\]?:[0-9]{1,5})")
_LABEL: Final = b"kvstore: which key"


class Index(Protocol):
    """A list of entries that are removed when they are not renewed. For one thread at a time."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What is raised when it cannot be asked. Anything else is a defect, and is told with where
        it was raised."""
        ...

    def exchange(
        self, name: str, entry: bytes, known: bytes
    ) -> tuple[bytes, Sequence[bytes] | None]:
        """Renews the caller's entry, unless it is empty. Returns the version of the list, and all
        entries if it is not ``known``. What they say is not to be trusted."""
        ...

    def leave(self, name: str, entry: bytes) -> None:
        """Takes the caller's entry out."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


class Members:
    """The list, as one process sees it. It is asked in a thread of its own."""

    def __init__(self, url: str, host: str, keys: Keys) -> None:
        """
        Args:
            url: such as ``redis://host:6379/0``, ``etcd://host:2379`` or ``registry://host:8998``.
            host: the address at which other hosts reach this one, or a name of it.
            keys: of the deployment's secrets, at least one.

        Raises:
            ValueError: the URL cannot be used, the package that it takes is missing, or the host's
                name leads to no address.
        """
        self._shown = _shown(url)
        self._index = _index_of(url, keys)
        numeric = _numeric(host)
        self._host = f"[{numeric}]" if ":" in numeric else numeric
        self._keys = keys
        self._by_id = {_key_id(key): key for key in keys.control}
        self._first = next(iter(self._by_id))
        self._name, self._entry, self._version = "", b"", b""
        self._found: Mapping[str, Collection[Where]] = MappingProxyType({})
        self._strange: set[bytes] = set()
        self._is_away = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-members", daemon=True)
        self._ask()
        self._thread.start()

    @property
    def data_keys(self) -> tuple[bytes, ...]:
        """For ``te.Config.keys``."""
        return self._keys.data

    @property
    def control_keys(self) -> tuple[bytes, ...]:
        """For ``Sockets``."""
        return self._keys.control

    @property
    def listen_at(self) -> str:
        """Where an owner shall listen: at any free port."""
        return f"tcp://{self._host}:*"

    def announce(self, name: str, endpoint: str) -> None:
        """From now on this process's owner is in the list; ``name`` is its engine's id."""
        self._name, self._entry = name, f"{name} {self._first} {endpoint}".encode()
        self._ask()

    def endpoints(self) -> Mapping[str, Collection[Where]]:
        """Where owners were said to listen, by name, when the list was last read. Does not wait.
        Whoever can write to the list may have added any place to any name."""
        return self._found

    def close(self) -> None:
        """Takes the own entry out, if the list can be reached."""
        self._ended.set()
        self._thread.join()
        if self._entry:
            self._try(lambda: self._index.leave(self._name, self._entry))
        self._index.close()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self._ask()

    def _ask(self) -> None:
        self._try(self._read)

    def _read(self) -> None:
        version, entries = self._index.exchange(self._name, self._entry, self._version)
        if entries is not None:
            found: dict[str, set[Where]] = {}
            for name, where in filter(None, map(self._member, entries)):
                found.setdefault(name, set()).add(where)
            self._found = MappingProxyType(found)
        self._version = version

    def _try(self, work: Callable[[], object]) -> None:
        try:
            with self._lock:
                work()
        except Exception as exc:
            # Whatever it is: when this thread ends, the own entry is forgotten.
            if not self._is_away:
                logger.warning(
                    "the index %s cannot be asked (%s): no new process of the store is found until"
                    " it answers; those that know each other go on",
                    self._shown,
                    exc,
                    exc_info=not isinstance(exc, self._index.errors),
                )
            self._is_away = True
            self._version = b""  # It may have lost all.
            return
        if self._is_away:
            logger.info("the index %s answers again", self._shown)
        self._is_away = False

    def _member(self, raw: bytes) -> tuple[str, Where] | None:
        """None for an entry that cannot be used; each is told once."""
        match = _MEMBER.fullmatch(raw.decode("ascii", "replace"))
        # libzmq looks names up in the one thread that serves all connections.
        if match is not None and not _is_address(match[4]):
            match = None
        if match is not None and match[2] in self._by_id:
            return match[1], Where(match[3], self._by_id[match[2]])
        if raw not in self._strange and len(self._strange) < 1024:
            self._strange.add(raw)
            why = "this process does not have its secret" if match else "it is not an owner's"
            logger.warning("an entry of the index %s is left out: %s", self._shown, why)
        return None


def host_towards(url: str) -> str:
    """The address of this host from which the index is reached. ``OSError`` if none leads there."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(
        parts.hostname, parts.port or _kind_of(url).DEFAULT_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # Of a datagram socket: nothing is sent.
        host: str = probe.getsockname()[0]
        return host


def _kind_of(url: str) -> Any:
    """The module for a URL."""
    parts = urlsplit(url)
    for kind in KINDS:
        if parts.scheme in kind.SCHEMES and parts.hostname:
            return kind
    known = ", ".join(f"{one}://" for one in SCHEMES)
    raise ValueError(f"index={_shown(url)!r} is not a URL of {known} with a host")


def _index_of(url: str, keys: Keys) -> Index:
    kind = _kind_of(url)
    try:
        if kind is index_etcd:
            return EtcdIndex(url, TIMEOUT_S, FORGOTTEN_S)
        if kind is index_registry:
            return RegistryIndex(url, TIMEOUT_S, FORGOTTEN_S, keys.registry)
    except ValueError as exc:
        raise ValueError(f"index={_shown(url)!r}: {exc}") from exc
    try:
        return RedisIndex(url, TIMEOUT_S, FORGOTTEN_S)
    except ImportError as exc:
        raise ValueError(
            f"index={_shown(url)!r} needs the Python package redis, which cannot be imported"
            f" ({exc}): pip install 'sglang-mooncake[redis]'"
        ) from exc


def _numeric(host: str) -> str:
    """The address that a name leads to: names are not put into the list. ``ValueError``."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ValueError(f"host={host!r} leads to no address: {exc}; give an address") from exc
    return str(found[0][4][0])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _key_id(key: bytes) -> str:
    return hmac.digest(key, _LABEL, "sha256")[:8].hex()


def _shown(url: str) -> str:
    """Without user and password."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url
