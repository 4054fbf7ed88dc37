# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# One pass over descriptors where numpy needs ten, each with an array of its own: 1 ns a block
# against 20. Pure; see _blocks.pyi for the contract.

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

ctypedef uint64_t u64

cdef enum: LIMIT_BITS = 63

cdef struct Block:  # te.blocks.BLOCK
    u64 src, dst, nbytes

cdef struct Piece:  # te.links.pieces.PIECE
    u64 first, offset, nbytes
    uint32_t rail, next, is_waiting


def checked_total(object blocks):
    cdef Py_buffer view
    cdef Block *b
    cdef u64 n, i, total = 0, bad = 0, limit = <u64>1 << LIMIT_BITS
    PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
    b = <Block *>view.buf
    n = view.len / sizeof(Block)
    for i in range(n):
        # Without a branch. Sums of two numbers below the limit never wrap; that of one which does
        # not count any more may.
        bad |= (b[i].nbytes - 1) | b[i].src | b[i].dst
        bad |= (b[i].src + b[i].nbytes - 1) | (b[i].dst + b[i].nbytes - 1)
        total += b[i].nbytes
        bad |= total
    PyBuffer_Release(&view)
    return -1 if bad >= limit else total


def total(object blocks):
    cdef Py_buffer view
    cdef u64 n, i, sum = 0
    PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
    n = view.len / sizeof(Block)
    for i in range(n):
        sum += (<Block *>view.buf)[i].nbytes
    PyBuffer_Release(&view)
    return sum


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
        found.append((i, end))
    PyBuffer_Release(&view)
    return found


def cut(object blocks, object bounds, u64 piece_nbytes, u64 pieces_max):
    cdef Py_buffer view, cuts
    cdef object out = PyBytes_FromStringAndSize(NULL, pieces_max * sizeof(Piece))
    cdef Piece *pieces = <Piece *>PyBytes_AS_STRING(out)
    cdef u64 n
    PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
    PyObject_GetBuffer(bounds, &cuts, PyBUF_SIMPLE)
    n = cut_rails(<Block *>view.buf, <u64 *>cuts.buf, cuts.len / sizeof(u64) - 1, piece_nbytes,
                  pieces, pieces_max)
    PyBuffer_Release(&view)
    PyBuffer_Release(&cuts)
    return out[:n * sizeof(Piece)]


cdef u64 cut_rails(
    Block *blocks, u64 *bounds, u64 rails, u64 piece_nbytes, Piece *pieces, u64 pieces_max
) noexcept nogil:
    cdef u64 rail, at, offset, left, rest, n = 0
    cdef Piece *p
    for rail in range(rails):
        at, offset = bounds[rail], 0
        while at < bounds[rail + 1] and n < pieces_max:
            p = &pieces[n]
            memset(p, 0, sizeof(Piece))
            p.first, p.offset, p.rail = at, offset, <uint32_t>rail
            left = piece_nbytes
            while left and at < bounds[rail + 1]:
                rest = blocks[at].nbytes - offset
                if rest > left:
                    offset += left
                    left = 0
                else:
                    left -= rest
                    offset = 0
                    at += 1
            p.nbytes = piece_nbytes - left
            n += 1
    return n
