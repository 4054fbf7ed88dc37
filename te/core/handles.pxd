# SPDX-License-Identifier: Apache-2.0
# Links and transfers as Python holds them; handles.pyi is the contract. A transport derives its own
# kind of link.

from te.core.engine cimport Engine
from te.core.frames cimport Protocol
from te.core.link cimport Link, Ops, Transfer
from te.core.encryption cimport Encrypted

cdef class LinkHandle:
    cdef Link *k
    cdef Engine engine  # it must outlive the link
    # Called once, by the transport's own kind.
    cdef void make(self, Engine engine, const Ops *ops, bint is_incoming, void *own)
    # Takes over descriptors as `connection_add` does, on the worker that is next or the one given;
    # False on a dead or full link. `OSError`; then they are not taken.
    cdef bint add(
        self, const Protocol *protocol, int fd, int rings_fd, size_t own_nbytes, int worker,
        Encrypted *encrypted=*
    ) except -1

cdef class TransferHandle:
    cdef Transfer *t
    cdef LinkHandle link
