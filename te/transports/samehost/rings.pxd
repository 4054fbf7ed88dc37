# SPDX-License-Identifier: Apache-2.0
# The byte channel between two processes of one host: two rings in memory that both sides have mapped,
# one for each direction, and a unix socket that wakes up who sleeps and tells of the other side's end.
#
# A side keeps its own position to itself and shows it to the other; the other's is believed as far as
# it makes sense. What is read out of a ring is copied before it is looked at.

from te.core.channels cimport Channel
from te.core.sync cimport u32, u64

cdef enum:
    RING_BYTES = 128 << 10
    RINGS_HEAD_BYTES = 4096
    RINGS_BYTES = 4096 + 2 * (128 << 10)  # a file of it: the head, then the two rings

# One direction, in memory that both have mapped: each position by itself in a line of the cache. `head`
# is how many bytes were ever written, `tail` how many were read.
cdef struct Ring:
    u64 head
    u64 head_line[7]
    u64 tail
    u64 tail_line[7]
    u32 reader_asleep
    u32 reader_line[15]
    u32 writer_asleep
    u32 writer_line[15]

# Takes over the socket, and the file of the rings (RINGS_BYTES, sealed) once it `is_taken`: the side
# that dialled writes the first ring. NULL and an errno.
cdef Channel *rings_new(int fd, int rings_fd, bint dialled, int *errnum) noexcept nogil
