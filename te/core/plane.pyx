# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free
from te.core.heap cimport need
from te.core.notices cimport notices_close, notices_open
from te.core.regions cimport regions_close, regions_open
from te.core.sync cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
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
    errnum = workers_open(&p.workers, workers, spin_ns)
    p.workers.check_ns = min(
        max(min(p.stall_ns / 4, p.suspect_ns / 2), <u64>CHECK_LEAST_NS), <u64>CHECK_MOST_NS)
    p.sections.n = workers
    for i in range(workers):
        p.sections.of[i] = &p.workers.of[i].section
    regions_open(&p.regions, &p.sections)
    other = notices_open(&p.notices)
    return errnum if errnum else other


cdef void plane_close(Plane *p) noexcept nogil:
    cdef Private *one
    workers_close(&p.workers)
    regions_close(&p.regions)
    tags_close(&p.tags)
    notices_close(&p.notices)
    while p.privates != NULL:
        one = p.privates
        p.privates = one.next
        free(one)
    pthread_mutex_destroy(&p.lock)


cdef void *plane_private(Plane *p, const void *of, size_t nbytes) noexcept nogil:
    pthread_mutex_lock(&p.lock)
    cdef Private *one = p.privates
    while one != NULL and one.of != of:
        one = one.next
    if one == NULL:
        one = <Private *>need(sizeof(Private) + nbytes)
        one.of = of
        one.next = p.privates
        p.privates = one
    pthread_mutex_unlock(&p.lock)
    return one + 1
