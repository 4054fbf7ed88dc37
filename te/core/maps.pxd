# SPDX-License-Identifier: Apache-2.0
# From u64 to a pointer that is not NULL: open addressing, at most half full. A map of zeros is an
# empty one. Callers see to it that one thread at a time uses a map.

from te.core.sync cimport u64

cdef struct Map:
    u64 *keys
    void **values
    u64 size, count

cdef void *map_get(Map *m, u64 key) noexcept nogil  # NULL when it is not there
cdef void map_put(Map *m, u64 key, void *value) noexcept nogil  # the key must not be in it
cdef void *map_take(Map *m, u64 key) noexcept nogil  # removes it
cdef void map_free(Map *m) noexcept nogil  # empties it; the values are the caller's
