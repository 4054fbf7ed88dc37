# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free
from libc.string cimport memset
from te.core.heap cimport need
from te.core.sync cimport u64


cdef inline u64 map_slot(Map *m, u64 key) noexcept nogil:
    return ((key * <u64>0x9E3779B97F4A7C15) >> 17) & (m.size - 1)


cdef void *map_get(Map *m, u64 key) noexcept nogil:
    if m.count == 0:
        return NULL
    cdef u64 i = map_slot(m, key)
    while m.values[i] != NULL:
        if m.keys[i] == key:
            return m.values[i]
        i = (i + 1) & (m.size - 1)
    return NULL


cdef void map_put(Map *m, u64 key, void *value) noexcept nogil:
    """The key must not be in it."""
    cdef Map bigger
    cdef u64 i
    if 2 * (m.count + 1) > m.size:
        bigger.size = 2 * m.size if m.size else 16
        bigger.count = 0
        bigger.keys = <u64 *>need(bigger.size * sizeof(u64))
        bigger.values = <void **>need(bigger.size * sizeof(void *))
        for i in range(m.size):
            if m.values[i] != NULL:
                map_put(&bigger, m.keys[i], m.values[i])
        map_free(m)
        m[0] = bigger
    i = map_slot(m, key)
    while m.values[i] != NULL:
        i = (i + 1) & (m.size - 1)
    m.keys[i] = key
    m.values[i] = value
    m.count += 1


cdef void *map_take(Map *m, u64 key) noexcept nogil:
    """Removes the key; its value, or NULL when it is not there."""
    if m.count == 0:
        return NULL
    cdef u64 i = map_slot(m, key), hole, home
    while m.values[i] != NULL and m.keys[i] != key:
        i = (i + 1) & (m.size - 1)
    cdef void *value = m.values[i]
    if value == NULL:
        return NULL
    m.count -= 1
    hole = i
    m.values[hole] = NULL
    while True:  # Moves up whatever could no longer be found across the hole.
        i = (i + 1) & (m.size - 1)
        if m.values[i] == NULL:
            return value
        home = map_slot(m, m.keys[i])
        if ((i - home) & (m.size - 1)) >= ((i - hole) & (m.size - 1)):
            m.keys[hole] = m.keys[i]
            m.values[hole] = m.values[i]
            m.values[i] = NULL
            hole = i


cdef void map_free(Map *m) noexcept nogil:
    free(m.keys)
    free(m.values)
    memset(m, 0, sizeof(Map))
