# SPDX-License-Identifier: Apache-2.0
# The source's side: the other side's memory, as it has told.

from te.core.frames cimport Connection
from te.core.link cimport Link, Transfer
from te.core.regions cimport right_to_write
from te.core.sync cimport u32, u64
from te.core.wire cimport RemoteRange, RIGHT_READ
from te.transports.rdma.state cimport Direct

# The destination's memory anew, or the rest of it: ranges that rise and do not overlap. False after
# a violation.
cdef bint on_table(Connection *c) noexcept nogil
# Gives a transfer up before a byte of it moves, if one of its blocks has no place at the other side.
# In the turn of the link's worker, which keeps the table as it is, under the link's lock: 1 to 4 ns a block, 25
# where each lies in another of 61 ranges.
cdef void check_remote(Link *link, Transfer *t) noexcept nogil
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
