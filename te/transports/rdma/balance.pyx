# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.math cimport HUGE_VAL, exp

cdef double RATE_LEVEL = 3.0
cdef double RATE_FLOOR = 1.0 / 16
# Time constant of a rate. With 0.1 the soft devices of `speeds_of` differed 4.4-fold in 1 of 100
# cases.
cdef double RATE_MEMORY_S = 0.5
cdef double RETRY_MEMORY_S = 0.02


cdef u32 choose(const Lane *lanes, u32 n, double nbytes, double waiting, u32 turn) noexcept nogil:
    cdef u32 i = turn % n, k, best = NO_LANE
    cdef double end, soonest = HUGE_VAL, soonest_free = HUGE_VAL, in_flight = 0, speed = 0
    for k in range(n):
        if lanes[i].speed > 0:
            speed += lanes[i].speed
            in_flight += lanes[i].in_flight
            end = (lanes[i].in_flight + nbytes) / lanes[i].speed
            soonest = min(soonest, end)
            if lanes[i].has_room and end < soonest_free:
                soonest_free = end
                best = i
        i = i + 1 if i + 1 < n else 0
    if best == NO_LANE or soonest_free <= soonest or soonest_free * speed <= in_flight + waiting:
        return best
    return NO_LANE


cdef double slowness(uint8_t distance) noexcept nogil:
    return 1.0 if distance == 0 else 4.0 if distance == 1 else 16.0


cdef void pace_begin(Pace *p, double bytes_per_s) noexcept nogil:
    p.nbytes, p.busy_s = bytes_per_s * RATE_MEMORY_S, RATE_MEMORY_S


cdef void pace_retry(Pace *p, double bytes_per_s) noexcept nogil:
    p.nbytes, p.busy_s = bytes_per_s * RETRY_MEMORY_S, RETRY_MEMORY_S


cdef void pace_note(Pace *p, double nbytes, double busy_s) noexcept nogil:
    cdef double kept = exp(-busy_s / RATE_MEMORY_S)
    if busy_s > 0:
        # Something moved in that time, or nobody would have looked: a rate is never 0.
        p.nbytes = kept * p.nbytes + max(nbytes, 1.0)
        p.busy_s = kept * p.busy_s + busy_s


cdef double pace_rate(const Pace *p) noexcept nogil:
    return p.nbytes / p.busy_s


cdef double speeds_of(const double *rates, double *speeds, u32 n) noexcept nogil:
    cdef double fastest = 0
    cdef u32 i
    for i in range(n):
        fastest = max(fastest, rates[i])
    for i in range(n):
        speeds[i] = fastest if rates[i] * RATE_LEVEL >= fastest else max(
            rates[i], fastest * RATE_FLOOR)
    return fastest
