# SPDX-License-Identifier: Apache-2.0
"""Digests of large files that are made once: they are kept beside the files, and hold as long as
`stat` says that the files are the same.

Where the files cannot be written beside, the digests are kept in ``~/.cache/kvstore``. A file of
Hugging Face's cache is a link to one whose name is its SHA-256: that is taken, unless the file was
written after the link was made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import xxhash

from kvstore.threads import Threads

__all__ = ["FileDigests"]

logger = logging.getLogger(__name__)

KEPT: Final = ".kvstore-digests.json"
THREADS: Final = 4
READ_BYTES: Final = 4 << 20
SMALL_BYTES: Final = 1 << 20
"""Smaller files are read each time."""
KEPT_BYTES_MAX: Final = 16 << 20
YOUNG_NS: Final = 2_000_000_000
"""A file that was written so shortly before may be written again within one tick of its clock."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

Stamp: TypeAlias = list[int]


class FileDigests:
    """Of the files of one directory. Use it as a context manager."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        """``cache``: a directory for digests that cannot be kept beside the files."""
        self._folder = folder
        cache = Path.home() / ".cache" / "kvstore" if cache is None else cache
        name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
        self._places = (folder / KEPT, cache / f"digests-{name}.json")
        self._pool = Threads(THREADS, "kvstore-digest")
        self._lock = threading.Lock()
        self._read_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def of(self, paths: Sequence[Path]) -> Mapping[Path, str]:
        """A text for each file. Raises ``OSError``; ``ValueError`` if one changes meanwhile."""
        began_s = time.monotonic()
        large = sum(map(self._is_unread, paths))
        if large:
            logger.info("reading %d files of weights in %s for their digests", large, self._folder)
        # Processes that begin together begin with different files, and take over what others did.
        first = os.getpid() % max(len(paths), 1)
        order = [*paths[first:], *paths[:first]]
        found = dict(zip(order, self._pool.map(self._of, order), strict=True))
        if large:
            took_s = time.monotonic() - began_s
            gigabytes = self._read_bytes / 1e9
            logger.info("read %.2f GB in %.1f s (%.2f GB/s)", gigabytes, took_s, gigabytes / took_s)
        return found

    def _of(self, path: Path) -> str:
        named = _named(path)
        if named is not None:
            return named
        stamp = _stamp(path)
        if stamp[0] >= SMALL_BYTES:
            digest = self._known(path, stamp)
            if digest is not None:
                return digest
        digest = f"xxh3-128:{self._read(path)}"
        if _stamp(path) != stamp:
            raise ValueError(f"{path} was written while it was read")
        if stamp[0] >= SMALL_BYTES and time.time_ns() - max(stamp[1:3]) > YOUNG_NS:
            self._keep(path, stamp, digest)
        return digest

    def _read(self, path: Path) -> str:
        state = xxhash.xxh3_128()
        buffer = memoryview(bytearray(READ_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                state.update(buffer[:count])
                with self._lock:
                    self._read_bytes += count
        return state.hexdigest()

    # -- what is kept

    def _is_unread(self, path: Path) -> bool:
        stamp = _stamp(path)
        is_large = stamp[0] >= SMALL_BYTES and _named(path) is None
        return is_large and self._known(path, stamp) is None

    def _known(self, path: Path, stamp: Stamp) -> str | None:
        for place in self._places:
            match self._kept(place).get(str(path.relative_to(self._folder))):
                case [[*said], str(digest)] if said == stamp:
                    return digest
        return None

    def _kept(self, place: Path) -> dict[str, Any]:
        try:
            return _read_own(place, self._folder)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as exc:
            logger.warning("the digests in %s are not used: %s", place, exc)
            return {}

    def _keep(self, path: Path, stamp: Stamp, digest: str) -> None:
        """Two processes may lose each other's entries: these are made again."""
        with self._lock:
            entry = {str(path.relative_to(self._folder)): [stamp, digest]}
            for place in self._places:
                raw = json.dumps(self._kept(place) | entry).encode()
                try:
                    if place.parent != self._folder:
                        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    _replace(place, raw)
                except OSError as exc:
                    logger.debug("digests are not kept in %s: %s", place, exc)
                    continue
                return
        logger.warning(
            "the digests of %s are made again at each start: they can be kept in none of %s",
            self._folder,
            ", ".join(map(str, self._places)),
        )


def _stamp(path: Path) -> Stamp:
    """What changes when a file does."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _named(path: Path) -> str | None:
    """By the name that Hugging Face's cache gives to a large file; None for all others."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    if target.parent.name != "blobs" or not _SHA256.fullmatch(target.name):
        return None
    is_older = target.stat().st_mtime_ns <= path.lstat().st_mtime_ns
    return f"sha256:{target.name}" if is_older else None


def _read_own(place: Path, folder: Path) -> dict[str, Any]:
    """Raises ``OSError`` or ``ValueError`` for what others than who owns the weights may write."""
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        is_own = status.st_uid in {os.geteuid(), folder.stat().st_uid}
        if not is_own or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{place} may be another user's")
        found = json.loads(file.read(KEPT_BYTES_MAX))
    if not isinstance(found, dict):
        raise ValueError(f"{place} has no digests")
    return found


def _replace(place: Path, raw: bytes) -> None:
    fresh = place.with_name(f"{place.name}-{secrets.token_hex(8)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with _removed_on_error(fresh):
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
        fresh.replace(place)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
