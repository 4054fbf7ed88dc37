# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from te.core.heap cimport need
from te.core.kinds cimport Kind
from te.core.notes cimport box_close, box_open
from te.core.notices cimport notices_close, notices_open
from te.core.regions cimport regions_close, regions_open
from te.core.posix cimport EINVAL
from te.core.sections cimport RUNNERS_MAX, quiesce
from te.core.staging cimport SLOTS_MAX
from te.core.stager cimport stager_free, stager_new, stager_quiesce
from te.core.sync cimport (
    load32, pthread_mutex_destroy, pthread_mutex_init, store32, store_pointer, swap_pointer_if,
)
from te.core.tags cimport tags_close, tags_init
from te.core.worker cimport workers_close, workers_open

cdef enum:
    CHECK_LEAST_NS = 5000000
    CHECK_MOST_NS = 250000000


cdef int plane_open(Plane *p, u32 workers, u64 spin_ns) noexcept nogil:
    cdef u32 i
    cdef int errnum, other
    pthread_mutex_init(&p.lock, NULL)
    tags_init(&p.tags)
    box_open(&p.notes)
    errnum = workers_open(&p.workers, workers, spin_ns)
    p.workers.check_ns = min(
        max(min(p.stall_ns / 4, p.suspect_ns / 5), <u64>CHECK_LEAST_NS), <u64>CHECK_MOST_NS)
    p.sections.n = workers + RUNNERS_MAX
    for i in range(workers):
        p.sections.of[i] = &p.workers.of[i].section
    for i in range(RUNNERS_MAX):
        p.sections.of[workers + i] = &p.workers.runners[i].section
    regions_open(&p.regions, &p.sections)
    other = notices_open(&p.notices)
    return errnum if errnum else other


cdef void plane_close(Plane *p) noexcept nogil:
    cdef Private *one
    workers_close(&p.workers)
    regions_close(&p.regions)
    tags_close(&p.tags)
    box_close(&p.notes)
    notices_close(&p.notices)
    while p.privates != NULL:
        one = p.privates
        p.privates = one.next
        free(one)
    pthread_mutex_destroy(&p.lock)


cdef int plane_stage(Plane *p, void *base, u64 nbytes, u64 slot_bytes) noexcept:
    # Fewer workers than it was meant for do not need all of it.
    cdef u64 part = min(nbytes / p.workers.n, 2 * slot_bytes * SLOTS_MAX)
    cdef Stager *s
    cdef u32 i
    for i in range(p.workers.n):
        s = stager_new(&p.workers.of[i], <uint8_t *>base + i * part, part, slot_bytes)
        if s == NULL:
            return EINVAL  # As of the first: they are all alike.
        store_pointer(&p.stagers[i], s)
    return 0


cdef bint plane_unstage(Plane *p) noexcept nogil:
    cdef bint done = True
    cdef u32 i
    for i in range(p.workers.n):
        if p.stagers[i] != NULL and stager_free(p.stagers[i]):
            p.stagers[i] = NULL
        done &= p.stagers[i] == NULL
    return done


cdef bint plane_quiesce(
    Plane *p, void *link, void *opening, u64 start, u64 end, u64 until_ns
) noexcept nogil:
    cdef Stager *s
    cdef u32 i
    if not quiesce(&p.sections, link, opening, start, end, until_ns):
        return False
    for i in range(p.workers.n):
        s = <Stager *>load_pointer(&p.stagers[i])
        if s != NULL and not stager_quiesce(s, link, opening, until_ns):
            return False
    return True


cdef void plane_know(Plane *p, Kind *kind) noexcept nogil:
    cdef u32 i
    if kind.ops == NULL or kind.ops.flush == NULL:
        return
    for i in range(p.to_flush_n):
        if p.to_flush[i] == kind:
            return
    p.to_flush[p.to_flush_n] = kind
    store32(&p.to_flush_n, p.to_flush_n + 1)


cdef int plane_flush(Plane *p) noexcept nogil:
    cdef u32 i
    cdef int problem = 0
    for i in range(load32(&p.to_flush_n)):
        if problem == 0:
            problem = p.to_flush[i].ops.flush(p.to_flush[i].state)
    return problem


cdef void *plane_private(Plane *p, const void *of, size_t nbytes) noexcept nogil:
    cdef Private *first
    cdef Private *one
    cdef Private *new = NULL
    while True:
        first = one = <Private *>load_pointer(&p.privates)
        while one != NULL and one.of != of:
            one = one.next
        if one != NULL:
            free(new)
            return one + 1
        if new == NULL:
            new = <Private *>need(sizeof(Private) + nbytes)
            new.of = of
        new.next = first
        if swap_pointer_if(&p.privates, first, new):
            return new + 1
