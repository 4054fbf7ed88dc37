# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from te.core.heap cimport need
from te.core.posix cimport iovec
from te.core.regions cimport regions_above
from te.core.staging cimport *
from te.core.sync cimport lock_as_caller, look_later, pthread_mutex_unlock, store32
from te.core.worker cimport PolledOps, plain_polled_ops, polled_again, polled_gone, worker_add, worker_wake


cdef u32 ended(Stager *s) noexcept nogil:
    return staging_poll(&s.out) + staging_poll(&s.into)


cdef inline bint has_news(Stager *s) noexcept nogil:
    """Whether copies are over that connections may not have seen, also of those that somebody else
    has ended (who fences)."""
    return staging_count_ended(&s.out) != s.seen[0] or staging_count_ended(&s.into) != s.seen[1]


cdef void tell(Stager *s) noexcept nogil:
    """Has the worker give connections another turn before it sleeps: those before this in its list have
    had theirs."""
    s.seen[0] = staging_count_ended(&s.out)
    s.seen[1] = staging_count_ended(&s.into)
    store32(&s.polled.worker.kicked, 1)


cdef void wake_next(Staging *ring, void **told) noexcept nogil:
    """Gives who is next a turn. If it had one and did not take the slot, it cannot use any just now;
    it will ask again, and others do not wait for that."""
    cdef void *owner = staging_next(ring)
    if owner != NULL and owner == told[0]:
        staging_skip(ring)
        owner = staging_next(ring)
    told[0] = owner
    if owner != NULL:
        polled_again(<Polled *>owner)


cdef void wake_all(Worker *w) noexcept nogil:
    """Who has a slot, and gets nothing for it, is to give it to those who wait."""
    cdef Polled *p = w.polled
    while p != NULL:
        store32(&p.kicked, 1)
        p = p.next
    store32(&w.kicked, 1)


cdef bint on_turn(Polled *p, bint slept, bint is_patient) noexcept nogil:
    cdef Stager *s = <Stager *>p
    cdef bint moved
    ended(s)
    moved = has_news(s)
    if moved:
        tell(s)
    wake_next(&s.out, &s.told[0])
    wake_next(&s.into, &s.told[1])
    if staging_is_scarce(&s.into) and staging_copying(&s.into) == 0:
        wake_all(p.worker)
    return moved


cdef bint on_look(Polled *p) noexcept nogil:
    return ended(<Stager *>p) != 0


cdef bint on_arm(Polled *p) noexcept nogil:
    cdef Stager *s = <Stager *>p
    if staging_copying(&s.out) + staging_copying(&s.into):
        p.worker.naps = True
    return has_news(s)


cdef void on_stop(Polled *p) noexcept nogil:
    polled_gone(p)  # Connections poll for themselves while they end.


cdef PolledOps OPS = plain_polled_ops()
OPS.turn = on_turn
OPS.look = on_look
OPS.arm = on_arm
OPS.stop = on_stop


cdef Stager *stager_new(Worker *w, void *base, u64 nbytes, u64 slot_bytes) noexcept:
    cdef Stager *s = <Stager *>need(sizeof(Stager))
    cdef u64 half = nbytes / 2
    if staging_open(&s.out, base, half, slot_bytes) or staging_open(
        &s.into, <uint8_t *>base + half, half, slot_bytes
    ):
        free(s)
        return NULL
    s.polled.ops = &OPS
    s.polled.is_in_memory = True
    lock_as_caller(&w.lock)
    worker_add(w, &s.polled, -1, 0)
    pthread_mutex_unlock(&w.lock)
    worker_wake(w)
    return s


cdef bint stager_free(Stager *s) noexcept nogil:
    ended(s)
    if staging_copying(&s.out) + staging_copying(&s.into):
        return False
    staging_close(&s.out)
    staging_close(&s.into)
    free(s)
    return True


cdef bint ring_quiesce(Staging *ring, void *link, void *opening, u64 until_ns) noexcept nogil:
    cdef u64 mark = staging_mark(ring)
    while not staging_ended(ring, mark, link, opening):
        if not look_later(until_ns, 20000):
            return False
    return True


cdef bint stager_quiesce(Stager *s, void *link, void *opening, u64 until_ns) noexcept nogil:
    return ring_quiesce(&s.into, link, opening, until_ns) and ring_quiesce(
        &s.out, link, opening, until_ns)


cdef u32 spans_of(
    Region **sorted, u32 count, iovec *ranges, u64 nbytes, Span *spans
) noexcept nogil:
    cdef Region *r
    cdef u64 at, left, part
    cdef u32 i, k = 0
    while nbytes and k < SPANS_MAX:
        at = <u64>ranges.iov_base
        left = min(<u64>ranges.iov_len, nbytes)
        nbytes -= left
        ranges += 1
        while left and k < SPANS_MAX:
            i = regions_above(sorted, count, at)
            if i == 0 or at >= sorted[i - 1].end:
                return 0
            r = sorted[i - 1]
            part = min(left, r.end - at)
            spans[k].kind = r.kind
            spans[k].at = <uint8_t *>at
            spans[k].nbytes = part
            k += 1
            at += part
            left -= part
    return 0 if nbytes or left else k
