# SPDX-License-Identifier: Apache-2.0
# The source's side of a transfer over connections that carry its bytes, or say where they lie: it is
# cut into frames, of which each connection takes the next one when it is free.

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection, Moved
from te.core.link cimport Link, Ops, Transfer
from te.core.sync cimport u32, u64

cdef enum:
    READS_ASKED_MAX = 32

# What such a link has of its own: `Link.own` begins with it.
cdef struct Streams:
    u32 reads_asked  # frames without a reply, under the link's lock

# What its transfers have: `Transfer.own`. Under the link's lock.
cdef struct Sending:
    uint8_t frame  # SEGMENT, PULL or READ
    bint is_staged  # its memory is none that the kernel can read
    u32 ahead  # frames that a connection may be ahead of what is confirmed; 0: any number
    u64 index, offset  # of the block that is next, and in it
    u64 issued, confirmed, segment_bytes
    u64 returned, outstanding  # of a read: bytes that have landed, frames without a reply

# Of a transport whose links have `Streams`, of malloc, and whose writes are SEGMENTs. One that does more
# has functions of its own in their place, which call these.
cdef Ops sending_ops() noexcept
# A write's frames are to be `frame`, unless its memory has to be staged.
cdef void sending_prepare(Transfer *t, uint8_t frame, u32 ahead) noexcept nogil

# `Protocol.send` and `.leave`.
cdef Moved sending_send(Connection *c, int turns) noexcept nogil
cdef bint sending_leave(Connection *c) noexcept nogil

# An acknowledgement has come, with `state`: that; or LOST after a violation. LEFT_TO_WORKER if the turn is lent, and
# another worker has the link's lock: the connection's next step takes it again.
cdef Moved acknowledged(Connection *c, Moved state) noexcept nogil
# This side does not let a reply land: the read of that number ends. Under the link's lock.
cdef void fail_read(Link *link, u64 number, const char *reason) noexcept nogil
# The reply to a frame of the read has come, `nbytes` of it. Under the link's lock.
cdef void read_returned(Connection *c, u64 number, u64 nbytes, bint is_good) noexcept nogil
# Why an acknowledgement that nobody waits for is a violation.
cdef void say_unexpected(Connection *c) noexcept nogil
# Whether its reason is one; else the link dies.
cdef bint check_reason(Connection *c) noexcept nogil
