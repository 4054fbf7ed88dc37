# SPDX-License-Identifier: Apache-2.0
# What all links of an engine share.

from te.core.notices cimport Notices
from te.core.regions cimport Regions
from te.core.sections cimport Sections
from te.core.sync cimport pthread_mutex_t, u32, u64
from te.core.tags cimport Tags
from te.core.worker cimport Workers

cdef enum:  # status of a transfer; te.transfers.Status in this order
    PENDING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3

# What a transport keeps for an engine; its own struct follows.
cdef struct Private:
    const void *of
    Private *next

cdef struct Plane:
    Workers workers
    Sections sections
    Regions regions
    Tags tags
    Notices notices
    u64 stall_ns  # without progress until a transfer fails
    u64 rail_ns, suspect_ns  # without progress until a rail is given up, or helped by others
    u64 segment_bytes  # of a frame, at most
    u32 segment_blocks
    u64 links  # made so far, under the interpreter lock
    # Atomic.
    u64 bytes_sent, bytes_received, connections_in, connections_out
    u64 outcomes[4]
    pthread_mutex_t lock
    Private *privates  # under the lock

# 0 or an errno; with an errno `plane_close` is still due.
cdef int plane_open(Plane *p, u32 workers, u64 spin_ns) noexcept nogil
cdef void plane_close(Plane *p) noexcept nogil  # no worker runs, and no link is left
# What a transport, told by any address of its own, keeps for the engine: `nbytes` of memory, zeroed
# when it is first asked for, until the engine is gone.
cdef void *plane_private(Plane *p, const void *of, size_t nbytes) noexcept nogil
