# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.sync cimport load64, load_pointer, nanosleep, now_ns, relax, timespec, u32, u64


cdef inline bint concerns(Section *s, void *link, void *right) noexcept nogil:
    return (link == NULL or load_pointer(&s.link) == link) and (
        right == NULL or load_pointer(&s.right) == right)


cdef inline bint is_elsewhere(Section *s, u64 start, u64 end) noexcept nogil:
    cdef u64 its_end = load64(&s.end)
    return end != 0 and its_end != 0 and (load64(&s.start) >= end or its_end <= start)


cdef bint quiesce(
    Sections *all, void *link, void *right, u64 start, u64 end, u64 timeout_ns
) noexcept nogil:
    cdef u64 give_up = now_ns() + timeout_ns, seen
    cdef timespec pause
    cdef u32 i, looks = 0
    pause.tv_sec = 0
    pause.tv_nsec = 20000
    for i in range(all.n):
        seen = load64(&all.of[i].count)
        if not (seen & 1 and concerns(all.of[i], link, right)):
            continue
        while load64(&all.of[i].count) == seen:
            looks += 1
            if looks < 200:
                relax()
                continue
            # Of the section that was seen: what it writes is taken back before it is left.
            if is_elsewhere(all.of[i], start, end) and load64(&all.of[i].count) == seen:
                break
            if now_ns() >= give_up:
                return False
            nanosleep(&pause, NULL)
            pause.tv_nsec = min(pause.tv_nsec + pause.tv_nsec / 8, <long>1000000)
    return True
