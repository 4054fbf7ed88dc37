# SPDX-License-Identifier: Apache-2.0
# What a calling thread does itself, to save waking a worker up: that costs more than a small write.

from te.core.link cimport Link, Transfer
from te.core.sync cimport u64
from te.core.worker cimport Polled, Spin

cdef enum:
    INLINE_BYTES = 64 << 10  # of a transfer that a calling thread sends, and waits for, itself

# Sends what was submitted, in so many calls at most, unless all connections are busy.
cdef void send_inline(Link *link, int turns) noexcept nogil
# Wakes as many connections as the transfer has work for.
cdef void kick_some(Link *link, u64 nbytes) noexcept nogil
# Waits for the answer in the calling thread, which is awake already: waking up the connection's
# worker, and that one the caller, costs more than a small write. `may_wait`: for the connection's
# lock, which its worker may hold for milliseconds; without that what is returned, unless it is NULL,
# has still to be given back by `drive_end`, which waits.
cdef Polled *drive(Transfer *t, Spin *spin, u64 until_ns, bint may_wait) noexcept nogil
cdef void drive_end(Polled *via) noexcept nogil
