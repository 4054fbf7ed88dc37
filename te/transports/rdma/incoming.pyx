# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.string cimport memcpy
from te.core.frames cimport queue_answer
from te.core.heap cimport need
from te.core.inbound cimport *
from te.core.landing cimport landing_finish, refuse
from te.core.link cimport *
from te.core.posix cimport ntohl
from te.core.regions cimport right_to_write
from te.core.sections cimport enter, leave
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.wire cimport *
from te.transports.rdma.control cimport *
from te.transports.rdma.qps cimport post_receives, qp_drain
from te.transports.rdma.rails cimport RAIL_UP
from te.transports.rdma.state cimport *
from te.verbs.abi cimport WC_RECV, WC_SUCCESS

ctypedef unsigned long long ull


# -- letting in

cdef void give_slot_back(Link *link, Arriving *a) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef Granted *g = granted_of(a)
    d.slots[g.slot] = NULL
    d.slots_taken -= 1
    if a.refused:
        d.revoked -= 1
    g.has_slot = False


cdef void ungrant(Link *link, Arriving *a) noexcept nogil:
    if granted_of(a) == NULL:
        return
    give_slot_back(link, a)
    if a.opening != NULL:
        add32(&a.opening.granted, -1)


cdef bint may_begin(Connection *c, Arriving *a) noexcept nogil:
    """Inside a section, so that a fence that closes the tag sees the grant, or prevents it."""
    cdef bint good = True
    enter(&c.polled.worker.section, c.link, a.opening)
    if a.opening != NULL:
        good = load32(&a.opening.is_open) != 0
        if good:
            add32(&a.opening.granted, 1)
    leave(&c.polled.worker.section)
    return good


cdef u32 take_slot(Direct *d, Arriving *a) noexcept nogil:
    """One is free: `slots_taken` says so."""
    cdef u32 slot = d.slots_turn
    while d.slots[slot] != NULL:
        slot = (slot + 1) % BEGUN_MAX
    d.slots_turn = (slot + 1) % BEGUN_MAX
    d.slots_taken += 1
    d.generations[slot] += 1
    if d.generations[slot] == 0:  # Which is the probes'.
        d.generations[slot] = 1
    d.slots[slot] = a
    return slot


cdef bint may_ask(Connection *c, char *text) noexcept nogil:
    """Whether a source may ask for that; else why not. Each transfer is asked for once, and all that
    have a slot and were not fenced are unfinished at the source, which has BEGUN_MAX of those at
    most."""
    cdef Direct *d = direct_of(c.link)
    cdef Header *h = &c.head
    cdef u64 last_id = control_of(c).last_id
    if arriving_of(c.link, h.transfer) != NULL:
        snprintf(text, TEXT_MAX, b"transfer %llu is asked for twice", <ull>h.transfer)
        return False
    if d.slots_taken - d.revoked == BEGUN_MAX:
        snprintf(text, TEXT_MAX, b"more than %d unfinished transfers are asked for", BEGUN_MAX)
        return False
    if h.transfer <= last_id:
        snprintf(text, TEXT_MAX, b"transfer %llu comes after %llu", <ull>h.transfer, <ull>last_id)
        return False
    return True


cdef void let_in(Connection *c, Arriving *a) noexcept nogil:
    """Grants it, or refuses it. Under the link's lock."""
    cdef Direct *d = direct_of(c.link)
    cdef char reason[TEXT_MAX]
    cdef Granted *g
    if d.slots_taken == BEGUN_MAX:
        refuse(c, a, b"the destination still waits for the ends of transfers that were fenced")
    elif not may_begin(c, a):
        snprintf(reason, TEXT_MAX, b"the tag 0x%llx was fenced", <ull>a.tag)
        refuse(c, a, reason)
    if a.refused:
        arriving_forget(c.link, a)
        return
    g = <Granted *>need(sizeof(Granted) + c.head.count / 64 * sizeof(u64))
    a.own = g
    g.pieces = c.head.count
    g.slot = take_slot(d, a)
    g.has_slot = True
    tell_table(c, right_to_write(a.tag))
    queue_grant(c, a.id, g.slot << 24 | <u32>d.generations[g.slot] << 16)


cdef bint on_ask(Connection *c) noexcept nogil:
    cdef Link *link = c.link
    cdef Header *h = &c.head
    cdef char text[TEXT_MAX]
    cdef Arriving *a = NULL
    pthread_mutex_lock(&link.lock)
    if h.count == 0:
        tell_table(c, RIGHT_READ)
        queue_grant(c, h.transfer, 0)
        pthread_mutex_unlock(&link.lock)
        return True
    if may_ask(c, text):
        a = arriving_begin(link, h.transfer, h.tag, h.total, False, text)
    if a == NULL:
        violate(link, text)
    else:
        control_of(c).last_id = h.transfer
        if a.refused:
            queue_answer(c, a.id, REFUSED, text)
            arriving_forget(link, a)
        else:
            let_in(c, a)
    pthread_mutex_unlock(&link.lock)
    return a != NULL


# -- counting

cdef void end_if_stopped(Connection *c, Arriving *a) noexcept nogil:
    """Nothing more of it can land once the marks of all pieces that were written have come."""
    if a.abandoned and granted_of(a).landed >= a.announced:
        ungrant(c.link, a)
        landing_finish(c, a)


cdef void count_landed(Link *link, Granted *g, u64 total) noexcept nogil:
    """Of the bytes that a NIC has written only the sum is known: rails count for their shares of the
    pieces, which are of about one size."""
    cdef u64 left = total, part
    cdef u32 i, pieces = g.pieces
    for i in range(RAILS_MAX):
        if g.by_rail[i]:
            part = left if g.by_rail[i] == pieces else left / pieces * g.by_rail[i]
            count(&link.flows[i].received_nbytes, part)
            left -= part
            pieces -= g.by_rail[i]


cdef bint land_mark(Connection *c, u32 rail, u32 mark) noexcept nogil:
    """One piece has landed; False after a violation. Under the link's lock."""
    cdef Direct *d = direct_of(c.link)
    cdef u32 slot = mark >> 24, piece = mark & 0xFFFF
    cdef Arriving *a = d.slots[slot]
    cdef u64 bit = <u64>1 << (piece & 63)
    cdef Granted *g
    store64(&c.link.progress_ns, now_ns())
    # None: a probe, or the last words of a transfer that was refused meanwhile.
    if a == NULL or d.generations[slot] != mark >> 16 & 0xFF:
        return True
    g = granted_of(a)
    if piece >= g.pieces:
        return False
    if g.bits[piece >> 6] & bit:
        return True
    g.bits[piece >> 6] |= bit
    g.landed += 1
    g.by_rail[rail] += 1
    if g.landed == g.pieces:
        count_landed(c.link, g, a.total)
        ungrant(c.link, a)
        a.arrived = a.total
        landing_finish(c, a)
    else:
        end_if_stopped(c, a)
    return True


cdef void marks_arrived(Qp *q, VWc *wc, int n) noexcept nogil:
    cdef Connection *c = control_lock(q.link)
    cdef int i
    cdef u32 mark
    cdef bint broken = False, good = True
    for i in range(n):
        if not wc[i].opcode & WC_RECV and wc[i].status == WC_SUCCESS:
            continue
        q.receives -= 1
        if wc[i].status != WC_SUCCESS:
            broken = True
            continue
        mark = wc[i].imm_data
        if q.e.is_iwarp:
            memcpy(&mark, q.e.scratch + 8 * wc[i].wr_id, sizeof(mark))
        q.marks_seen += 1
        good &= land_mark(c, q.index, ntohl(mark))
    if rail_of(q).state == RAIL_UP and not broken:
        broken = post_receives(q, RECEIVES - q.receives) != 0
    if broken and rail_of(q).state == RAIL_UP:
        queue_broken(c, q.index, q.epoch, NO_REASON)
        qp_drain(q)
    elif q.marks_seen - q.marks_told >= (1 if q.e.is_iwarp else RECEIVES / 4):
        q.marks_told = q.marks_seen
        queue_credit(c, q.index, q.epoch, q.marks_seen)
    if not good:
        violate(q.link, b"a mark of a piece that its transfer does not have")
    control_unlock(c)


cdef bint on_abandon(Connection *c) noexcept nogil:
    cdef Header *h = &c.head
    cdef Arriving *a
    cdef bint good = True
    pthread_mutex_lock(&c.link.lock)
    a = arriving_of(c.link, h.transfer)
    if a != NULL:  # Else it has been refused, and the answer crossed this.
        good = granted_of(a) != NULL and a.tag == h.tag and not a.abandoned and (
            h.total <= granted_of(a).pieces)
        if good:
            a.abandoned = True
            a.announced = h.total
            end_if_stopped(c, a)
        else:
            violate(
                c.link, b"it gives a transfer up that it cannot have written so much of")
    pthread_mutex_unlock(&c.link.lock)
    return good
