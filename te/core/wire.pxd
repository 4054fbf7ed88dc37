# SPDX-License-Identifier: Apache-2.0
# The frames of a link: wire.h for Cython, which says what each of these is.

from libc.stdint cimport int64_t, uint8_t, uint16_t
from te.core.sync cimport u32, u64

cdef extern from "core/wire.h" nogil:
    enum:
        RAILS_MAX, NICS_MAX, BLOCKS_MAX, SEGMENT_BYTES_MAX, TRAILER_BYTES, REASON_MAX, TEXT_MAX
        PIECES_MAX, POSTED_MAX, TABLE_MAX, TABLE_RANGES_MAX, ANY_RAIL, BEGUN_MAX, ARRIVING_MAX
        READS_SERVED_MAX, RECEIVES, NOTE_PART_MAX, NOTE_MAX
        SEGMENT, END, ABANDON, ACK, PULL, READ
        ASK, TABLE, RAIL_LOST, RAIL_CLOSED, RAIL_BROKEN, CREDIT, NOTE
        LANDED, REFUSED, ABANDONED, PROGRESS, GRANTED
        FLAG_REPLY, TABLE_FIRST
        RIGHT_READ, RIGHT_TAGGED, RIGHT_UNTAGGED, REMOTE_RIGHTS
        OVER_TCP, OVER_RINGS, OVER_RDMA
    ctypedef struct Header:
        uint8_t kind, status
        uint16_t flags
        u32 count
        u64 transfer, tag, nbytes, total
    ctypedef struct Block:
        u64 src, dst, nbytes
    ctypedef struct Landing:
        u64 dst, nbytes
    ctypedef struct PieceId:
        u64 transfer, piece
    ctypedef struct RemoteRange:
        u64 start, end, rights
        u32 keys[NICS_MAX]
    const char *ack_name(const Header *h)
    Header header_of(uint8_t kind, u64 transfer, u64 tag, u64 total)
    size_t body_bytes_max(int over, bint from_source)
    int64_t check_header(const Header *h, int over, bint from_source, char *text, size_t room)
