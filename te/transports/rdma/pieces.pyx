# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.wire cimport PIECES_MAX

cdef enum:
    PIECE_BYTES = 1 << 20
    PIECE_BLOCKS = 256  # a piece's mark costs as much as a block
    GRAIN_BYTES = 128 << 10
    CUT_ALIGN = 4096


cdef inline u64 over(u64 n, u64 by) noexcept nogil:
    return (n + by - 1) / by


cdef u32 pieces_for(u64 total, u64 blocks, u32 rails) noexcept nogil:
    cdef u64 used = max(min(<u64>rails, over(total, GRAIN_BYTES)), <u64>1)
    cdef u64 count = max(used * over(total, used * PIECE_BYTES), over(blocks, PIECE_BLOCKS))
    return <u32>min(min(count, total), <u64>PIECES_MAX)


cdef u32 cut(const Block *blocks, u64 n, u64 total, u32 most, Piece *pieces) noexcept nogil:
    cdef u64 nbytes = total / most, rest = total % most
    cdef u64 i = 0, before = 0  # the block that is looked at, and the bytes of those before it
    cdef u64 first = 0, offset = 0, begun = 0  # where the next piece begins
    cdef u64 mark, inside
    cdef u32 k, count = 0
    for k in range(1, most + 1):
        mark = k * nbytes + min(<u64>k, rest)
        while i < n and before + blocks[i].nbytes <= mark:
            before += blocks[i].nbytes
            i += 1
        inside = mark - min(mark, before)
        if inside and blocks[i].nbytes < nbytes / 4:
            if 2 * inside >= blocks[i].nbytes:
                before += blocks[i].nbytes
                i += 1
            inside = 0
        inside -= inside % CUT_ALIGN
        if before + inside == begun:
            continue
        pieces[count].first, pieces[count].offset = first, offset
        pieces[count].nbytes = before + inside - begun
        pieces[count].blocks = <u32>(i - first + (inside != 0))
        count += 1
        first, offset, begun = i, inside, before + inside
    return count
