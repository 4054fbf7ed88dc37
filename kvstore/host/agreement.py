# SPDX-License-Identifier: Apache-2.0
"""What the processes of a host want of the owner that they share, what they must agree on, and what
is said where they do not. Pure."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

import te
from kvstore.config import Config

__all__ = [
    "NETWORK",
    "WISHES",
    "differences",
    "gives_way",
    "is_same_memory",
    "of_bytes",
    "pool",
    "refusal",
    "to_bytes",
    "unencrypted",
    "wished",
    "wishes",
]

WISHES: Final = (
    "memory",
    "chunk_bytes",
    "file",
    "disk",
    "disk_size",
    "objects",
    "objects_size",
    "policy",
    "free_low",
    "free_high",
    "claim_timeout_s",
    "linger_s",
)
"""Settings of the owner alone: those of the process that has started it count for all."""
NETWORK: Final = "network"
"""Among the wishes: how the owner and other hosts reach each other, as far as a process says it. It
has the settings of te's engine that are not as they are by default, and ``Config.host``."""
_EACH_ITS_OWN: Final = ("host", "keys", "label", "status_dir")
"""Settings of te's engine that are no wish: ``Config`` has the address and the keys."""
_OPERATORS: Final = ("host", "transports", "port", "port_last", "nics", "topology", "encrypt")
"""Of ``NETWORK``, what operators set. The rest, such as deadlines, differs between kinds of
servers, and is nothing to wonder about."""
_LABEL: Final = b"kvstore pool"


def wishes(config: Config) -> dict[str, Any]:
    """How a process would have the owner, for a message."""
    found = {name: getattr(config, name) for name in WISHES}
    found = {name: str(one) if isinstance(one, Path) else one for name, one in found.items()}
    return found | {NETWORK: _network(config)}


def _network(config: Config) -> dict[str, Any]:
    usual = _plain(te.Config())
    given = {
        name: value
        for name, value in _plain(config.engine).items()
        if name not in _EACH_ITS_OWN and value != usual[name]
    }
    return given | ({"host": config.host} if config.host else {})


def _plain(engine: te.Config) -> dict[str, Any]:
    """Its settings, as a message brings them."""
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(engine, enc_hook=str))
    return found


def _network_of(wishes: Mapping[str, Any]) -> Mapping[str, Any]:
    found = wishes.get(NETWORK)
    return found if isinstance(found, Mapping) else {}


def wished(config: Config, was: Mapping[str, Any]) -> Config:
    """The settings of a process, with those of the owner as somebody else has them. What
    ``wishes`` has not made raises ``ValueError``."""
    known = {name: value for name, value in was.items() if name in WISHES}
    if NETWORK in was:
        network = dict(_network_of(was))
        known["host"] = network.pop("host", "")
        own: dict[str, Any] = {"keys": config.keys.data, "label": config.engine.label}
        own["status_dir"] = config.engine.status_dir
        raw = msgspec.msgpack.encode(network | own, enc_hook=str)
        try:
            known["engine"] = msgspec.msgpack.decode(raw, type=te.Config, dec_hook=_path)
        except msgspec.DecodeError as exc:
            raise ValueError(f"{network} are no settings of te's engine: {exc}") from exc
    return replace(config, **known)


def differences(mine: Mapping[str, Any], has: Mapping[str, Any]) -> str:
    """What an owner has otherwise than a process wants it, as a part of a sentence; empty if all is
    the same. Who wants no memory does not care how much there is; who says nothing of the network
    does not care for that."""
    other = [name for name in WISHES if mine.get("memory") and mine.get(name) != has.get(name)]
    if has.get("linger_s") == math.inf:  # An operator's is nothing to wonder about.
        other = [name for name in other if name != "linger_s"]
    found = [(name, has.get(name), mine.get(name)) for name in other]
    usual = _plain(te.Config()) | {"host": ""}
    for name, value in _network_of(mine).items():
        its = _network_of(has).get(name, usual.get(name))
        if name in _OPERATORS and value != its:
            found.append((name, its, value))
    return ", ".join(f"{name}={its!r} instead of {value!r}" for name, its, value in found)


def gives_way(has: Mapping[str, Any], wishes: Mapping[str, Any]) -> bool:
    """Whether an owner ends for a server that comes, and starts the next one with its own settings.
    One that lends nothing does, for the first that has memory; or for the first that says anything
    of the network, if the one that has started it did not: a router, say."""
    if has.get("memory", 1):
        return False
    return bool(wishes.get("memory") or (_network_of(wishes) and not _network_of(has)))


def unencrypted(has: Mapping[str, Any], wishes: Mapping[str, Any]) -> str:
    """Why an owner must not have the objects of a process that has them encrypted wherever they go;
    empty if it may. ``has``: how the owner is, or how one is that is to follow it."""
    if _network_of(wishes).get("encrypt") and not _network_of(has).get("encrypt"):
        return (
            "of it and this process one encrypts what goes over the network, and the other does"
            " not: give both the same (`encrypt` among the settings of the store or of a server's"
            " hand-over, --encrypt of kvstore serve)"
        )
    return ""


def pool(config: Config) -> list[str]:
    """Which pool a process belongs to: its index, and the secrets of which one is enough. Without
    an index no secret counts, as a server may have one for its hand-over, and a router none: the
    directory and its key keep strangers out."""
    names = [hashlib.sha256(config.index.encode()).hexdigest()[:16]]
    keys = config.keys.data if config.index else ()
    return names + [hmac.digest(key, _LABEL, "sha256")[:8].hex() for key in keys]


def refusal(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Why two pools (``pool``) are not one; empty if they are."""
    if list(mine[:1]) != list(theirs[:1]):
        return (
            "it meets others at another index, or at none: give both the same (`index` among the"
            " store's settings, --index of kvstore serve)"
        )
    if (mine[1:] or theirs[1:]) and not set(mine[1:]) & set(theirs[1:]):
        return (
            "it has another secret: give both the same file (`secret_file` among the settings of"
            " the store or of a server's hand-over, --secret-file of commands)"
        )
    return ""


def is_same_memory(config: Config, was: Mapping[str, Any]) -> bool:
    """Whether the memory of an owner is such as a process wants it. Its chunks may be of the size
    that they have by default without anybody having said so."""
    if was.get("memory") != config.memory:
        return False
    usual = replace(config, chunk_bytes=0).chunk_bytes_used
    return bool((was.get("chunk_bytes", -1) or usual) == config.chunk_bytes_used)


def to_bytes(config: Config) -> bytes:
    """Settings, for a process that is started. They have the keys that are made of the secret."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def of_bytes(raw: bytes) -> Config:
    """Of ``to_bytes``."""
    return msgspec.msgpack.decode(raw, type=Config, dec_hook=_path)


def _path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} is no kind of a setting")
