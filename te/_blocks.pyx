# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# One pass over descriptors where numpy needs ten, each with an array of its own: 1 ns a block
# against 20. Pure; see _blocks.pyi for the contract.

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t

ctypedef uint64_t u64

cdef enum: LIMIT_BITS = 63

cdef struct Block:  # te.blocks.BLOCK
    u64 src, dst, nbytes


def checked_total(object blocks):
    cdef Py_buffer view
    cdef u64 i, total = 0, bad = 0
    PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
    for i in range(<u64>view.len / sizeof(Block)):
        look(&(<Block *>view.buf)[i], &total, &bad)
    PyBuffer_Release(&view)
    return verdict(total, bad)


def fill(object blocks, object src, object dst, object nbytes):
    cdef Py_buffer view, column[3]
    cdef u64 *from_[3]
    cdef u64 step[3]
    cdef u64 i, total = 0, bad = 0
    cdef Block *b
    cdef int k
    PyObject_GetBuffer(blocks, &view, PyBUF_WRITABLE)
    PyObject_GetBuffer(src, &column[0], PyBUF_SIMPLE)
    PyObject_GetBuffer(dst, &column[1], PyBUF_SIMPLE)
    PyObject_GetBuffer(nbytes, &column[2], PyBUF_SIMPLE)
    for k in range(3):
        from_[k] = <u64 *>column[k].buf
        step[k] = column[k].len > <Py_ssize_t>sizeof(u64)
    for i in range(<u64>view.len / sizeof(Block)):
        b = &(<Block *>view.buf)[i]
        b.src, b.dst, b.nbytes = from_[0][0], from_[1][0], from_[2][0]
        look(b, &total, &bad)
        for k in range(3):
            from_[k] += step[k]
    for k in range(3):
        PyBuffer_Release(&column[k])
    PyBuffer_Release(&view)
    return verdict(total, bad)


cdef inline void look(Block *b, u64 *total, u64 *bad) noexcept nogil:
    """Without a branch. Sums of two numbers below the limit never wrap; that of one which does not
    count any more may."""
    bad[0] |= (b.nbytes - 1) | b.src | b.dst
    bad[0] |= (b.src + b.nbytes - 1) | (b.dst + b.nbytes - 1)
    total[0] += b.nbytes
    bad[0] |= total[0]


cdef inline object verdict(u64 total, u64 bad):
    return -1 if bad >= <u64>1 << LIMIT_BITS else total
