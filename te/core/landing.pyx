# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memcpy, memset, strerror
from te.core.frames cimport AT_COPY, expect_payload, queue_answer, throw_away
from te.core.heap cimport need
from te.core.inbound cimport *
from te.core.kinds cimport TOUCHED_BY_KERNEL
from te.core.link cimport *
from te.core.plane cimport plane_stages
from te.core.regions cimport *
from te.core.sections cimport enter, leave
from te.core.sending cimport *
from te.core.staged cimport (
    staged_end, staged_expect, staged_is_open, staged_receive, staged_settle, staged_turn,
)
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.transfer cimport (
    transfer_discard, transfer_drop, transfer_list, transfer_new, transfer_owe,
)
from te.core.wire cimport *

ctypedef unsigned long long ull


# -- saying no

cdef void refuse(Connection *c, Arriving *a, const char *reason) noexcept nogil:
    """Answers a transfer early; the rest of it is thrown away. Once per transfer. Under the link's
    lock. The reply to a read ends the read here, too."""
    if arriving_refuse(a):
        tell_refused(c, a, reason)


cdef void tell_refused(Connection *c, Arriving *a, const char *reason) noexcept nogil:
    queue_answer(c, a.id, REFUSED, reason)
    if a.is_reply:
        fail_read(c.link, a.tag, reason)


cdef void landing_refuse(Connection *c, const char *reason) noexcept nogil:
    pthread_mutex_lock(&c.link.lock)
    refuse(c, (<Landings *>c.own).arriving, reason)
    pthread_mutex_unlock(&c.link.lock)


# -- transfers under way

cdef Arriving *begin(Connection *c) noexcept nogil:
    """The transfer a frame belongs to, made by its first frame; NULL after a violation."""
    cdef Header *h = &c.head
    cdef char text[TEXT_MAX]
    cdef Arriving *known = arriving_of(c.link, h.transfer)
    cdef Arriving *a
    cdef u64 total = h.total, last_id = (<Landings *>c.own).last_id
    if known != NULL and h.kind == ABANDON:
        total = known.total  # What an ABANDON says is how much of it was sent.
    if known == NULL and h.kind != ABANDON and h.transfer <= last_id:
        snprintf(text, TEXT_MAX, b"transfer %llu comes after %llu", <ull>h.transfer, <ull>last_id)
        violate_locked(c.link, text)
        return NULL
    a = arriving_begin(c.link, h.transfer, h.tag, total, h.flags & FLAG_REPLY, text)
    if a == NULL:
        violate_locked(c.link, text)
    elif known == NULL and a.refused:
        tell_refused(c, a, text)
    return a


cdef void landing_finish(Connection *c, Arriving *a) noexcept nogil:
    cdef char reason[TEXT_MAX]
    cdef bint is_good = not a.spoiled and not a.abandoned
    if a.refused:
        pass
    elif not is_good:
        queue_answer(c, a.id, ABANDONED, b"")
    elif not arriving_count(c.link, &c.polled.worker.section, a, reason):
        refuse(c, a, reason)
    else:
        queue_answer(c, a.id, LANDED, b"")
    if a.is_reply and not a.refused:
        read_returned(c, a.tag, a.arrived, is_good)
    arriving_forget(c.link, a)


cdef bint landing_begin(Connection *c, Arriving *a) noexcept nogil:
    cdef Landings *l = <Landings *>c.own
    cdef char reason[TEXT_MAX]
    cdef bint good, is_staged = False
    l.arriving = a
    if load32(&a.refused):
        return False
    enter(&c.polled.worker.section, c.link, NULL)
    good = is_placed(c.link, a, &l.place, c.local, c.local_n, reason)
    if good and plane_stages(c.link.plane):
        is_staged = must_stage(c)
    leave(&c.polled.worker.section)
    if not good:
        landing_refuse(c, reason)
    elif is_staged:
        landing_stage(c, a)
        c.place = AT_COPY
    return good


cdef void landing_stage(Connection *c, Arriving *a) noexcept nogil:
    staged_expect(c, a)
    pthread_mutex_lock(&c.link.lock)
    a.unread += 1
    pthread_mutex_unlock(&c.link.lock)


cdef bint must_stage(Connection *c) noexcept nogil:
    """Whether some of the ranges, all registered, are none that the kernel can write."""
    cdef Snapshot *s = <Snapshot *>load_pointer(&c.link.plane.regions.now)
    cdef u64 end
    cdef u32 i, k
    for i in range(c.local_n):
        end = <u64>c.local[i].iov_base + c.local[i].iov_len
        k = regions_above(s.regions, s.count, <u64>c.local[i].iov_base) - 1
        while k < s.count and s.regions[k].start < end:
            if not s.regions[k].kind.touched_by & TOUCHED_BY_KERNEL:
                return True
            k += 1
    return False


cdef void *right(Connection *c) noexcept nogil:
    return (<Landings *>c.own).arriving.opening


cdef bint landing_may_land(Connection *c, char *reason) noexcept nogil:
    cdef Landings *l = <Landings *>c.own
    return may_land(
        c.link, l.arriving, &l.place, c.local + c.local_at, c.local_n - c.local_at, reason)


cdef void landing_moved(Connection *c, u64 nbytes) noexcept nogil:
    cdef Arriving *a = (<Landings *>c.own).arriving
    if a.is_reply:
        store64(&a.opening.progress_ns, load64(&c.link.progress_ns))


cdef void landing_landed(Connection *c, bint is_good) noexcept nogil:
    cdef Landings *l = <Landings *>c.own
    cdef Arriving *a = l.arriving
    cdef u64 nbytes = c.head.nbytes
    l.arriving = NULL
    pthread_mutex_lock(&c.link.lock)
    if staged_is_open(c):
        nbytes -= staged_end(c)
        a.unread -= 1
    a.arrived += nbytes
    if not is_good:
        a.spoiled = True
    if a.is_reply:
        store64(&c.link.progress_ns, now_ns())
    if is_whole(a):
        landing_finish(c, a)
    pthread_mutex_unlock(&c.link.lock)


cdef void landing_part(Connection *c, void *of, u64 nbytes, int fault) noexcept nogil:
    cdef Arriving *a = <Arriving *>of
    cdef char reason[TEXT_MAX]
    if fault == 0:
        count(&c.flow.received_nbytes, nbytes)
    store64(&c.link.progress_ns, now_ns())
    pthread_mutex_lock(&c.link.lock)
    a.arrived += nbytes
    if fault:
        snprintf(reason, TEXT_MAX, b"registered memory cannot be written: %s", strerror(fault))
        refuse(c, a, reason)
    elif a.is_reply:
        store64(&a.opening.progress_ns, load64(&c.link.progress_ns))
    if is_whole(a):
        landing_finish(c, a)
    pthread_mutex_unlock(&c.link.lock)


# -- frames

cdef bint load_ranges(Connection *c) noexcept nogil:
    """The descriptors of a frame as iovecs; False after a violation."""
    cdef Header *h = &c.head
    cdef Landing *landings = <Landing *>c.body
    cdef Block *blocks = <Block *>c.body
    cdef u64 total = 0, nbytes
    cdef u32 i
    cdef char text[TEXT_MAX]
    for i in range(h.count):
        if h.kind == SEGMENT:
            nbytes = landings[i].nbytes
            c.local[i].iov_base = <void *>landings[i].dst
        else:
            nbytes = blocks[i].nbytes
            c.local[i].iov_base = <void *>blocks[i].dst
        c.local[i].iov_len = nbytes
        if nbytes == 0 or nbytes > h.nbytes:
            snprintf(text, TEXT_MAX, b"a segment of %llu bytes with a block of %llu bytes",
                     <ull>h.nbytes, <ull>nbytes)
            violate(c.link, text)
            return False
        total += nbytes  # Cannot wrap: BLOCKS_MAX sizes of at most SEGMENT_BYTES_MAX.
    if total != h.nbytes:
        snprintf(text, TEXT_MAX, b"a segment of %llu bytes with blocks of %llu bytes in all",
                 <ull>h.nbytes, <ull>total)
        violate(c.link, text)
        return False
    c.local_at = 0
    c.local_n = h.count
    c.payload_left = h.nbytes
    return True


cdef bint received(Connection *c) noexcept nogil:
    cdef LandingProtocol *protocol = <LandingProtocol *>c.protocol
    cdef Arriving *a
    if c.head.kind == ACK:
        return acknowledged(c)
    if c.head.kind == END:
        return landing_empty(c)
    if c.head.kind == ABANDON:
        return on_abandon(c)
    if not load_ranges(c):
        return False
    if c.head.kind == READ:
        serve_read(c)
        return True
    a = on_some(c)
    if a == NULL:
        return False
    if c.head.kind == PULL:
        protocol.pull(c, a)
        return True
    expect_payload(c, c.local_n, c.head.nbytes)
    if not landing_begin(c, a):
        throw_away(c)
    return True


cdef Arriving *on_some(Connection *c) noexcept nogil:
    """A frame brings some of a transfer; NULL after a violation."""
    cdef Landings *l = <Landings *>c.own
    cdef char text[TEXT_MAX]
    cdef Arriving *a
    pthread_mutex_lock(&c.link.lock)
    a = begin(c)
    if a != NULL:
        l.last_id = max(l.last_id, c.head.transfer)
        if not arriving_announce(a, c.head.nbytes, text):
            violate_locked(c.link, text)
            a = NULL
    pthread_mutex_unlock(&c.link.lock)
    return a


cdef bint landing_empty(Connection *c) noexcept nogil:
    cdef Landings *l = <Landings *>c.own
    cdef Arriving *a = NULL
    pthread_mutex_lock(&c.link.lock)
    if arriving_of(c.link, c.head.transfer) != NULL:
        violate_locked(c.link, b"a transfer without blocks that has begun with some")
    else:
        a = begin(c)
    if a != NULL:
        l.last_id = max(l.last_id, c.head.transfer)
        landing_finish(c, a)
    pthread_mutex_unlock(&c.link.lock)
    return a != NULL


cdef bint on_abandon(Connection *c) noexcept nogil:
    cdef Arriving *a
    pthread_mutex_lock(&c.link.lock)
    a = begin(c)
    if a != NULL and not arriving_abandon(a, c.head.total):
        violate_locked(c.link, b"a transfer is given up with fewer bytes than were sent")
        a = NULL
    if a != NULL and is_whole(a):
        landing_finish(c, a)
    pthread_mutex_unlock(&c.link.lock)
    return a != NULL


# -- serving reads

cdef Region **hold(Connection *c, u32 *held_n, char *reason) noexcept nogil:
    """The regions that the blocks of a READ lie in, each with a reference; NULL if one does not
    lie in any."""
    cdef Block *blocks = <Block *>c.body
    cdef Region **held = NULL
    cdef Snapshot *s
    cdef uint8_t *touched
    cdef bint good = True
    cdef int k
    cdef u32 i, n = 0
    held_n[0] = 0
    enter(&c.polled.worker.section, c.link, NULL)
    s = <Snapshot *>load_pointer(&c.link.plane.regions.now)
    touched = <uint8_t *>need(s.count + 1)
    for i in range(c.local_n):
        if not is_registered(s, blocks[i].src, blocks[i].nbytes, s.newest, RIGHT_READ, touched):
            k = snprintf(reason, TEXT_MAX, b"the source: ")
            say_refused(s, blocks[i].src, blocks[i].nbytes, RIGHT_READ, reason + k)
            good = False
            break
    if good:
        for i in range(s.count):
            n += touched[i] != 0
        held = <Region **>need((n + 1) * sizeof(Region *))
        for i in range(s.count):
            if touched[i]:
                held[held_n[0]] = s.regions[i]
                add32(&s.regions[i].refs, 1)
                add32(&s.regions[i].readers, 1)
                held_n[0] += 1
    leave(&c.polled.worker.section)
    free(touched)
    return held


cdef void serve_read(Connection *c) noexcept nogil:
    """A piece of a peer's read: writes back what it asks for, under the number of its read."""
    cdef Link *link = c.link
    cdef char reason[TEXT_MAX]
    cdef u32 n = 0
    cdef Region **held = hold(c, &n, reason)
    cdef Block *blocks
    cdef Transfer *t = NULL
    cdef bint good
    if held != NULL:
        blocks = <Block *>need(c.local_n * sizeof(Block))
        memcpy(blocks, c.body, c.local_n * sizeof(Block))
        t = transfer_new(
            link, False, c.head.transfer, blocks, c.local_n, c.head.nbytes, held, n)
        transfer_owe(t)
        link.ops.prepare(t, (<LandingProtocol *>c.protocol).reply == PULL)
    pthread_mutex_lock(&link.lock)
    good = t != NULL
    if good and link.replies >= READS_SERVED_MAX:
        good = False
        snprintf(reason, TEXT_MAX, b"the source: too many reads at once")
    if good:
        transfer_list(t)
        link_kick(link)
    else:
        queue_answer(c, c.head.transfer, REFUSED, reason)
    pthread_mutex_unlock(&link.lock)
    if good:
        transfer_drop(t)
    elif t != NULL:
        transfer_discard(t)


# -- the protocol

cdef LandingProtocol landing_protocol(int over, uint8_t reply) noexcept:
    cdef LandingProtocol protocol
    memset(&protocol, 0, sizeof(protocol))
    protocol.frames.over = over
    protocol.frames.load = sending_load
    protocol.frames.sent = sending_sent
    protocol.frames.received = received
    protocol.frames.right = right
    protocol.frames.may_land = landing_may_land
    protocol.frames.refuse = landing_refuse
    protocol.frames.moved = landing_moved
    protocol.frames.landed = landing_landed
    protocol.frames.copy = staged_receive
    protocol.frames.turn = staged_turn
    protocol.frames.settle = staged_settle
    protocol.frames.part = landing_part
    protocol.frames.leave = sending_leave
    protocol.reply = reply
    return protocol
