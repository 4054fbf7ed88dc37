# SPDX-License-Identifier: Apache-2.0
# Memory for bookkeeping.

from libc.stdlib cimport abort, calloc, realloc

cdef inline void *need(size_t nbytes) noexcept nogil:
    """Zeroed. Without a few hundred bytes nothing can go on."""
    cdef void *p = calloc(1, nbytes)
    if p == NULL:
        abort()
    return p


cdef inline void *need_more(void *p, size_t nbytes) noexcept nogil:
    """The same memory with more room, which is not zeroed."""
    p = realloc(p, nbytes)
    if p == NULL:
        abort()
    return p
