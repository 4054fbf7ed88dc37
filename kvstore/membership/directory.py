# SPDX-License-Identifier: Apache-2.0
"""Where the owners of one host are: a directory with a socket for each and a key for all, which
only its user may enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import Final

from kvstore.protocol.sockets import Where

__all__ = ["Directory"]

KEY_BYTES: Final = 32
"""Of a key of te's (``te.Config.keys``)."""

_SUFFIX: Final = ".store"
_NEAR: Final = ".near"
PATH_BYTES_MAX: Final = 107
"""Of the address of a Unix socket: unix(7), less the final zero."""
STALE_AGE_S: Final = 10.0
"""A socket that nobody listens on is removed once it is so old: a younger one may belong to an
owner that is between bind(2) and listen(2)."""


class Directory:
    """The owners that have their sockets in one directory."""

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
        longest = len(os.fsencode(self._socket("0" * 32)))
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

    @property
    def data_keys(self) -> tuple[bytes, ...]:
        """For ``te.Config.keys``. ``ValueError`` as ``key``."""
        return (self.key(),)

    @property
    def control_keys(self) -> tuple[bytes, ...]:
        """The mode of the directory is enough."""
        return ()

    def listen_at(self, name: str) -> str:
        """Where an owner shall listen; ``name`` is its engine's id."""
        return f"ipc://{self._socket(name)}"

    def near_at(self, name: str) -> Path | None:
        """Where it shall listen for ``kvstore.protocol.calling``."""
        return self._socket(name).with_suffix(_NEAR)

    def announce(self, name: str, endpoint: str) -> None:
        """The owner listens, and others see its socket."""

    def close(self) -> None:
        """The owner listens no more: others see that."""
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

    def endpoints(self) -> dict[str, tuple[Where]]:
        """Where owners listen, by name. Sockets that somebody has left behind are removed."""
        found: dict[str, tuple[Where]] = {}
        for path in self._path.glob(f"*{_SUFFIX}"):
            if self._is_heard(path):
                near = str(path.with_suffix(_NEAR))
                found[path.stem] = (Where(f"ipc://{path}", near=near),)
        return found

    def _socket(self, name: str) -> Path:
        return self._path / f"{name}{_SUFFIX}"

    def _is_heard(self, path: Path) -> bool:
        """Whether a process listens there. An owner that is frozen does, too."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(str(path))
            except BlockingIOError:  # Its backlog is full.
                return True
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > STALE_AGE_S:
                        path.with_suffix(_NEAR).unlink(missing_ok=True)
                        path.unlink()
                return False
        return True
