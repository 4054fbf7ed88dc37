# SPDX-License-Identifier: Apache-2.0
# The source's side of a transfer over RDMA: asked for, granted, looked up in the destination's memory, its pieces
# waiting for rails, given up. All of this is under the link's lock but for what takes it.

from te.core.frames cimport Connection
from te.core.link cimport Link, Transfer
from te.core.regions cimport right_to_write
from te.core.sync cimport u32, u64
from te.core.wire cimport RemoteRange, RIGHT_READ
from te.transports.rdma.state cimport Direct, Posted

# What `Ops` and `Protocol` call.
cdef void outgoing_prepare(Transfer *t, bint is_shared) noexcept nogil
cdef void outgoing_settled(Transfer *t) noexcept nogil
cdef void outgoing_cancel(Transfer *t) noexcept nogil
# Queues questions about the transfers that may begin.
cdef void outgoing_ask(Connection *c) noexcept nogil
cdef bint outgoing_acknowledged(Connection *c) noexcept nogil
# A turn of the link's worker, without a lock: gives up all that is unfinished if `Direct.verdict` says so,
# with the destination's knowledge.
cdef void outgoing_turn(Link *link) noexcept nogil

# It has waiting pieces no more.
cdef void take_ready(Link *link, Transfer *t) noexcept nogil
# The piece waits for a rail, as the next one.
cdef void requeue(Link *link, const Posted *posted) noexcept nogil
# After whatever may have ended it.
cdef void go_on(Connection *c, Transfer *t) noexcept nogil

# The destination's memory anew, or the rest of it: ranges that rise and do not overlap. False after
# a violation.
cdef bint on_table(Connection *c) noexcept nogil
# Why the other side would refuse it; of malloc.
cdef char *text_outside(Link *link, Transfer *t, u64 address, u64 nbytes) noexcept nogil


cdef inline u32 remote_right(Transfer *t) noexcept nogil:
    """What a transfer does at the other side."""
    return RIGHT_READ if t.is_read else right_to_write(t.tag)


cdef inline u32 remote_above(Direct *d, u64 address) noexcept nogil:
    """Index of the first range that starts above the address."""
    cdef u32 low = 0, high = d.table_n, middle
    while low < high:
        middle = (low + high) >> 1
        if d.table[middle].start <= address:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline RemoteRange *remote_range(Direct *d, u64 address) noexcept nogil:
    """The range that has the address; NULL if there is none."""
    cdef u32 above = remote_above(d, address)
    if above == 0 or address >= d.table[above - 1].end:
        return NULL
    return &d.table[above - 1]
