# SPDX-License-Identifier: Apache-2.0
"""Ordinary memory of the process."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

from te.buffers import Buffer
from te.core import kinds
from te.core.engine import numa_node
from te.errors import RegistrationError
from te.memory_kinds.base import Export, Exported, MemoryKind, Reach
from te.topology import ANYWHERE

__all__ = ["HOST"]


class _Host(MemoryKind):
    name = "host"
    description: ClassVar = "host memory"
    reach: ClassVar = Reach.CPU | Reach.KERNEL | Reach.NIC
    has_copier = True
    compiled = kinds.HOST

    def check(self, address: int, nbytes: int) -> None:
        """proc_pid_maps(5). Asked of the kernel's list rather than by touching pages: it also knows
        about protection, and a pool of a hundred GB costs no more than a page."""
        reached, end = address, address + nbytes
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            for line in maps:
                span, access = line.split(" ", 2)[:2]
                low, high = (int(part, 16) for part in span.split("-"))
                if high <= reached:
                    continue
                if low > reached or not access.startswith("rw"):
                    break
                reached = high
                if reached >= end:
                    return
        raise RegistrationError(
            f"[{address:#x}, {end:#x}) of {nbytes} bytes is not readable and writable memory of"
            f" this process from {max(reached, address):#x} on"
        )

    def location(self, address: int, gpus: Mapping[str, str]) -> str:
        # Containers often forbid to ask (Docker's seccomp profile does without CAP_SYS_NICE).
        node = numa_node(address)
        return ANYWHERE if node < 0 else f"cpu:{node}"

    def export(self, source: object, address: int, nbytes: int) -> Export:
        if not isinstance(source, Buffer):
            raise OSError(errno.EOPNOTSUPP, "other processes can map memory of te.allocate alone")
        part = Exported(address, nbytes, fd=source.fd)
        return Export("", lambda: iter((part,)))


HOST: Final[MemoryKind] = _Host()
"""The one of this process."""
