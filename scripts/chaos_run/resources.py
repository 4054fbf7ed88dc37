# SPDX-License-Identifier: Apache-2.0
"""What a server's processes hold: threads, descriptors, shared memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["POOLED_THREADS", "Held", "grown", "held_by"]

#: Pools of threads start one when there is work and none is idle, so that a fault may leave some. A
#: run of four minutes left one or two; a thread for each fault, or for each link, would be more.
POOLED_THREADS = 16


@dataclass(frozen=True)
class Held:
    """Of one process."""

    threads: int
    #: By kind: "socket", "anon_inode:[eventpoll]", "memfd", "file".
    descriptors: Counter[str]


def held_by(leader_pid: int) -> dict[str, Held]:
    """Of a server's processes, by their names, which a server that is started again has, too."""
    found: dict[str, Held] = {}
    leader = psutil.Process(leader_pid)
    for process in (leader, *sorted(leader.children(recursive=True), key=_age)):
        try:
            kinds = Counter(_kind(path) for path in Path(f"/proc/{process.pid}/fd").iterdir())
            held = Held(process.num_threads(), kinds)
            name = process.cmdline()[0] if process.cmdline() else process.name()
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue  # it has ended meanwhile
        same = sum(one.startswith(name) for one in found)
        found[f"{name} #{same}" if same else name] = held
    return found


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
