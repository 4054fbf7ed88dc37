# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from te.core.callers cimport AWAITED_BYTES, INLINE_BYTES, call_off, one_frame_bytes
from te.core.connections cimport connections_free
from te.core.frames cimport LOST, MOVED, WAITING, leave_to_worker, queue_frame
from te.core.heap cimport need
from te.core.link cimport *
from te.core.kinds cimport TOUCHED_BY_KERNEL
from te.core.maps cimport map_get
from te.core.payload cimport Payload, payload_begin, payload_load, payload_of, payload_send
from te.core.plane cimport plane_quiesce, plane_stages
from te.core.staged cimport *
from te.core.staging cimport Slot
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.tags cimport Opening, Range, opening_new, ranges_normalise
from te.core.transfer cimport *
from te.core.wire cimport *

cdef enum:
    READS_AT_ONCE = 4  # frames that ask for a read, which the calling thread sends


# -- its life

cdef Opening *opening_for(Transfer *t) noexcept nogil:
    """What the replies to a read may be written under: its destinations, and nothing else."""
    cdef Range *ranges = <Range *>need((t.n + 1) * sizeof(Range))
    cdef u64 i
    for i in range(t.n):
        ranges[i].start = t.blocks[i].dst
        ranges[i].end = t.blocks[i].dst + t.blocks[i].nbytes
    return opening_new(0, ranges, ranges_normalise(ranges, t.n))


cdef bint must_stage(Transfer *t) noexcept nogil:
    """Whether the memory that it reads is none that the kernel can read: then only its bytes can be
    sent, and only by workers."""
    cdef u32 i
    for i in range(t.held_n if plane_stages(t.link.plane) else 0):
        if not t.held[i].kind.touched_by & TOUCHED_BY_KERNEL:
            return True
    return False


cdef void sending_prepare(Transfer *t, uint8_t frame, u32 ahead) noexcept nogil:
    cdef Sending *s = <Sending *>t.own
    if t.is_read:
        s.frame = READ
        t.opening = opening_for(t)
        t.may_land = True
        t.sends_at_once = READS_AT_ONCE
    elif must_stage(t):
        s.frame = SEGMENT
        s.is_staged = True
    else:
        s.frame = frame
        s.ahead = ahead
        t.sends_at_once = t.total <= (AWAITED_BYTES if t.is_awaited else INLINE_BYTES)


cdef void settled(Transfer *t) noexcept nogil:
    cdef u32 outstanding = <u32>(<Sending *>t.own).outstanding
    if outstanding:
        (<Streams *>t.link.own).reads_asked -= outstanding


cdef void say_given_up(Connection *c, Transfer *t) noexcept nogil:
    """Issues no more of a transfer that has begun: the destination is told how much it got. A read
    has nothing to tell: its opening is closed, so replies under way are refused here."""
    cdef Header h
    if not t.is_read:
        h = header_of(ABANDON, t.id, t.tag, (<Sending *>t.own).issued)
        h.flags = FLAG_REPLY if t.is_reply else 0
        queue_frame(c, &h, NULL, 0)
    advance(t, SENDS_ABANDON)
    if t.is_read:
        advance(t, ABANDONS)


cdef void end_if_idle(Connection *c, Transfer *t) noexcept nogil:
    """After the last frame of it was sent, or the decision that there is none."""
    if t.in_flight == 0:
        if t.stage == STOPPING or t.stage == REFUSED_EARLY:
            say_given_up(c, t)
        conclude(t)


cdef void stop(Transfer *t) noexcept nogil:
    """Ends a listed transfer that was cancelled: at once if nothing of it was issued."""
    if end_queued(t):
        return
    if t.is_read and t.stage != MOVING:
        advance(t, ABANDONS)
        conclude(t)
    else:
        link_kick(t.link)


cdef void cancel(Transfer *t) noexcept nogil:
    t.may_land = False  # `cancel_read` has seen to it.
    stop(t)


cdef bint cancel_read(Transfer *t, u64 until_ns) noexcept nogil:
    store32(&t.opening.is_open, 0)
    if not plane_quiesce(t.link.plane, NULL, t.opening, 0, 0, until_ns):
        return False
    call_off(t)
    return True


cdef void prepare(Transfer *t, bint is_shared) noexcept nogil:
    sending_prepare(t, SEGMENT, 0)


cdef void release(Link *link) noexcept nogil:
    connections_free(link)
    free(link.own)


cdef Ops sending_ops() noexcept:
    cdef Ops ops = plain_ops()
    ops.transfer_bytes = sizeof(Sending)
    ops.prepare = prepare
    ops.cancel = cancel
    ops.cancel_read = cancel_read
    ops.settled = settled
    ops.release = release
    return ops


# -- frames

cdef void fill(Connection *c, Transfer *t, Sending *s) noexcept nogil:
    """Makes the next frame of the transfer: header and descriptors, and for a SEGMENT the memory
    they describe. Blocks are taken from a cursor, so that a transfer of any size needs no table of
    segments."""
    cdef Payload *p = payload_of(c)
    cdef Header *h = &p.frame.head
    cdef Landing *landings = <Landing *>p.frame.items
    cdef u64 left = s.segment_bytes, part
    cdef u32 k = 0, most = t.link.plane.segment_blocks
    cdef Block b
    cdef bint is_segment = s.frame == SEGMENT
    while s.index < t.n and k < most and left:
        b = t.blocks[s.index]
        part = min(b.nbytes - s.offset, left)
        b.src += s.offset
        b.dst += s.offset
        if is_segment:
            p.out[2 + k].iov_base = <void *>b.src
            p.out[2 + k].iov_len = part
            landings[k].dst = b.dst
            landings[k].nbytes = part
        else:
            p.frame.items[k].src = b.src
            p.frame.items[k].dst = b.dst
            p.frame.items[k].nbytes = part
        k += 1
        left -= part
        s.offset += part
        if s.offset == t.blocks[s.index].nbytes:
            s.index += 1
            s.offset = 0
    h[0] = header_of(s.frame if t.n else <uint8_t>END, t.id, t.tag, t.total)
    h.flags = FLAG_REPLY if t.is_reply else 0
    h.count = k
    h.nbytes = s.segment_bytes - left if t.n else 0
    s.issued += h.nbytes


cdef Transfer *next_transfer(Connection *c) noexcept nogil:
    """The first that has something to send; NULL if there is none. Those given up are ended."""
    cdef Transfer *t = next_to_issue(c.link)
    while t != NULL and is_given_up(t):
        c.link.issue = t.after
        advance(t, GIVEN_UP)
        end_if_idle(c, t)
        t = next_to_issue(c.link)
    return t


cdef bint may_send(Link *link, Transfer *t, Sending *s) noexcept nogil:
    """Whether its next frame may go now."""
    if s.ahead and s.issued >= s.confirmed + s.ahead * rails_of(link) * s.segment_bytes:
        return t.stage == QUEUED
    return not t.is_read or (<Streams *>link.own).reads_asked < READS_ASKED_MAX


cdef Transfer *ready_transfer(Connection *c) noexcept nogil:
    """That has a frame which may go now; NULL if there is none."""
    cdef Transfer *t = next_transfer(c)
    return t if t != NULL and may_send(c.link, t, <Sending *>t.own) else NULL


cdef void make_frame(Connection *c, Transfer *t, u64 most) noexcept nogil:
    """Its next one, of `most` bytes at most."""
    cdef Link *link = c.link
    cdef Sending *s = <Sending *>t.own
    if t.stage == QUEUED:
        advance(t, BEGINS)
        # Small transfers of several segments are spread too, but not below 256 KiB a segment, or what a
        # calling thread lands.
        s.segment_bytes = min(
            max(t.total / (4 * rails_of(link)), one_frame_bytes(c, t.is_awaited)),
            min(link.plane.segment_bytes, most))
    if t.is_read:
        (<Streams *>link.own).reads_asked += 1
        s.outstanding += 1
    fill(c, t, s)
    if s.index == t.n:
        advance(t, ALL_SENT)
        link.issue = t.after
        if t.is_reply:  # A peer that takes all and confirms nothing is not to keep more than it must.
            transfer_made(t)
    t.in_flight += 1
    # Several frames may be taken in any order. And a peer need not send a reply by the connection that it was asked
    # by: then whoever lands it wakes the caller.
    if payload_of(c).frame.head.nbytes == t.total and (
        not t.is_read or t.total <= c.protocol.reply_most
    ):
        store_pointer(&t.answered_by, c)


cdef inline u64 items_nbytes(Header *h) noexcept nogil:
    return h.count * (sizeof(Landing) if h.kind == SEGMENT else sizeof(Block))


cdef bint stages(Transfer *t) noexcept nogil:
    return (<Sending *>t.own).is_staged and t.n != 0


cdef bint prepare_frame(Connection *c) noexcept nogil:
    """Has the next frame copied for sending, if it is of a staged transfer; False if there is none, or
    no room. Frames that are behind those that are prepared wait for them: what begins at the
    destination begins in order."""
    cdef Link *link = c.link
    cdef Payload *p = payload_of(c)
    cdef Transfer *t
    cdef Slot *slot = NULL
    pthread_mutex_lock(&link.lock)
    t = ready_transfer(c)
    if t != NULL and stages(t):
        slot = staged_take(c)
    if slot != NULL:
        make_frame(c, t, staged_slot_bytes(c))
    pthread_mutex_unlock(&link.lock)
    # The copy is handed over without the link's lock: it may take a while, and the transfer stays,
    # as something of it is under way.
    if slot != NULL:
        staged_put(
            c, slot, t, &p.frame, sizeof(Header) + items_nbytes(&p.frame.head), p.out + 2,
            p.frame.head.nbytes)
    return slot != NULL


cdef void load_staged(Connection *c) noexcept nogil:
    """The next frame that is prepared, if it is copied."""
    cdef Payload *p = payload_of(c)
    cdef Slot *slot
    cdef Prepared *one = staged_load(c, &slot)
    if one == NULL:
        return
    memcpy(&p.frame, one.frame, one.frame_nbytes)
    if slot.fault:  # Nobody is to get what was there before.
        memset(slot.base, 0, p.frame.head.nbytes)
    p.out[2].iov_base = slot.base
    p.out[2].iov_len = p.frame.head.nbytes
    payload_load(c, one.transfer, one.frame_nbytes - sizeof(Header), 1, p.frame.head.nbytes)
    transfer_drop(one.transfer)  # The connection has a reference now.
    if slot.fault:
        pthread_mutex_lock(&c.link.lock)
        one.transfer.fault = slot.fault
        pthread_mutex_unlock(&c.link.lock)
        p.trailer = slot.fault


cdef void load(Connection *c) noexcept nogil:
    """Prepares the frame that is sent next, if there is one."""
    cdef Payload *p = payload_of(c)
    cdef Header *h = &p.frame.head
    cdef Transfer *t
    if plane_stages(c.link.plane):
        # Copies of the memory's kind are begun, and looked at, by the worker's own thread.
        while not c.polled.worker.is_lent and prepare_frame(c):
            pass
        if p.staged.n:
            if not c.polled.worker.is_lent:
                load_staged(c)
            return
    if not link_lock(c.link, c.polled.worker):
        leave_to_worker(c)
        return
    t = ready_transfer(c)
    if t != NULL and not stages(t):
        make_frame(c, t, c.link.plane.segment_bytes)
        payload_load(c, t, items_nbytes(h), h.count if h.kind == SEGMENT else 0, h.nbytes)
    pthread_mutex_unlock(&c.link.lock)


cdef void frame_over(Connection *c, Transfer *t) noexcept nogil:
    """A frame of it has been sent, or never will be. With the link's lock, which it gives up; drops a
    reference."""
    t.in_flight -= 1
    if t.is_listed:
        end_if_idle(c, t)
    pthread_mutex_unlock(&c.link.lock)
    transfer_drop(t)


cdef bint sent(Connection *c) noexcept nogil:
    """All that was loaded, if anything was. False if it has to be said again, without the link's lock."""
    cdef Payload *p = payload_of(c)
    cdef Transfer *t = p.out_transfer
    if t == NULL:
        return True
    if not link_lock(c.link, c.polled.worker):
        return False
    p.out_transfer = NULL
    if (<Sending *>t.own).frame == PULL:
        count(&c.flow.sent_nbytes, p.frame.head.nbytes)
    frame_over(c, t)
    staged_sent(c)
    return True


cdef Moved sending_send(Connection *c, int turns) noexcept nogil:
    cdef Moved state
    while True:
        if c.out_left == 0:
            if not sent(c):
                return leave_to_worker(c)
            if turns == 0:
                return MOVED
            load(c)
            if not payload_begin(c):
                return WAITING
        state = payload_send(c)
        if state != MOVED:
            return state
        turns -= 1


cdef bint sending_leave(Connection *c) noexcept nogil:
    cdef Payload *p = payload_of(c)
    cdef Transfer *t
    if not staged_is_quiet(c):
        return False
    t = staged_forget(c)
    while t != NULL:
        pthread_mutex_lock(&c.link.lock)
        frame_over(c, t)
        t = staged_forget(c)
    if p.out_transfer != NULL:
        pthread_mutex_lock(&c.link.lock)
        frame_over(c, p.out_transfer)
        p.out_transfer = NULL
    return True


# -- what comes back

cdef bint progressed(Transfer *t, u64 nbytes, u64 now) noexcept nogil:
    """So much more of it was copied; False if that cannot be."""
    cdef Sending *s
    if t == NULL:  # One that is late, of a transfer that has ended, says nothing.
        return True
    s = <Sending *>t.own
    if s.frame != PULL or not 0 < nbytes <= s.issued - s.confirmed:
        return False
    s.confirmed += nbytes
    store64(&t.progress_ns, now)
    return True


cdef Moved acknowledged(Connection *c, Moved state) noexcept nogil:
    cdef Link *link = c.link
    cdef Header *h = &c.head
    cdef u64 now = now_ns()
    cdef bint known
    cdef Transfer *t
    if not check_reason(c):
        return LOST
    if not link_lock(link, c.polled.worker):
        c.has_head = True  # The frame is whole, and is taken by the next call.
        return leave_to_worker(c)
    t = <Transfer *>map_get(&link.by_id, h.transfer)
    store64(&link.progress_ns, now)
    c.is_bulk = h.status == PROGRESS
    if h.status == PROGRESS:
        known = progressed(t, h.nbytes, now)
    elif t == NULL or (t.is_read and h.status != REFUSED):
        known = h.status == REFUSED
    else:
        known = answer(t, h.status, c.body, h.count)
        if known:
            conclude(t)
    if known and link.issue != NULL:
        store32(&c.polled.kicked, 1)  # There may be room for one more that has to begin.
    pthread_mutex_unlock(&link.lock)
    if not known:
        say_unexpected(c)
    return state if known else LOST


cdef void fail_read(Link *link, u64 number, const char *reason) noexcept nogil:
    cdef Transfer *t = <Transfer *>map_get(&link.by_id, number)
    if t == NULL or not t.is_read:
        return
    if not load32(&t.cancel):
        refuse_read(t, reason)
    elif t.stage == SENT:
        advance(t, ABANDONS)
    conclude(t)


cdef void read_returned(Connection *c, u64 number, u64 nbytes, bint is_good) noexcept nogil:
    cdef Link *link = c.link
    cdef Transfer *t = <Transfer *>map_get(&link.by_id, number)
    cdef Sending *s
    if t == NULL or not t.is_read:
        return
    if not is_good:
        fail_read(link, number, b"the source: its memory cannot be read")
        return
    s = <Sending *>t.own
    if s.outstanding:
        s.outstanding -= 1
        (<Streams *>link.own).reads_asked -= 1
    s.returned += nbytes
    if s.returned == t.total and s.issued == t.total:
        advance(t, LANDS)
    conclude(t)
    if link.issue != NULL:
        store32(&c.polled.kicked, 1)


cdef bint check_reason(Connection *c) noexcept nogil:
    cdef u32 i
    for i in range(c.head.count):
        if not 32 <= c.body[i] < 127:
            violate(c.link, b"the reason of an acknowledgement is not printable ASCII")
            return False
    return True


cdef void say_unexpected(Connection *c) noexcept nogil:
    cdef char text[TEXT_MAX]
    snprintf(text, TEXT_MAX, b"transfer %llu, acknowledged as %s, is not waiting for it",
             <unsigned long long>c.head.transfer, ack_name(&c.head))
    violate(c.link, text)
