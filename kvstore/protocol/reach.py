# SPDX-License-Identifier: Apache-2.0
"""Whether the owner of a host may read the memory of a process that uses it, as te's transport
between processes of one host does.

The owner writes random bytes (a *nonce*) behind the tray, which both have mapped, and reads them
where the process has it, by ``process_vm_readv``: once at the start, and with each copy. Another
program under the process's number has no such tray. The owner chooses the bytes: of a process that
did, it could read any other with bytes that are known.

Yama (``kernel.yama.ptrace_scope``) may forbid it: nothing is done about that here, since a process
can let in one other alone, which te's peers need more.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.objects.copying import Foreign
from kvstore.protocol.mapped import Mapped
from te.transports.samehost.messages import Nonce
from te.transports.samehost.process import Process, peer_process
from te.transports.samehost.reach import cannot_read

__all__ = ["NONCE_NBYTES", "Reached", "reached"]

NONCE_NBYTES: Final = 16
"""So many bytes of a tray's memory lie behind the tray."""


@dataclass(frozen=True)
class Reached:
    """A process whose memory can be read from here. Whoever has it closes it."""

    process: Process
    foreign: Foreign

    @property
    def is_same(self) -> bool:
        """To be asked behind a read: it was of the process that has connected, and of a program
        that its user may look into. An owner with CAP_SYS_PTRACE may read more."""
        try:
            user = Path(f"/proc/{self.process.pid}").stat().st_uid
        except OSError:
            return False
        return user == os.geteuid() and self.process.lives()

    def close(self) -> None:
        """It is not read any more."""
        self.process.close()


def reached(line: socket.socket, tray_fd: int, tray: Mapped, address: int) -> Reached | str:
    """The process at the other end, which has its tray there, or why its memory cannot be read."""
    data = secrets.token_bytes(NONCE_NBYTES)
    behind = tray.nbytes - NONCE_NBYTES
    try:
        os.pwrite(tray_fd, data, behind)
    except OSError as exc:  # Such as for a limit of file sizes, or a seal.
        return f"its tray cannot be written: {exc.strerror}"
    process = peer_process(line)
    if isinstance(process, str):
        return process
    found = Reached(process, Foreign(process.pid, address + behind, data))
    problem = cannot_read(process, Nonce(address + behind, data))
    if problem is None and not found.is_same:
        problem = f"process {process.pid} is of a program that its user may not look into"
    if problem is None:
        return found
    found.close()
    return problem
