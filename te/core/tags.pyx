# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free
from te.core.heap cimport need
from te.core.maps cimport map_free, map_get, map_put, map_take
from te.core.sync cimport (
    add32, load32, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock, u64,
)


cdef void tags_init(Tags *tags) noexcept nogil:
    pthread_mutex_init(&tags.lock, NULL)


cdef void tags_close(Tags *tags) noexcept nogil:
    cdef u64 i
    for i in range(tags.known.size):
        opening_drop(<Opening *>tags.known.values[i])
    map_free(&tags.known)
    pthread_mutex_destroy(&tags.lock)


cdef bint tag_open(Tags *tags, u64 value, bint *is_open) noexcept nogil:
    cdef Opening *o
    cdef bint is_new
    pthread_mutex_lock(&tags.lock)
    o = <Opening *>map_get(&tags.known, value)
    is_new = o == NULL
    if is_new:
        o = opening_new(value)
        map_put(&tags.known, value, o)
    is_open[0] = load32(&o.is_open) != 0
    pthread_mutex_unlock(&tags.lock)
    return is_new


cdef void opening_drop(Opening *o) noexcept nogil:
    if o != NULL and add32(&o.refs, -1) == 0:
        free(o)


cdef Opening *opening_new(u64 value) noexcept nogil:
    cdef Opening *o = <Opening *>need(sizeof(Opening))
    o.value = value
    o.is_open = o.refs = 1
    return o


cdef Opening *opening_get(Tags *tags, u64 value) noexcept nogil:
    pthread_mutex_lock(&tags.lock)
    cdef Opening *o = <Opening *>map_get(&tags.known, value)
    if o != NULL:
        add32(&o.refs, 1)
    pthread_mutex_unlock(&tags.lock)
    return o


cdef Opening *opening_find(Tags *tags, u64 value) noexcept nogil:
    cdef Opening *o = opening_get(tags, value)
    if o != NULL and not load32(&o.is_open):
        opening_drop(o)
        return NULL
    return o


cdef void opening_forget(Tags *tags, Opening *o) noexcept nogil:
    pthread_mutex_lock(&tags.lock)
    if <Opening *>map_get(&tags.known, o.value) == o:
        map_take(&tags.known, o.value)
        opening_drop(o)
    pthread_mutex_unlock(&tags.lock)
