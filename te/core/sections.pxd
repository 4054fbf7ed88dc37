# SPDX-License-Identifier: Apache-2.0
# Marked sections: what a worker is writing just now. An opening (te/core/tags.pxd) is revoked by marking it,
# and then waiting for the sections under way that may not have seen the mark.

from te.core.sync cimport add64, note_pointer, store64, u32, u64

cdef enum:
    WORKERS_MAX = 4
    RUNNERS_MAX = 16  # threads that run workers, or did and wait in the kernel for another process
    SECTIONS_MAX = WORKERS_MAX + RUNNERS_MAX

# Of one worker, or of one thread that runs workers.
cdef struct Section:
    u64 count  # atomic: odd while somebody is inside
    void *link  # atomic: whose bytes it writes
    void *opening  # atomic: of the tag under which; NULL where none is asked for
    # Atomic: all that it writes lies there; `end` is 0 where nobody has said so (`section_within`).
    u64 start, end

cdef struct Sections:
    Section *of[SECTIONS_MAX]
    u32 n

cdef inline void enter(Section *s, void *link, void *opening) noexcept nogil:
    """Who waits for a section reads what it is about after having seen that it is under way."""
    note_pointer(&s.link, link)
    note_pointer(&s.opening, opening)
    add64(&s.count, 1)


cdef inline void leave(Section *s) noexcept nogil:
    add64(&s.count, 1)


cdef inline void section_within(Section *s, u64 start, u64 end) noexcept nogil:
    """Inside of one that may take long: what it writes. Whoever waits for other memory goes on. It is
    taken back, by `end` 0, before the section is left."""
    store64(&s.start, start)
    store64(&s.end, end)


# Returns once each section under way at the call has ended that is the link's and under the opening
# (NULL is any), and may write between these addresses (`end` 0 is anywhere); False when one has not at
# `until_ns`. One that copies out of another process waits for that process's pages: those who wait for
# another link, opening or memory must not wait with it.
cdef bint quiesce(
    Sections *all, void *link, void *opening, u64 start, u64 end, u64 until_ns
) noexcept nogil
