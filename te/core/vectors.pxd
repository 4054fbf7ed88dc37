# SPDX-License-Identifier: Apache-2.0
# Arrays of iovecs.

from libc.stdint cimport uint8_t
from te.core.posix cimport iovec
from te.core.sync cimport u32, u64


cdef inline u32 within(iovec *v, u32 n, u64 most, u64 *cut) noexcept nogil:
    """How many iovecs make up to `most` bytes. The last of them may be shortened for that: `cut`
    has the length that it had, or 0."""
    cdef u32 k = 0
    cut[0] = 0
    while k < n and most:
        if v[k].iov_len > most:
            cut[0] = v[k].iov_len
            v[k].iov_len = most
        most -= v[k].iov_len
        k += 1
    return k


cdef inline u32 advance(iovec *v, u32 at, u64 moved) noexcept nogil:
    """Steps over bytes that were moved, fewer than all."""
    while moved >= v[at].iov_len:
        moved -= v[at].iov_len
        at += 1
    v[at].iov_base = <uint8_t *>v[at].iov_base + moved
    v[at].iov_len -= moved
    return at
