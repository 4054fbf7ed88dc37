# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport int64_t
from libc.string cimport memcpy, memmove, strlen
from te.core.channels cimport channel_receive
from te.core.heap cimport need_more
from te.core.link cimport *
from te.core.notes cimport lane_came, lane_take, lane_waits
from te.core.posix cimport EAGAIN, EBADMSG, EINTR, EMSGSIZE
from te.core.sync cimport *
from te.core.wire cimport *

cdef enum:
    NOTES_AT_ONCE_BYTES = 64 << 10  # of notes that go before other frames


# -- small frames to send

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


cdef void queue_notes(Connection *c) noexcept nogil:
    """They go over the link's first connection, so that they keep their order."""
    cdef Header h
    cdef uint8_t part[NOTE_PART_MAX]
    cdef bint is_lent = c.polled.worker.is_lent
    while c.queued_n < NOTES_AT_ONCE_BYTES and lane_take(c.link.notes, not is_lent, &h, part):
        queue_frame(c, &h, part, h.count)
    if is_lent and lane_waits(c.link.notes):
        leave_to_worker(c)


cdef u64 take_queued(Connection *c) noexcept nogil:
    cdef u64 nbytes
    if lane_waits(c.link.notes) and &c.polled == c.link.connections[0]:
        queue_notes(c)
    nbytes = c.queued_n
    c.sending, c.queued = c.queued, c.sending
    c.sending_room, c.queued_room = c.queued_room, c.sending_room
    c.queued_n = 0
    return nbytes


# -- reading

cdef void channel_broke(Connection *c, int errnum) noexcept nogil:
    if c.channel.ops.violation != NULL and (errnum == EBADMSG or errnum == EMSGSIZE):
        violate(c.link, c.channel.ops.violation)
    else:
        link_die(c.link, BROKE, errnum, NULL)


cdef Moved on_sending_failed(Connection *c, int errnum) noexcept nogil:
    if errnum == EAGAIN:
        return WAITING
    if errnum == EINTR:
        return MOVED
    channel_broke(c, errnum)
    return LOST


cdef Moved on_received(Connection *c, ssize_t n, size_t wanted) noexcept nogil:
    cdef bint is_between
    if n > 0:
        if c.protocol.moves_payload:
            store64(&c.link.progress_ns, now_ns())
        # Less than asked for: the kernel has no more just now, which saves a call that says so.
        return MOVED if <size_t>n == wanted else WAITING
    if n < 0:
        return on_sending_failed(c, -n)
    if c.polled.worker.is_lent:
        return leave_to_worker(c)  # It reads the end again.
    pthread_mutex_lock(&c.link.lock)
    is_between = c.lead_have == 0 and c.link.arriving.count == 0
    pthread_mutex_unlock(&c.link.lock)
    link_die(c.link, ENDED, 0, b"" if is_between else b" in the middle of a transfer")
    return LOST


cdef Moved read_some(Connection *c, uint8_t *into, u32 *have, u32 most) noexcept nogil:
    cdef size_t wanted = most - have[0]
    cdef ssize_t n = channel_receive(c.channel, into + have[0], wanted)
    cdef Moved state = on_received(c, n, wanted)
    if n > 0:
        have[0] += <u32>n
    return state


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


cdef void frame_begin(Connection *c, const uint8_t *lead, u32 nbytes) noexcept nogil:
    c.lead_have = nbytes
    memcpy(c.lead, lead, nbytes)


cdef bint take_note(Connection *c) noexcept nogil:
    """One has come, or a part of one; False after a violation."""
    cdef const char *problem = lane_came(
        c.link.notes, &c.link.plane.notes, &c.link.peer, &c.head, c.body)
    if problem != NULL:
        violate(c.link, problem)
    return problem == NULL


cdef Moved frame_read(Connection *c, bint answers_only, bint *is_whole) noexcept nogil:
    cdef Moved state = MOVED
    is_whole[0] = False
    if not c.has_head:
        if c.lead_have < sizeof(Header):
            state = read_some(c, c.lead, &c.lead_have, sizeof(c.lead))
        if c.lead_have < sizeof(Header):
            return state
        memcpy(&c.head, c.lead, sizeof(Header))
    if answers_only and not for_callers(c):
        return leave_to_worker(c)
    if not c.has_head:
        if not check_head(c):
            return LOST
        take_lead(c)
        c.has_head = True
    if c.body_have < c.body_want:
        state = read_some(c, c.body, &c.body_have, c.body_want)
    if c.body_have == c.body_want:
        c.has_head = False
        is_whole[0] = c.head.kind != NOTE
        if not is_whole[0] and not take_note(c):
            return LOST
    return state
