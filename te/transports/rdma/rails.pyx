# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from te.core.sync cimport NEVER_NS

cdef extern from "transports/rdma/rails.h" nogil:
    const uint8_t **NEXT_RAIL


cdef void rail_begin(Rail *r, u32 ways, u64 seed, u64 now) noexcept nogil:
    rail_rest(r)
    r.ways = ways
    r.random = seed
    r.since_ns = r.due_ns = now


cdef void rail_rest(Rail *r) noexcept nogil:
    r.state = RAIL_DOWN
    r.due_ns = NEVER_NS


cdef u64 jittered(Rail *r, u64 ns) noexcept nogil:
    """Between a half and all of it."""
    cdef u64 x
    r.random += <u64>0x9E3779B97F4A7C15  # splitmix64
    x = (r.random ^ r.random >> 30) * <u64>0xBF58476D1CE4E5B9
    x = (x ^ x >> 27) * <u64>0x94D049BB133111EB
    return ns - (x ^ x >> 31) % (ns / 2 + 1)


cdef void back_off(Rail *r, const RailTiming *timing, u64 now) noexcept nogil:
    cdef u64 ns = timing.backoff_ns
    cdef u32 i
    r.failures += 1
    r.downs += 1
    if r.ways == 0:
        return
    for i in range(min(r.failures - 1, <u32>30)):
        ns = min(2 * ns, timing.backoff_max_ns)
    r.due_ns = now + jittered(r, ns)


cdef bint rail_happens(Rail *r, const RailTiming *timing, int happening, u64 now) noexcept nogil:
    cdef uint8_t next = NEXT_RAIL[r.state][happening]
    if next == 0:
        return False
    if happening == FAILS or next == RAIL_DOWN and r.state == RAIL_BUILDING:
        r.has_carried = carries(r)
        if r.has_carried and now - r.up_since_ns >= timing.steady_ns:
            r.failures = 0
    r.state = next
    r.since_ns = now
    if next == RAIL_BUILDING:
        r.epoch += 1
        if r.downs and not r.ups:
            r.way = (r.way + 1) % r.ways
    elif next == RAIL_DOWN:
        back_off(r, timing, now)
    elif happening == ANSWERS:
        r.up_since_ns = now
        r.ups += 1
    return True


cdef void rail_blame(Rail *r, int code, int errnum, const char *text) noexcept nogil:
    r.code, r.errnum = code, errnum
    r.text[0] = 0
    if text != NULL:
        snprintf(r.text, TEXT_MAX, b"%s", text)


cdef u64 rail_due(const Rail *r, const RailTiming *timing) noexcept nogil:
    if r.state == RAIL_DOWN:
        return r.due_ns
    if r.state == RAIL_BUILDING:
        return r.since_ns + timing.build_ns
    if r.state == RAIL_PROBED:
        return r.since_ns + timing.probe_ns
    return NEVER_NS


cdef int rail_late(const Rail *r) noexcept nogil:
    if r.state == RAIL_DOWN:
        return IS_DUE
    return IS_LATE if r.state == RAIL_BUILDING else FAILS


cdef void rail_hurry(Rail *r, const RailTiming *timing, u64 now) noexcept nogil:
    if r.state == RAIL_DOWN and r.due_ns != NEVER_NS:
        r.due_ns = min(r.due_ns, now + jittered(r, timing.backoff_ns))
        r.failures = 1
