# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memset
from te.core.callers cimport one_frame_bytes
from te.core.frames cimport LOST, MOVED, Moved, for_callers, frame_read, leave_to_worker, queue_answer
from te.core.heap cimport need
from te.core.inbound cimport *
from te.core.landing cimport *
from te.core.link cimport *
from te.core.payload cimport AT_HEAD, Payload, payload_of
from te.core.regions cimport *
from te.core.sections cimport enter, leave
from te.core.sending cimport acknowledged, sending_leave, sending_send
from te.core.staged cimport Part, staged_done, staged_turn
from te.core.sync cimport *
from te.core.transfer cimport (
    transfer_discard, transfer_drop, transfer_list, transfer_new, transfer_serve,
)
from te.core.wire cimport *

ctypedef unsigned long long ull


# -- transfers under way

cdef Arriving *begin(Connection *c, u64 last_id) noexcept nogil:
    """The transfer a frame belongs to, made by its first frame; NULL after a violation."""
    cdef Header *h = &c.head
    cdef char text[TEXT_MAX]
    cdef Arriving *known = arriving_of(c.link, h.transfer)
    cdef Arriving *a
    cdef u64 total = h.total
    if known != NULL and h.kind == ABANDON:
        total = known.total  # What an ABANDON says is how much of it was sent.
    if known == NULL and h.kind != ABANDON and h.transfer <= last_id:
        snprintf(text, TEXT_MAX, b"transfer %llu comes after %llu", <ull>h.transfer, <ull>last_id)
        violate(c.link, text)
        return NULL
    a = arriving_begin(c.link, h.transfer, h.tag, total, h.flags & FLAG_REPLY, text)
    if a == NULL:
        violate(c.link, text)
    elif known == NULL and a.refused:
        tell_refused(c, a, text)
    return a


# -- frames

cdef bint load_ranges(Connection *c) noexcept nogil:
    """The descriptors of a frame as iovecs; False after a violation."""
    cdef Header *h = &c.head
    cdef Payload *p = payload_of(c)
    cdef Landing *landings = <Landing *>c.body
    cdef Block *blocks = <Block *>c.body
    cdef u64 total = 0, nbytes
    cdef u32 i
    cdef char text[TEXT_MAX]
    for i in range(h.count):
        if h.kind == SEGMENT:
            nbytes = landings[i].nbytes
            p.local[i].iov_base = <void *>landings[i].dst
        else:
            nbytes = blocks[i].nbytes
            p.local[i].iov_base = <void *>blocks[i].dst
        p.local[i].iov_len = nbytes
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
    p.local_at = 0
    p.local_n = h.count
    p.left = h.nbytes
    return True


cdef Moved begin_some(Connection *c, Arriving **found) noexcept nogil:
    """The transfer of a frame that brings some of it, or says where that lies; LOST after a violation."""
    cdef Payload *p = payload_of(c)
    cdef char text[TEXT_MAX]
    cdef Arriving *a
    if not load_ranges(c):
        return LOST
    if not link_lock(c.link, c.polled.worker):
        c.has_head = True  # The frame is whole, and is taken by the next call.
        return leave_to_worker(c)
    a = begin(c, p.last_id)
    if a != NULL:
        p.last_id = max(p.last_id, c.head.transfer)
        if not arriving_announce(a, c.head.nbytes, text):
            violate(c.link, text)
            a = NULL
    pthread_mutex_unlock(&c.link.lock)
    found[0] = a
    return LOST if a == NULL else MOVED


cdef bint receiving_empty(Connection *c, u64 *last_id) noexcept nogil:
    cdef Arriving *a = NULL
    pthread_mutex_lock(&c.link.lock)
    if arriving_of(c.link, c.head.transfer) != NULL:
        violate(c.link, b"a transfer without blocks that has begun with some")
    else:
        a = begin(c, last_id[0])
    if a != NULL:
        last_id[0] = max(last_id[0], c.head.transfer)
        landing_finish(c, a)
    pthread_mutex_unlock(&c.link.lock)
    return a != NULL


cdef bint on_abandon(Connection *c) noexcept nogil:
    cdef Arriving *a
    pthread_mutex_lock(&c.link.lock)
    a = begin(c, payload_of(c).last_id)
    if a != NULL and not arriving_abandon(a, c.head.total):
        violate(c.link, b"a transfer is given up with fewer bytes than were sent")
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
    cdef u32 i
    enter(&c.polled.worker.section, c.link, NULL)
    s = <Snapshot *>load_pointer(&c.link.plane.regions.now)
    touched = <uint8_t *>need(s.count + 1)
    for i in range(c.head.count):
        if not is_registered(s, blocks[i].src, blocks[i].nbytes, s.newest, RIGHT_READ, touched):
            k = snprintf(reason, TEXT_MAX, b"the source: ")
            say_refused(s, blocks[i].src, blocks[i].nbytes, RIGHT_READ, reason + k)
            good = False
            break
    if good:
        held = regions_hold(s, touched, held_n)
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
        blocks = <Block *>need(c.head.count * sizeof(Block))
        memcpy(blocks, c.body, c.head.count * sizeof(Block))
        t = transfer_new(
            link, False, c.head.transfer, blocks, c.head.count, c.head.nbytes, held, n)
        transfer_serve(t)
        link.ops.prepare(t, True)
    pthread_mutex_lock(&link.lock)
    good = t != NULL
    if good and link.replies >= READS_SERVED_MAX:
        good = False
        snprintf(reason, TEXT_MAX, b"the source: too many reads at once")
    if good:
        transfer_list(t)
        # A small one is sent by this connection, in this turn: to wake the others up would cost more.
        if t.total > one_frame_bytes(c, True) or link.issue != t or c.out_left:
            link_kick(link)
    else:
        queue_answer(c, c.head.transfer, REFUSED, reason)
    pthread_mutex_unlock(&link.lock)
    if good:
        transfer_drop(t)
    elif t != NULL:
        transfer_discard(t)


# -- the protocol

cdef bint take_frame(Connection *c) noexcept nogil:
    """One without payload, but for a PULL; False after a violation."""
    if c.head.kind == END:
        return receiving_empty(c, &payload_of(c).last_id)
    if c.head.kind == ABANDON:
        return on_abandon(c)
    if not load_ranges(c):
        return False
    serve_read(c)
    return True


cdef Moved receiving_read(Connection *c, bint answers_only, Arriving **pulled) noexcept nogil:
    cdef bint is_whole
    cdef Arriving *a
    cdef Moved begun, state = frame_read(c, answers_only, &is_whole)
    pulled[0] = NULL
    if not is_whole:
        return state
    if c.head.kind == ACK:
        return acknowledged(c, state)
    if c.head.kind != SEGMENT and c.head.kind != PULL:
        return state if take_frame(c) else LOST
    begun = begin_some(c, &a)
    if begun != MOVED:
        return begun
    if c.head.kind == PULL:
        pulled[0] = a
        return state
    landing_expect(c, a)
    return MOVED  # With a payload to come it is worth looking; behind the last frame it is not.


cdef Moved receive(Connection *c, bint answers_only) noexcept nogil:
    cdef Arriving *pulled
    if payload_of(c).stand == AT_HEAD:
        return receiving_read(c, answers_only, &pulled)
    return leave_to_worker(c) if answers_only and not for_callers(c) else landing_receive(c)


cdef void settle(Connection *c) noexcept nogil:
    cdef Part part
    while staged_done(c, &part):
        landing_part(c, &part)


cdef Protocol receiving_protocol(int over) noexcept:
    cdef Protocol protocol
    memset(&protocol, 0, sizeof(protocol))
    protocol.over = over
    protocol.moves_payload = True
    protocol.answers = 1 << ACK
    protocol.receive = receive
    protocol.send = sending_send
    protocol.settle = settle
    protocol.turn = staged_turn
    protocol.leave = sending_leave
    return protocol
