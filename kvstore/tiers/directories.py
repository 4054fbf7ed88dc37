# SPDX-License-Identifier: Apache-2.0
"""Directories that must be this user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["check_own"]


def check_own(directory: Path, setting: str) -> None:
    """``ValueError`` that names the setting if it is no directory, or others can enter it."""
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{setting}={str(directory)!r} is no directory")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{setting}={str(directory)!r} belongs to user {status.st_uid} and has the mode"
            f" {stat.filemode(status.st_mode)}: it must be this user's ({os.geteuid()}), and"
            " closed to all others (chmod 700)"
        )
