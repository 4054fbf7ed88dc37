# SPDX-License-Identifier: Apache-2.0
"""Whether the owner of a host may read the memory of a process that uses it, as te's transport
between processes of one host does.

The process tells random bytes and where they lie in its memory (a *nonce*); a child of it, or
another program, has others there. The owner reads them by ``process_vm_readv`` once at the start,
and again with each copy. Yama (``kernel.yama.ptrace_scope``) may forbid it: nothing is done about
that here, since a process can let in one other alone, which te's peers need more.
"""

from __future__ import annotations

import socket

from kvstore.objects.copying import Foreign
from kvstore.protocol.messages import Greet
from te.transports.samehost.messages import Nonce
from te.transports.samehost.process import peer_process
from te.transports.samehost.reach import NonceMemory, cannot_read

__all__ = ["NonceMemory", "reachable"]


def reachable(line: socket.socket, greet: Greet) -> Foreign | str:
    """The process at the other end, if its memory can be read from here; or why it cannot."""
    if not greet.nonce:
        return "it does not say where its nonce lies"
    process = peer_process(line)
    if isinstance(process, str):
        return process
    try:
        problem = cannot_read(process, Nonce(greet.nonce_address, greet.nonce))
    finally:
        process.close()
    return problem or Foreign(process.pid, greet.nonce_address, greet.nonce)
