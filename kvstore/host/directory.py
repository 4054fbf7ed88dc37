# SPDX-License-Identifier: Apache-2.0
"""Where the processes of one host meet: a directory with the owner's sockets and a key for all,
which only its user may enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from kvstore.host.place import Place

__all__ = ["Directory"]

KEY_BYTES: Final = 32
"""Of a key of te's (``te.Config.keys``)."""

PATH_BYTES_MAX: Final = 107
"""Of the address of a Unix socket: unix(7), less the final zero."""


class Directory:
    """It stays, whoever cleans up, as long as somebody has it open."""

    def __init__(self, path: Path) -> None:
        """Makes the directory with mode 0700. ``ValueError`` if it is there and others may enter
        it, if it belongs to somebody else, or if its path is too long for a socket."""
        self._fd = -1
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"directory={str(path)!r} is no directory")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError(
                f"directory={str(path)!r} belongs to user {status.st_uid} and has the mode"
                f" {stat.filemode(status.st_mode)}: it must be this user's ({os.geteuid()}), and"
                " closed to all others (chmod 700); if somebody else has taken the name, give"
                " another directory to all processes of the store"
            )
        self._path = path
        longest = max(len(os.fsencode(one)) for one in Place(path).sockets)
        if longest > PATH_BYTES_MAX:
            raise ValueError(
                f"directory={str(path)!r} is too long by {longest - PATH_BYTES_MAX} bytes for the"
                " address of a Unix socket; give a shorter one"
            )
        self._keep_from_cleaners()

    def key(self) -> bytes:
        """What all who may enter the directory prove to each other: other users of the host can
        reach the engines' TCP ports. Whoever comes first makes it. ``ValueError`` if the file holds
        something else."""
        path = self._path / "key"
        fresh = self._path / f"key-{secrets.token_hex(8)}"
        if not path.exists():
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # Somebody else was faster.
                path.hardlink_to(fresh)
            fresh.unlink()
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise ValueError(f"{path} has {len(key)} bytes, not {KEY_BYTES}: remove it")
        return key

    def close(self) -> None:
        """It is not used any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _keep_from_cleaners(self) -> None:
        """systemd-tmpfiles(8) removes what has not been used for days in /tmp, such as the key,
        but leaves a directory alone that somebody has locked (flock(2))."""
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):  # One is at work now, and holds it.
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
