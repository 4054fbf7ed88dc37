# SPDX-License-Identifier: Apache-2.0
# Links and transfers as Python holds them; handles.pyi is the contract. A transport derives its own
# kind of link.

from te.core.channels cimport Channel
from te.core.engine cimport Engine
from te.core.frames cimport Protocol
from te.core.link cimport Link, Ops, Transfer

cdef class LinkHandle:
    cdef Link *k
    cdef Engine engine  # it must outlive the link
    # Called once, by the transport's own kind; `own` is complete, and the link's from here on.
    cdef void make(self, Engine engine, const Ops *ops, bint is_incoming, void *own)
    # Takes over a channel, on the worker that is next or the one given; False on a dead or full link.
    # `OSError`. If it is not taken, it is freed, and its descriptors are the caller's.
    cdef bint add(
        self, const Protocol *protocol, Channel *channel, size_t own_nbytes, int worker=*
    ) except -1

cdef class TransferHandle:
    cdef Transfer *t
    cdef LinkHandle link
