# SPDX-License-Identifier: Apache-2.0
"""Settings of a store, checked when they are made."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import te
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_keys
from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES
from kvstore.tiers.bucket import SCHEMES
from kvstore.values import parse_bytes, typed

__all__ = ["CHUNK_BYTES_MAX", "NO_KEYS", "Config"]

CHUNK_BYTES_MAX: Final = 64 << 20
SIZES: Final = ("memory", "chunk_bytes", "disk_size", "objects_size")
"""Settings that may be texts such as "16GiB"."""
NO_KEYS: Final = Keys()
SECRET_FILE: Final = "secret_file"
"""The setting that ``Config.keys`` is made of."""


def _own_directory() -> Path:
    """``/tmp/kvstore-UID``. Not in ``$XDG_RUNTIME_DIR``: a service of the same user has none, and
    that of a login goes with its last session, after which processes would form a second store."""
    return Path(f"/tmp/kvstore-{os.geteuid()}")  # Checked before it is used.


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one process's part of the store.

    Raises ``ValueError`` that names the field and its value when one is out of range.
    """

    #: Memory that this host lends to the store, in bytes; 0 lends none. One process owns it for all
    #: of this user's on this host.
    memory: int = 0
    #: Where the memory is kept, so that it outlives the process: a file of its own, on a tmpfs such
    #: as /dev/shm, or on a disk, whose pages RDMA devices refuse to register. Without it the memory
    #: is gone with the process.
    file: Path | None = None
    #: A directory of this process's own, on a disk: objects that are evicted from the memory are
    #: kept there, and found again after a restart.
    disk: Path | None = None
    #: How much of the disk, in bytes.
    disk_size: int = 0
    #: Object storage, below the disk if there is one: a prefix of this process's own in a bucket,
    #: such as "s3://bucket/prefix", "gs://bucket/prefix" or "az://container/prefix", or a directory
    #: of its own, "file:///mnt/kv". Needs the Python package obstore, which takes credentials and
    #: endpoints from the environment.
    objects: str = ""
    #: How much is stored there, in bytes.
    objects_size: int = 0
    #: The memory is cut into chunks of this size, and no object may be larger. 0: 1/16 of the
    #: memory, 64 MiB at most and 1 MiB at least.
    chunk_bytes: int = 0
    #: Where the processes of one host find each other: a directory of sockets, which only this user
    #: may enter.
    directory: Path = field(default_factory=_own_directory)
    #: How long the process stays that owns the memory, when nobody uses it any more. The first one
    #: of this host that needs it starts it, and its ``memory``, ``file``, ``disk``, ``objects`` and
    #: their like count for all.
    linger_s: float = 600.0
    #: Where the owners of several hosts find each other: the URL of a Redis or Valkey server, such
    #: as "redis://host:6379/0", of etcd, "etcd://host:2379", or of a registry,
    #: "registry://host:8998". Without it the store is this host's alone.
    index: str = ""
    #: The address of this host that other hosts reach. By default the one from which it reaches the
    #: index.
    host: str = ""
    #: Made of the deployment's secrets. All processes that meet at an index must have them.
    keys: Keys = field(default=NO_KEYS, repr=False)
    #: Which objects are evicted first: "arc" or "lru".
    policy: str = "arc"
    #: Eviction begins when less than this part of the places for objects of one size is free.
    free_low: float = 0.05
    #: Eviction ends when this part is free.
    free_high: float = 0.10
    #: Owners that each object is stored at. With 2, the death of one costs nothing.
    copies: int = 1
    #: How long a client may take between its claim of slots and the end of its write.
    claim_timeout_s: float = 30.0
    #: How long this process waits for another one's answer. An owner that has not answered for so
    #: long is not asked for objects until it answers again.
    request_timeout_s: float = 2.0
    #: Compares the checksum of what a get has read, where the processor can read the memory.
    #: Without it a get still notices every object that was evicted or replaced meanwhile.
    verify: bool = True
    #: Whether other processes of this host want the same objects at about the same time, as the
    #: ranks of a server do whose pages are the same for all (MLA). What lies at other hosts comes
    #: through this host's owner then, once for all of them. Else this process reads it itself.
    shared: bool = False
    #: The transfer engine's settings. Its keys are made of ``keys``, or are one that the processes
    #: of the directory share; ``host`` comes before its own.
    engine: te.Config = field(default_factory=te.Config)

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            if one.name not in ("engine", "keys"):
                value = typed(one.name, getattr(self, one.name), str(one.type))
                # A text becomes a path, and the process that owns the memory has another directory.
                path = value.absolute() if isinstance(value, Path) else value
                object.__setattr__(self, one.name, path)
        for name in SIZES:
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be ≥ 0")
        if self.chunk_bytes % UNIT_BYTES:
            raise ValueError(f"chunk_bytes={self.chunk_bytes} must be a multiple of {UNIT_BYTES}")
        if self.file is not None and not self.memory:
            raise ValueError(f"file={str(self.file)!r} needs memory: say how much of it is lent")
        self._check_tiers()
        if not 1 <= self.copies <= 8:
            raise ValueError(f"copies={self.copies} must be between 1 and 8")
        if self.index and not self.keys:
            raise ValueError(
                "index needs a secret, so that nobody else reads or writes the store: give all of"
                " its processes the same secret file (`sglang-mooncake secret` makes one)"
            )
        if not self.linger_s >= 0:
            raise ValueError(f"linger_s={self.linger_s} must be a number of seconds, 0 or more")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is none of {', '.join(POLICIES)}")
        if not 0 <= self.free_low <= self.free_high <= 0.5:
            raise ValueError(
                f"free_low={self.free_low} and free_high={self.free_high}: give two parts between"
                " 0 and 0.5, the lower one first"
            )
        for name in ("claim_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a positive number of seconds")

    def _check_tiers(self) -> None:
        disk = None if self.disk is None else str(self.disk)
        for name, value, nbytes in (
            ("disk", disk, self.disk_size),
            ("objects", self.objects or None, self.objects_size),
        ):
            if (value is None) != (not nbytes):
                raise ValueError(
                    f"{name}={value!r} and {name}_size={nbytes}: give both, or neither"
                )
            if value is not None and not self.memory:
                raise ValueError(
                    f"{name}={value!r} needs memory above it: say how much is lent (memory)"
                )
        if self.objects and urlsplit(self.objects).scheme not in SCHEMES:
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise ValueError(f"objects={self.objects!r} is not a URL of {known}")

    @property
    def has_tier(self) -> bool:
        """Whether there is a lower tier."""
        return self.disk is not None or bool(self.objects)

    @property
    def lending_nothing(self) -> Self:
        """The same for a process that owns no memory, and uses that of others alone."""
        return dataclasses.replace(
            self, memory=0, file=None, disk=None, disk_size=0, objects="", objects_size=0
        )

    def of_rank(self, *, shared: bool) -> Self:
        """The same for one rank of a server, all of whose ranks have the same objects, or not."""
        return dataclasses.replace(self, shared=self.shared or shared)

    @property
    def chunk_bytes_used(self) -> int:
        """``chunk_bytes``, or what it is by default."""
        if self.chunk_bytes:
            return self.chunk_bytes
        part = max(self.memory // 16, 1 << 20)
        return min(1 << (part.bit_length() - 1), CHUNK_BYTES_MAX)

    @classmethod
    def of(
        cls, values: Mapping[str, Any], keys: Keys = NO_KEYS, others: Collection[str] = ()
    ) -> Self:
        """From the names and values of a configuration file: sizes may be texts such as "16GiB".
        ``keys`` are used if it names no secret file. ``ValueError`` names what is unknown or wrong,
        and the nearest name that there is; ``others``: further ones, which the caller has taken
        out."""
        kinds = {one.name: str(one.type) for one in dataclasses.fields(cls)}
        kinds = {name: kind for name, kind in kinds.items() if name not in ("engine", "keys")}
        kinds[SECRET_FILE] = "Path"
        given: dict[str, Any] = {"keys": keys}
        for name, value in values.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, {*kinds, *others}, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"the store has no setting {name!r}{hint}")
            if name in SIZES:
                given[name] = _size(name, value)
            elif name == SECRET_FILE:
                given["keys"] = read_keys(typed(name, value, kinds[name]))
            else:
                given[name] = typed(name, value, kinds[name])
        return cls(**given)


def _size(name: str, value: Any) -> int:
    try:
        return parse_bytes(value)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc
