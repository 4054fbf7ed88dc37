# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.sync cimport load64, load_pointer, look_later, relax, u32, u64


cdef inline bint concerns(Section *s, void *link, void *opening) noexcept nogil:
    return (link == NULL or load_pointer(&s.link) == link) and (
        opening == NULL or load_pointer(&s.opening) == opening)


cdef inline bint is_elsewhere(Section *s, u64 start, u64 end) noexcept nogil:
    cdef u64 its_end = load64(&s.end)
    return end != 0 and its_end != 0 and (load64(&s.start) >= end or its_end <= start)


cdef bint quiesce(
    Sections *all, void *link, void *opening, u64 start, u64 end, u64 until_ns
) noexcept nogil:
    cdef u64 pause_ns = 20000, seen
    cdef u32 i, looks = 0
    for i in range(all.n):
        seen = load64(&all.of[i].count)
        if not (seen & 1 and concerns(all.of[i], link, opening)):
            continue
        while load64(&all.of[i].count) == seen:
            looks += 1
            if looks < 200:
                relax()
                continue
            # Of the section that was seen: what it writes is taken back before it is left.
            if is_elsewhere(all.of[i], start, end) and load64(&all.of[i].count) == seen:
                break
            if not look_later(until_ns, pause_ns):
                return False
            pause_ns = min(pause_ns + pause_ns / 8, <u64>1000000)
    return True
