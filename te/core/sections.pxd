# SPDX-License-Identifier: Apache-2.0
# Marked sections: what a worker is writing just now. A right is taken back by marking it as revoked,
# and then waiting for the sections under way that may not have seen the mark.

from te.core.sync cimport add64, note_pointer, u32, u64

cdef enum:
    WORKERS_MAX = 4

# Of one worker.
cdef struct Section:
    u64 count  # atomic: odd while the worker is inside
    void *link  # atomic: whose bytes it writes
    void *right  # atomic: under which right; NULL where none is asked for

cdef struct Sections:
    Section *of[WORKERS_MAX]
    u32 n

cdef inline void enter(Section *s, void *link, void *right) noexcept nogil:
    """Who waits for a section reads what it is about after having seen that it is under way."""
    note_pointer(&s.link, link)
    note_pointer(&s.right, right)
    add64(&s.count, 1)


cdef inline void leave(Section *s) noexcept nogil:
    add64(&s.count, 1)


# Returns once each section under way at the call has ended that is the link's and under the right
# (NULL is any); False when one did not in time. One that copies out of another process waits for that
# process's pages: those who wait for another link or right must not wait with it.
cdef bint quiesce(Sections *all, void *link, void *right, u64 timeout_ns) noexcept nogil
