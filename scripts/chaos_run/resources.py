# SPDX-License-Identifier: Apache-2.0
"""What a server's processes hold: threads, descriptors, shared memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["POOLED_THREADS", "Held", "grown", "held_by", "resident", "shared_in"]

#: Pools of threads start one when there is work and none is idle, so that a fault may leave some. A
#: run of four minutes left one or two; a thread for each fault, or for each link, would be more.
POOLED_THREADS = 16


@dataclass(frozen=True)
class Held:
    """Of one process."""

    threads: int
    #: By kind: "socket", "anon_inode:[eventpoll]", "memfd", "file".
    descriptors: Counter[str]
    #: Shared memory that it has mapped: objects, whether they still have names or not.
    shared: int = 0


def held_by(leader_pid: int) -> dict[str, Held]:
    """Of a server's processes, by their names, which a server that is started again has, too."""
    found: dict[str, Held] = {}
    leader = psutil.Process(leader_pid)
    for process in (leader, *sorted(leader.children(recursive=True), key=_age)):
        try:
            kinds = Counter(_kind(path) for path in Path(f"/proc/{process.pid}/fd").iterdir())
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            held = Held(process.num_threads(), kinds, shared_in(maps))
            name = process.cmdline()[0] if process.cmdline() else process.name()
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue  # it has ended meanwhile
        same = sum(one.startswith(name) for one in found)
        found[f"{name} #{same}" if same else name] = held
    return found


def resident(leader_pid: int) -> int:
    """Bytes of memory that a server's processes have."""
    total = 0
    leader = psutil.Process(leader_pid)
    for process in (leader, *leader.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it has ended meanwhile
    return total


def shared_in(maps: Iterable[str]) -> int:
    """Objects of shared memory in the lines of a process's maps (proc_pid_maps(5))."""
    mapped = (line.split(maxsplit=5) for line in maps)
    return len(
        {
            (device, inode)
            for _, _, _, device, inode, *path in mapped
            if path and path[0].startswith(("/dev/shm/", "/memfd:"))
        }
    )


def _age(process: psutil.Process) -> tuple[float, int]:
    return process.create_time(), process.pid


def grown(before: dict[str, Held], after: dict[str, Held]) -> list[str]:
    """Sentences on processes of both that hold more."""
    sentences = []
    for name, now in after.items():
        if name not in before:
            sentences.append(f"{name}: a process that was not there before")
            continue
        was = before[name]
        if now.threads > was.threads + POOLED_THREADS:
            sentences.append(f"{name}: {was.threads} threads, then {now.threads}")
        if now.shared > was.shared:
            sentences.append(f"{name}: {was.shared} pieces of shared memory, then {now.shared}")
        sentences += [
            f"{name}: {was.descriptors[kind]} descriptors of {kind}, then {count}"
            for kind, count in now.descriptors.items()
            if count > was.descriptors[kind]
        ]
    return sentences


def _kind(path: Path) -> str:
    try:
        target = str(path.readlink())
    except OSError:
        return "closed"  # since the directory was read
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    if target.startswith("/memfd:"):
        return "memfd"
    return target if target.startswith("anon_inode") else "file"
