# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport int64_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy, memmove, strlen
from te.core.channels cimport channel_receive
from te.core.heap cimport need_more
from te.core.link cimport *
from te.core.posix cimport *
from te.core.sections cimport enter, leave
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.vectors cimport advance
from te.core.wire cimport *

cdef enum:
    # A frame of SEGMENT_BYTES_MAX in such pieces, its header and trailer are far less than IOV_MAX.
    SCRATCH_BYTES = 256 << 10

# What is sent, or received, in place of memory that is not there.
cdef uint8_t ZEROS[SCRATCH_BYTES]


# -- small frames

cdef void queue_bytes(Connection *c, const void *data, u64 n) noexcept nogil:
    if c.queued_n + n > c.queued_room:
        c.queued_room = 2 * (c.queued_n + n) + 4096
        c.queued = <uint8_t *>need_more(c.queued, c.queued_room)
    memcpy(c.queued + c.queued_n, data, n)
    c.queued_n += n


cdef void queue_frame(Connection *c, Header *h, const void *items, u64 nbytes) noexcept nogil:
    queue_bytes(c, h, sizeof(Header))
    if nbytes:
        queue_bytes(c, items, nbytes)


cdef void queue_answer(Connection *c, u64 number, uint8_t status, const char *reason) noexcept nogil:
    cdef Header h = header_of(ACK, number, 0, 0)
    h.status = status
    h.count = <u32>strlen(reason)
    queue_frame(c, &h, reason, h.count)


# -- sending

cdef void frame_load(
    Connection *c, Transfer *t, u64 items_nbytes, u32 payload_n, u64 payload_nbytes
) noexcept nogil:
    c.out[1].iov_base = c.frame
    c.out[1].iov_len = sizeof(Header) + items_nbytes
    c.out_n = 2
    c.out_payload = c.out_tail = 0
    if payload_n:
        c.trailer = 0
        c.out[2 + payload_n].iov_base = &c.trailer
        c.out[2 + payload_n].iov_len = TRAILER_BYTES
        c.out_n = 3 + payload_n
        c.out_payload = payload_nbytes
        c.out_tail = payload_nbytes + TRAILER_BYTES
    c.out_left = c.out[1].iov_len + c.out_tail
    c.out_transfer = t
    if t != NULL:
        add32(&t.refs, 1)


cdef bint load_next(Connection *c) noexcept nogil:
    """Prepares what is sent next; False when there is nothing."""
    cdef uint8_t *sending
    cdef u64 room
    if not c.protocol.load(c):
        c.out_n = 1
        c.out_left = c.out_tail = c.out_payload = 0
    c.out_at = 1
    if c.queued_n:
        sending, room = c.sending, c.sending_room
        c.sending, c.sending_room = c.queued, c.queued_room
        c.out[0].iov_base = c.sending
        c.out[0].iov_len = c.queued_n
        c.out_at = 0
        c.out_left += c.queued_n
        c.queued, c.queued_room, c.queued_n = sending, room, 0
    if c.out_left:
        c.progress_ns = now_ns()
    return c.out_left != 0


cdef inline u64 payload_of(Connection *c, u64 left) noexcept nogil:
    """Bytes of payload that are sent when `left` bytes of the load are not."""
    if left >= c.out_tail:
        return 0
    return min(c.out_tail - left, c.out_payload)


cdef void pad(Connection *c, int fault) noexcept nogil:
    """Source memory vanished in the middle of a frame: sends something else in its place, so that
    the connection stays in step, and says so in the trailer."""
    cdef u64 left = min(c.out_left - TRAILER_BYTES, c.out_payload), n
    cdef u32 k = 2  # Where the payload began: behind it there may be too little room.
    pthread_mutex_lock(&c.link.lock)
    c.out_transfer.fault = fault
    pthread_mutex_unlock(&c.link.lock)
    c.trailer = <u64>fault
    c.out_at = min(c.out_at, k)  # What is in front of the payload may not have been sent yet.
    c.out_payload = 0
    while left:
        n = min(left, <u64>SCRATCH_BYTES)
        c.out[k].iov_base = ZEROS
        c.out[k].iov_len = n
        left -= n
        k += 1
    c.out[k].iov_base = &c.trailer
    c.out[k].iov_len = TRAILER_BYTES
    c.out_n = k + 1


cdef void frame_sent(Connection *c, bint is_whole) noexcept nogil:
    cdef Transfer *t = c.out_transfer
    if t != NULL:
        c.protocol.sent(c, is_whole)
        c.out_transfer = NULL


cdef Moved connection_send(Connection *c, int turns) noexcept nogil:
    cdef ssize_t moved
    cdef u64 before
    while turns:
        if c.out_left == 0 and not load_next(c):
            return WAITING
        moved = c.channel.ops.send(
            c.channel, c.out + c.out_at, c.out_n - c.out_at, c.out_tail == 0)
        if moved < 0:
            if moved == -EAGAIN:
                return WAITING
            if moved == -EFAULT and c.out_payload:
                pad(c, EFAULT)
                continue
            if moved == -EINTR:
                continue
            channel_broke(c, -moved)
            return LOST
        turns -= 1
        c.progress_ns = now_ns()
        if not c.protocol.is_words:
            store64(&c.link.progress_ns, c.progress_ns)
        if c.out_transfer != NULL:
            store64(&c.out_transfer.progress_ns, c.progress_ns)
        before = payload_of(c, c.out_left)
        c.out_left -= moved
        count(&c.flow.sent_nbytes, payload_of(c, c.out_left) - before)
        if c.out_left == 0:
            frame_sent(c, True)
            continue
        c.out_at = advance(c.out, c.out_at, moved)
        return WAITING
    return MOVED


# -- receiving

cdef void channel_broke(Connection *c, int errnum) noexcept nogil:
    if c.channel.ops.violation != NULL and (errnum == EBADMSG or errnum == EMSGSIZE):
        violate(c.link, c.channel.ops.violation)
    else:
        link_die(c.link, BROKE, errnum, NULL)


cdef Moved on_received(Connection *c, ssize_t n, size_t wanted) noexcept nogil:
    """What follows from what a channel returned."""
    if n > 0:
        if not c.protocol.is_words:
            store64(&c.link.progress_ns, now_ns())
        # Less than asked for: the kernel has no more just now, which saves a call that says so.
        return MOVED if <size_t>n == wanted else WAITING
    if n == 0:
        pthread_mutex_lock(&c.link.lock)
        link_die_locked(
            c.link, ENDED, 0, b"" if c.lead_have == 0 and c.link.arriving.count == 0
            else b" in the middle of a transfer")
        pthread_mutex_unlock(&c.link.lock)
        return LOST
    if n == -EAGAIN:
        return WAITING
    if n == -EINTR:
        return MOVED
    channel_broke(c, -n)
    return LOST


cdef void expect_payload(Connection *c, u32 n, u64 nbytes) noexcept nogil:
    c.local_at = 0
    c.local_n = n
    c.payload_left = nbytes
    c.place = AT_PAYLOAD


cdef void throw_away(Connection *c) noexcept nogil:
    c.discard_left = c.payload_left
    c.payload_left = 0
    c.tail_have = 0
    c.place = AT_DISCARD


cdef void expect_trailer(Connection *c) noexcept nogil:
    c.tail_have = 0
    c.drained = False
    c.place = AT_TRAILER


cdef void frame_landed(Connection *c, bint is_good) noexcept nogil:
    c.place = AT_HEAD
    c.protocol.landed(c, is_good)


cdef Moved land(Connection *c) noexcept nogil:
    """One call that writes registered memory, inside the worker's section, if that is still allowed.
    It also takes the trailer and the next header, which saves two calls a frame."""
    cdef char reason[TEXT_MAX]
    cdef ssize_t n = 0
    cdef u64 landed, wanted = c.payload_left + sizeof(c.tail)
    cdef Moved state
    cdef bint good
    c.local[c.local_n].iov_base = c.tail
    c.local[c.local_n].iov_len = sizeof(c.tail)
    enter(&c.polled.worker.section, c.link, c.protocol.right(c))
    good = c.protocol.may_land(c, reason)
    if good:
        n = c.channel.ops.receive(
            c.channel, c.local + c.local_at, c.local_n + 1 - c.local_at, False)
    leave(&c.polled.worker.section)
    if n == -EFAULT:
        good = False
        snprintf(reason, TEXT_MAX, b"registered memory cannot be written: Bad address")
    if not good:
        c.protocol.refuse(c, reason)
        throw_away(c)
        return MOVED
    if n <= 0:
        return on_received(c, n, wanted)
    landed = min(<u64>n, c.payload_left)
    count(&c.flow.received_nbytes, landed)
    c.payload_left -= landed
    state = on_received(c, n, wanted)
    c.protocol.moved(c, landed)
    if c.payload_left:
        c.local_at = advance(c.local, c.local_at, landed)
        return state
    c.place = AT_TRAILER
    c.tail_have = <u32>(n - landed)
    c.drained = state == WAITING
    return MOVED


cdef Moved read_trailer(Connection *c) noexcept nogil:
    """Takes the trailer of a frame, and the next header if that has come with it."""
    cdef ssize_t n
    cdef Moved state = WAITING if c.drained else MOVED
    cdef u64 fault
    if c.tail_have < TRAILER_BYTES:
        n = channel_receive(c.channel, c.tail + c.tail_have, sizeof(c.tail) - c.tail_have)
        state = on_received(c, n, sizeof(c.tail) - c.tail_have)
        if n <= 0:
            return state
        c.tail_have += <u32>n
        if c.tail_have < TRAILER_BYTES:
            return state
    memcpy(&fault, c.tail, TRAILER_BYTES)
    frame_landed(c, fault == 0)
    c.lead_have = c.tail_have - TRAILER_BYTES
    memcpy(c.lead, c.tail + TRAILER_BYTES, c.lead_have)
    return MOVED if c.lead_have >= sizeof(Header) else state


cdef Moved discard(Connection *c) noexcept nogil:
    cdef uint8_t scratch[16384]
    cdef u64 wanted = min(c.discard_left, sizeof(scratch))
    cdef ssize_t n = channel_receive(c.channel, scratch, wanted)
    if n > 0:
        c.discard_left -= n
        if c.discard_left == 0:
            c.place = AT_TRAILER
            c.drained = False
    return on_received(c, n, wanted)


cdef bint check_head(Connection *c) noexcept nogil:
    """The body that a header announces; False after a violation. All that can be said of a header
    alone is checked here, by the table of te/core/wire.h. What follows rests on that."""
    cdef char text[TEXT_MAX]
    cdef int64_t nbytes = check_header(
        &c.head, c.protocol.over, c.link.is_incoming, text, TEXT_MAX)
    c.body_have = 0
    if nbytes < 0:
        violate(c.link, text)
        return False
    c.body_want = <u32>nbytes
    return True


cdef void take_lead(Connection *c) noexcept nogil:
    """Gives what came behind the header to the body, and the rest to the next header."""
    cdef u32 extra = c.lead_have - <u32>sizeof(Header)
    cdef u32 used = min(extra, c.body_want)
    memcpy(c.body, c.lead + sizeof(Header), used)
    c.body_have = used
    c.lead_have = extra - used
    memmove(c.lead, c.lead + sizeof(Header) + used, c.lead_have)


cdef inline bint take_up(Connection *c, bint is_idle) noexcept nogil:
    return c.protocol.take_up != NULL and c.protocol.take_up(c, is_idle)


cdef Moved connection_receive(Connection *c, bint answers_only) noexcept nogil:
    cdef ssize_t n
    cdef size_t wanted
    cdef Moved state = MOVED
    if answers_only and c.place != AT_HEAD and (c.place != AT_BODY or c.head.kind != ACK):
        return NOT_MINE
    if c.place == AT_PAYLOAD:
        return land(c)
    if c.place == AT_COPY:
        return c.protocol.copy(c)
    if c.place == AT_TRAILER:
        return read_trailer(c)
    if c.place == AT_DISCARD:
        return discard(c)
    if c.place == AT_HEAD:
        if not answers_only and take_up(c, False):
            return MOVED
        if c.lead_have < sizeof(Header):
            wanted = sizeof(c.lead) - c.lead_have
            n = channel_receive(c.channel, c.lead + c.lead_have, wanted)
            state = on_received(c, n, wanted)
            if n > 0:
                c.lead_have += <u32>n
        if c.lead_have < sizeof(Header):
            if state == WAITING and not answers_only and take_up(c, True):
                return MOVED
            return state
        memcpy(&c.head, c.lead, sizeof(Header))
        if answers_only and c.head.kind != ACK:
            return NOT_MINE
        if not check_head(c):
            return LOST
        take_lead(c)
        c.place = AT_BODY
    if c.body_have < c.body_want:
        wanted = c.body_want - c.body_have
        n = channel_receive(c.channel, c.body + c.body_have, wanted)
        state = on_received(c, n, wanted)
        if n > 0:
            c.body_have += <u32>n
    if c.body_have < c.body_want:
        return state
    c.place = AT_HEAD
    if not c.protocol.received(c):
        return LOST
    # With a payload to come it is worth looking; behind the last frame it is not.
    return MOVED if c.place != AT_HEAD else state
