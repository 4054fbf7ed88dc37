# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# One pass over descriptors where numpy needs ten, each with an array of its own: 1 ns a block
# against 20. Pure; see _blocks.pyi for the contract.

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

ctypedef uint64_t u64

cdef enum: LIMIT_BITS = 63

cdef struct Block:  # te.blocks.BLOCK
    u64 src, dst, nbytes

cdef struct Piece:  # te.transports.rdma.pieces.PIECE
    u64 first, offset, nbytes
    uint32_t rail, next


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


def locate(object blocks, list offsets):
    cdef Py_buffer view
    cdef Block *b
    cdef u64 n, i = 0, end, offset
    cdef list found = []
    PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
    b = <Block *>view.buf
    n = view.len / sizeof(Block)
    end = b[0].nbytes if n else 0
    for offset in offsets:
        while end < offset and i + 1 < n:
            i += 1
            end += b[i].nbytes
        found.append((i, end, b[i].nbytes if n else 0))
    PyBuffer_Release(&view)
    return found


def cut(object blocks, list marks, u64 piece_nbytes, u64 pieces_max):
    cdef Py_buffer view
    cdef object out = PyBytes_FromStringAndSize(NULL, pieces_max * sizeof(Piece))
    cdef Piece *pieces = <Piece *>PyBytes_AS_STRING(out)
    cdef u64 n = 0, end, end_offset
    cdef uint32_t rail = 0
    cdef Piece at
    memset(&at, 0, sizeof(Piece))
    PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
    for end, end_offset in marks[1:]:
        at.rail = rail
        n = cut_run(<Block *>view.buf, &at, end, end_offset, piece_nbytes, pieces, n, pieces_max)
        rail += 1
    PyBuffer_Release(&view)
    return out[:n * sizeof(Piece)]


cdef u64 cut_run(
    Block *blocks, Piece *at, u64 end, u64 end_offset, u64 piece_nbytes, Piece *pieces, u64 n,
    u64 pieces_max
) noexcept nogil:
    """Appends the pieces from where `at` begins to the end given, and moves it there."""
    cdef u64 i = at.first, offset = at.offset, left, rest
    while (i < end or offset < end_offset) and n < pieces_max:
        at.first, at.offset = i, offset
        left = piece_nbytes
        while left and (i < end or offset < end_offset):
            rest = (blocks[i].nbytes if i < end else end_offset) - offset
            if rest > left or i == end:
                rest = min(rest, left)
                offset += rest
                left -= rest
                continue
            left -= rest
            offset = 0
            i += 1
            while i < end and blocks[i].nbytes <= left:
                left -= blocks[i].nbytes
                i += 1
        at.nbytes = piece_nbytes - left
        pieces[n] = at[0]
        n += 1
    at.first, at.offset = i, offset
    return n
