# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.frames cimport MOVED, WAITING, leave_to_worker, on_sending_failed, take_queued
from te.core.link cimport link_lock
from te.core.posix cimport EFAULT
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.vectors cimport advance
from te.core.wire cimport TRAILER_BYTES

cdef enum:
    # A frame of SEGMENT_BYTES_MAX in such pieces, its header and trailer are far less than IOV_MAX.
    SCRATCH_BYTES = 256 << 10

# What is sent in place of memory that is not there.
cdef uint8_t ZEROS[SCRATCH_BYTES]


cdef void payload_load(
    Connection *c, Transfer *t, u64 items_nbytes, u32 payload_n, u64 payload_nbytes
) noexcept nogil:
    cdef Payload *p = payload_of(c)
    p.out[1].iov_base = &p.frame
    p.out[1].iov_len = sizeof(Header) + items_nbytes
    p.out_n = 2
    p.out_payload = p.out_tail = 0
    if payload_n:
        p.trailer = 0
        p.out[2 + payload_n].iov_base = &p.trailer
        p.out[2 + payload_n].iov_len = TRAILER_BYTES
        p.out_n = 3 + payload_n
        p.out_payload = payload_nbytes
        p.out_tail = payload_nbytes + TRAILER_BYTES
    c.out_left = p.out[1].iov_len + p.out_tail
    p.out_transfer = t
    add32(&t.refs, 1)


cdef bint payload_begin(Connection *c) noexcept nogil:
    cdef Payload *p = payload_of(c)
    if p.out_transfer == NULL:
        p.out_n = 1
        p.out_tail = p.out_payload = 0
    p.out_at = 1
    p.out[0].iov_len = take_queued(c)
    if p.out[0].iov_len:
        p.out[0].iov_base = c.sending
        p.out_at = 0
        c.out_left += p.out[0].iov_len
    if c.out_left:
        c.progress_ns = now_ns()
    return c.out_left != 0


cdef inline u64 payload_sent(Payload *p, u64 left) noexcept nogil:
    """Bytes of payload that are sent when `left` bytes of the load are not."""
    return 0 if left >= p.out_tail else min(p.out_tail - left, p.out_payload)


cdef bint pad(Connection *c, int fault) noexcept nogil:
    """Source memory vanished in the middle of a frame: sends something else in its place, so that
    the connection stays in step, and says so in the trailer. False if it needs the link's lock, and the turn is
    lent."""
    cdef Payload *p = payload_of(c)
    cdef u64 left = min(c.out_left - TRAILER_BYTES, p.out_payload), n
    cdef u32 k = 2  # Where the payload began: behind it there may be too little room.
    if not link_lock(c.link, c.polled.worker):
        return False
    p.out_transfer.fault = fault
    pthread_mutex_unlock(&c.link.lock)
    p.trailer = <u64>fault
    p.out_at = min(p.out_at, k)  # What is in front of the payload may not have been sent yet.
    p.out_payload = 0
    while left:
        n = min(left, <u64>SCRATCH_BYTES)
        p.out[k].iov_base = ZEROS
        p.out[k].iov_len = n
        left -= n
        k += 1
    p.out[k].iov_base = &p.trailer
    p.out[k].iov_len = TRAILER_BYTES
    p.out_n = k + 1
    return True


cdef Moved payload_send(Connection *c) noexcept nogil:
    cdef Payload *p = payload_of(c)
    cdef ssize_t moved
    cdef u64 before
    cdef Moved state = MOVED
    while True:
        moved = c.channel.ops.send(
            c.channel, p.out + p.out_at, p.out_n - p.out_at, p.out_tail == 0)
        if moved >= 0:
            break
        if moved == -EFAULT and p.out_payload:
            if not pad(c, EFAULT):
                return leave_to_worker(c)
            continue
        state = on_sending_failed(c, -moved)
        if state != MOVED:
            return state
    c.progress_ns = now_ns()
    store64(&c.link.progress_ns, c.progress_ns)
    if p.out_transfer != NULL:
        store64(&p.out_transfer.progress_ns, c.progress_ns)
    before = payload_sent(p, c.out_left)
    c.out_left -= moved
    count(&c.flow.sent_nbytes, payload_sent(p, c.out_left) - before)
    if c.out_left == 0:
        return MOVED
    p.out_at = advance(p.out, p.out_at, moved)
    return WAITING
