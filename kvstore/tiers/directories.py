# SPDX-License-Identifier: Apache-2.0
"""Directories that must be this user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["make_own"]


def make_own(directory: Path, setting: str) -> None:
    """Makes the directory if it is not there. Not those around it: where a disk is not mounted,
    they would be made on the root disk.

    Raises:
        ValueError: that around it is not there, it is no directory, or others can enter it. Names
            the setting.
        OSError: it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"{setting}={str(directory)!r}: there is no directory {directory.parent}; mount what it"
            " is to be on, or make it"
        ) from error
    except FileExistsError:
        pass  # a file, of which more below
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{setting}={str(directory)!r} is no directory")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{setting}={str(directory)!r} belongs to user {status.st_uid} and has the mode"
            f" {stat.filemode(status.st_mode)}: it must be this user's ({os.geteuid()}), and"
            " closed to all others (chmod 700)"
        )
