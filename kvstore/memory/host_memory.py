# SPDX-License-Identifier: Apache-2.0
"""How much memory this process can still have: of the host, and of the cgroups that it is in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

__all__ = ["Room", "check_room", "least_room", "meminfo_room", "rooms"]

#: A cgroup of version 1 without a limit has one near 2**63.
_NO_LIMIT: Final = 1 << 60
_MIB: Final = 1 << 20
_DROPPABLE: Final = r"^(?:total_)?inactive_file (\d+)$"


class Room(NamedTuple):
    """nbytes: what is left; where: who says so."""

    nbytes: int
    where: str


def check_room(name: str, nbytes: int, root: Path = Path("/")) -> None:
    """Before memory is taken: the kernel gives it page by page, and ends a process that has taken
    too much by SIGKILL, without a word.

    Args:
        name: the setting, for the sentence.
        root: where /proc and /sys are.

    Raises:
        ValueError: there is less.
    """
    least = least_room(root)
    if least is not None and nbytes > least.nbytes:
        raise ValueError(
            f"{name}={nbytes} ({nbytes / _MIB:.0f} MiB) is more memory than this process can have: "
            f"{least.nbytes / _MIB:.0f} MiB are left {least.where}"
        )


def least_room(root: Path = Path("/")) -> Room | None:
    """How much there is; None if nobody says so."""
    return min(rooms(root), default=None)


def rooms(root: Path) -> Iterator[Room]:
    """The host's, and that of each cgroup with a limit, from this process's own upwards."""
    found = meminfo_room(_read(root / "proc/meminfo"))
    if found is not None:
        yield Room(found, "on this host (MemAvailable in /proc/meminfo)")
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: memory.max
            yield from _of_groups(root, "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _of_groups(root, "sys/fs/cgroup/memory", path, *files)


def meminfo_room(text: str) -> int | None:
    """Bytes that can be had without swapping, of the text of /proc/meminfo (proc(5)). Pure."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def _of_groups(root: Path, mount: str, path: str, limit: str, usage: str) -> Iterator[Room]:
    """Of a cgroup and those around it (cgroups(7)). In a container the path may be the host's,
    which is not there: then its own group is at the mount."""
    inner = PurePosixPath(path.lstrip("/"))
    for group in [inner, *inner.parents]:
        folder = root / mount / group
        most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
        if not most.isdecimal() or not used.isdecimal() or int(most) >= _NO_LIMIT:
            continue  # "max", or no such group
        # Pages of files that the kernel can drop count as used; "total_": groups within, too.
        said = re.findall(_DROPPABLE, _read(folder / "memory.stat"), re.MULTILINE)
        left = int(most) - int(used) + max(map(int, said), default=0)
        yield Room(max(left, 0), f"in the cgroup {folder} ({limit} {most})")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another version of cgroups, or none
        return ""
