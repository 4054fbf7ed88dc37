# SPDX-License-Identifier: Apache-2.0
# Arrays of iovecs.

from libc.stdint cimport uint8_t
from libc.string cimport memcpy
from te.core.posix cimport iovec, preadv, pwritev
from te.core.sync cimport last_errno, u32, u64


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


cdef inline iovec *behind(iovec *v, u32 *n, u64 skip, iovec *was) noexcept nogil:
    """Those behind the first `skip` bytes, `n` of them. The first may be shortened for that: `was` is as
    it was."""
    while n[0] and skip >= v.iov_len:
        skip -= v.iov_len
        v += 1
        n[0] -= 1
    if n[0]:
        was[0] = v[0]
        v.iov_base = <uint8_t *>v.iov_base + skip
        v.iov_len -= skip
    return v


cdef inline u32 advance(iovec *v, u32 at, u64 moved) noexcept nogil:
    """Steps over bytes that were moved, fewer than all."""
    while moved >= v[at].iov_len:
        moved -= v[at].iov_len
        at += 1
    v[at].iov_base = <uint8_t *>v[at].iov_base + moved
    v[at].iov_len -= moved
    return at


cdef inline ssize_t file_copy(
    int file, uint8_t *base, u64 at, iovec *v, u32 n, u64 most, bint own, bint out
) noexcept nogil:
    """Between a memory file, which is mapped at `base`, from `at` on, and so many bytes of iovecs at most: `out` of those
    or into them. How many bytes, or an errno below zero. By the kernel, for which the application's memory that has
    vanished is -EFAULT and no crash, unless it is the plane's `own`."""
    cdef u64 cut
    cdef u32 i, k = within(v, n, most, &cut)
    cdef ssize_t moved = 0
    if own:
        for i in range(k):
            if out:
                memcpy(base + at + moved, v[i].iov_base, v[i].iov_len)
            else:
                memcpy(v[i].iov_base, base + at + moved, v[i].iov_len)
            moved += v[i].iov_len
    elif out:
        moved = pwritev(file, v, k, at)
    else:
        moved = preadv(file, v, k, at)
    if moved < 0:
        moved = -last_errno()
    if cut:
        v[k - 1].iov_len = cut
    return moved
