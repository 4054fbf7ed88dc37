# SPDX-License-Identifier: Apache-2.0
# What all links of an engine share.

from te.core.kinds cimport Kind, KINDS_MAX
from te.core.notes cimport Box
from te.core.notices cimport Notices
from te.core.regions cimport Regions
from te.core.sections cimport Sections, WORKERS_MAX
from te.core.stager cimport Stager
from te.core.sync cimport load_pointer, pthread_mutex_t, u32, u64
from te.core.tags cimport Tags
from te.core.tally cimport Ledger, LEDGERS_MAX
from te.core.worker cimport Workers

# Of a transfer; te.transfers.Status has the same names for users.
cpdef enum Status:
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
    Box notes  # that have come
    u64 stall_ns  # without progress until a transfer fails
    u64 rail_ns, suspect_ns  # without progress until a rail is given up, or helped by others
    u64 segment_bytes  # of a frame, at most
    u32 segment_blocks
    Stager *stagers[WORKERS_MAX]  # atomic: by worker; NULL while all memory is the kernel's to touch
    Kind *to_flush[KINDS_MAX]  # kinds that must be flushed before they show what NICs have written
    u32 to_flush_n  # atomic
    u64 connections_in, connections_out  # atomic
    u64 reply_blocks  # atomic: of all links (`Link.reply_blocks`)
    Private *privates  # atomic: the newest first
    pthread_mutex_t lock
    # Under the lock.
    void *links_first  # all there are: Link
    u64 links  # made so far
    Ledger ledgers[LEDGERS_MAX]  # what those counted that are gone

# 0 or an errno; with an errno `plane_close` is still due.
cdef int plane_open(Plane *p, u32 workers, u64 spin_ns) noexcept nogil
cdef void plane_close(Plane *p) noexcept nogil  # no worker runs, and no link is left
# Memory for staging, which all kinds have pinned, in slots of so many bytes; once. 0, or EINVAL for too
# little or too much. By a calling thread.
cdef int plane_stage(Plane *p, void *base, u64 nbytes, u64 slot_bytes) noexcept
# No worker runs: whether that memory can be given back, as no copy is under way.
cdef bint plane_unstage(Plane *p) noexcept nogil
# Returns once each landing under way at the call, in a section or as a copy, has ended that is the
# link's and under the opening (NULL is any), and may write between these addresses (`end` 0 is anywhere);
# False when one has not at `until_ns`.
cdef bint plane_quiesce(
    Plane *p, void *link, void *opening, u64 start, u64 end, u64 until_ns
) noexcept nogil
# Memory of the kind is registered; under the interpreter's lock.
cdef void plane_know(Plane *p, Kind *kind) noexcept nogil
# A NIC has written something that is to be told as landed: has it be seen. 0 or an errno.
cdef int plane_flush(Plane *p) noexcept nogil
# What a transport, told by any address of its own, keeps for the engine: `nbytes` of memory, zeroed
# when it is first asked for, until the engine is gone.
cdef void *plane_private(Plane *p, const void *of, size_t nbytes) noexcept nogil


cdef inline bint plane_stages(Plane *p) noexcept nogil:
    """Whether some of the engine's memory has to be staged."""
    return load_pointer(&p.stagers[0]) != NULL
