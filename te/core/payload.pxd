# SPDX-License-Identifier: Apache-2.0
# What a connection has whose frames carry payload, or say where it lies; and the frame that it sends.

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection, Moved
from te.core.inbound cimport Arriving, Place
from te.core.link cimport Transfer
from te.core.posix cimport iovec
from te.core.staged cimport Staged
from te.core.sync cimport u32, u64
from te.core.wire cimport Block, BLOCKS_MAX, Header

cdef enum:
    IOV_MAX = 1024

cdef enum Stand:  # what comes next
    AT_HEAD  # of the next frame, or its body
    AT_PLACE  # a payload, of which is not known yet whether it may land
    AT_PAYLOAD
    AT_TRAILER
    AT_DISCARD
    AT_COPY  # nothing: what the frame says is copied, or received into slots

cdef struct Frame:
    Header head
    Block items[BLOCKS_MAX]  # or less: Landing

# `Connection.own` begins with it.
cdef struct Payload:
    Staged staged  # first
    # Receiving.
    Stand stand
    Arriving *arriving  # whose payload is under way
    Place place
    u64 last_id
    u32 local_at, local_n
    u64 left, discard_left
    uint8_t tail[64]  # a trailer, a header and the first 16 bytes behind it, which are never payload
    u32 tail_have
    bint drained  # the kernel had no more behind the payload
    # Sending. `out`: what was queued, the frame, its payload, its trailer.
    u32 out_at, out_n
    u64 out_tail, out_payload, trailer
    Transfer *out_transfer  # a reference
    Frame frame
    iovec out[IOV_MAX]
    iovec local[IOV_MAX]  # where the payload goes, and one more

# The frame is in `frame`, with `nbytes` of descriptors; its payload, if any, in `out` from 2 on. NULL:
# there is none.
cdef void payload_load(
    Connection *c, Transfer *t, u64 items_nbytes, u32 payload_n, u64 payload_nbytes
) noexcept nogil
# What is queued goes before that; False if nothing is to be sent.
cdef bint payload_begin(Connection *c) noexcept nogil
# One call of it; WAITING if that did not send the rest.
cdef Moved payload_send(Connection *c) noexcept nogil


cdef inline Payload *payload_of(Connection *c) noexcept nogil:
    return <Payload *>c.own
