# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from te.core.channels cimport channel_receive
from te.core.frames cimport *
from te.core.heap cimport need
from te.core.kinds cimport Copy, Kind
from te.core.regions cimport Snapshot
from te.core.sections cimport enter, leave
from te.core.stager cimport Stager, spans_of
from te.core.staging cimport *
from te.core.sync cimport *
from te.core.transfer cimport transfer_drop
from te.core.vectors cimport advance
from te.core.wire cimport Header, TEXT_MAX
from te.core.worker cimport polled_again


cdef inline Stager *stager_of(Connection *c) noexcept nogil:
    return <Stager *>load_pointer(&c.link.plane.stagers[c.polled.worker.index])


cdef Staged *staged_of(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    if s == NULL:
        c.staged = s = <Staged *>need(sizeof(Staged))
        s.out.owner = s.into.owner = &c.polled
    return s


# -- the source

cdef u32 staged_ahead(Connection *c) noexcept nogil:
    return 0 if c.staged == NULL else (<Staged *>c.staged).n


cdef Slot *staged_take(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    return NULL if s.n == FRAMES_AHEAD else lane_take(&stager_of(c).out, &s.out)


cdef u64 staged_slot_bytes(Connection *c) noexcept nogil:
    return stager_of(c).out.slot_bytes


cdef void staged_put(
    Connection *c, Slot *slot, Transfer *t, u64 items_nbytes, u32 n, u64 nbytes
) noexcept nogil:
    cdef Span spans[SPANS_MAX]
    cdef Staged *s = <Staged *>c.staged
    cdef Prepared *p = &s.frames[(s.first + s.n) % FRAMES_AHEAD]
    cdef u64 room = sizeof(Header) + items_nbytes
    s.n += 1
    add32(&t.refs, 1)
    p.transfer = t
    p.items_nbytes = items_nbytes
    p.frame = <uint8_t *>need(room)
    memcpy(p.frame, c.frame, room)
    slot_gather(
        &stager_of(c).out, slot, spans, spans_of(t.held, t.held_n, c.out + 2, nbytes, spans),
        c.link, t)


cdef bint staged_load(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    cdef Prepared *p = &s.frames[s.first]
    cdef Slot *slot = s.out.first
    cdef Header *h = <Header *>c.frame
    if load32(&slot.state) != SLOT_COPIED:
        return False
    memcpy(c.frame, p.frame, sizeof(Header) + p.items_nbytes)
    if slot.fault:  # Nobody is to get what was there before.
        memset(slot.base, 0, h.nbytes)
    c.out[2].iov_base = slot.base
    c.out[2].iov_len = h.nbytes
    frame_load(c, p.transfer, p.items_nbytes, 1, h.nbytes)
    transfer_drop(p.transfer)  # The connection has a reference now.
    if slot.fault:
        pthread_mutex_lock(&c.link.lock)
        c.out_transfer.fault = slot.fault
        pthread_mutex_unlock(&c.link.lock)
        c.trailer = slot.fault
    s.is_loaded = True
    return True


cdef Transfer *pop_frame(Staged *s) noexcept nogil:
    cdef Prepared *p = &s.frames[s.first]
    s.first = (s.first + 1) % FRAMES_AHEAD
    s.n -= 1
    free(p.frame)
    return p.transfer


cdef void staged_sent(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    if s == NULL or not s.is_loaded:
        return
    s.is_loaded = False
    pop_frame(s)
    lane_give(&stager_of(c).out, &s.out)


cdef bint is_reading(Slot *slot, bint is_ours) noexcept nogil:
    """Whether a copy of the lane reads what may go with the connection."""
    while slot != NULL:
        if load32(&slot.state) == SLOT_COPYING and (is_ours or slot.is_foreign):
            return True
        slot = slot.next
    return False


cdef bint staged_is_quiet(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    if s == NULL:
        return True
    staging_poll(&stager_of(c).out)
    staging_poll(&stager_of(c).into)
    return not is_reading(s.out.first, True) and not is_reading(s.into.first, False)


cdef Transfer *staged_forget(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    if s == NULL:
        return NULL
    if s.is_loaded:
        s.is_loaded = False
        pop_frame(s)
    if s.n == 0:
        lane_drop(&stager_of(c).out, &s.out)
        lane_drop(&stager_of(c).into, &s.into)
        return NULL
    return pop_frame(s)


# -- the destination

cdef void staged_expect(Connection *c, void *of) noexcept nogil:
    cdef Staged *s = staged_of(c)
    s.of = of
    s.have = s.handed_over = 0


cdef u64 staged_end(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    if not staged_is_open(c):
        return 0
    s.of = NULL
    c.is_held_up = False
    if s.into.last != NULL and load32(&s.into.last.state) == SLOT_HELD:
        lane_return(&stager_of(c).into, &s.into)
    lane_leave(&stager_of(c).into, &s.into)
    return s.handed_over


cdef Slot *staged_slot(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    cdef Slot *slot = s.into.last
    if slot == NULL or load32(&slot.state) != SLOT_HELD:
        s.have = 0
        slot = lane_take(&stager_of(c).into, &s.into)
    c.is_held_up = slot == NULL
    return slot


cdef bint hand_over(Connection *c) noexcept nogil:
    """Copies what was received to where it belongs, if that is still allowed."""
    cdef Span spans[SPANS_MAX]
    cdef char reason[TEXT_MAX]
    cdef Staged *s = <Staged *>c.staged
    cdef Staging *ring = &stager_of(c).into
    cdef Slot *slot = s.into.last
    cdef Snapshot *now
    cdef void *right = c.protocol.right(c)
    cdef u64 nbytes = s.have
    cdef bint good
    s.have = 0
    enter(&c.polled.worker.section, c.link, right)
    good = c.protocol.may_land(c, reason)
    if good:
        now = <Snapshot *>load_pointer(&c.link.plane.regions.now)
        slot_scatter(
            ring, slot, spans,
            spans_of(now.regions, now.count, c.local + c.local_at, nbytes, spans), c.link, right)
    leave(&c.polled.worker.section)
    if not good:
        lane_return(ring, &s.into)
        c.protocol.refuse(c, reason)
        return False
    note_part(c, nbytes)
    return True


cdef void note_part(Connection *c, u64 nbytes) noexcept nogil:
    """So much is being copied to where it belongs."""
    cdef Staged *s = <Staged *>c.staged
    cdef Part *part = &s.parts[(s.parts_first + s.parts_n) % SLOTS_MAX]
    part.of, part.nbytes = s.of, nbytes
    s.parts_n += 1
    s.handed_over += nbytes
    if c.payload_left:
        c.local_at = advance(c.local, c.local_at, nbytes)


cdef bint staged_got(Connection *c, u64 nbytes) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    s.have += nbytes
    if c.payload_left and s.have < stager_of(c).into.slot_bytes:
        return True
    return hand_over(c)


cdef bint staged_push(Connection *c, u64 nbytes) noexcept nogil:
    (<Staged *>c.staged).have += nbytes
    return hand_over(c)


cdef void staged_move(
    Connection *c, Kind *kind, const Copy *copies, u32 n, u64 nbytes
) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    s.into.last.is_foreign = True
    slot_move(&stager_of(c).into, s.into.last, kind, copies, n, nbytes, c.link, c.protocol.right(c))
    note_part(c, nbytes)


cdef void staged_gather(Connection *c, const Span *spans, u32 n) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    s.into.last.is_foreign = s.is_gathering = c.is_held_up = True
    slot_gather(&stager_of(c).into, s.into.last, spans, n, c.link, c.protocol.right(c))


cdef Slot *staged_gathered(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    cdef Slot *slot = s.into.last
    if load32(&slot.state) != SLOT_COPIED:
        return NULL
    slot.is_foreign = s.is_gathering = c.is_held_up = False
    store32(&slot.state, SLOT_HELD)
    return slot


cdef bint give_way(Connection *c) noexcept nogil:
    """Nothing comes just now, and others wait for a slot; False if it must not land."""
    cdef Staged *s = <Staged *>c.staged
    if not staging_is_scarce(&stager_of(c).into):
        return True
    if s.have:
        return hand_over(c)
    lane_return(&stager_of(c).into, &s.into)
    return True


cdef void give_up(Connection *c) noexcept nogil:
    """What is left of the payload must not land."""
    if c.payload_left:
        throw_away(c)
    else:
        expect_trailer(c)


cdef Moved staged_receive(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    cdef Slot *slot = staged_slot(c)
    cdef Moved state
    cdef ssize_t n
    cdef size_t wanted
    if slot == NULL:
        return WAITING
    wanted = min(stager_of(c).into.slot_bytes - s.have, c.payload_left)
    n = channel_receive(c.channel, slot.base + s.have, wanted)
    state = on_received(c, n, wanted)
    if state == LOST:
        return LOST
    if n > 0:
        c.payload_left -= n
        if not staged_got(c, n):
            give_up(c)
            return MOVED
    if c.payload_left == 0:
        expect_trailer(c)
        return MOVED
    if state == WAITING and s.into.last == slot and load32(&slot.state) == SLOT_HELD and (
        not give_way(c)
    ):
        give_up(c)
        return MOVED
    return state


# -- what is over

cdef void staged_settle(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    cdef Slot *slot = s.into.first
    cdef Part *part
    cdef int fault
    while slot != NULL and load32(&slot.state) == SLOT_COPIED and not (
        s.is_gathering and slot == s.into.last
    ):
        part = &s.parts[s.parts_first]
        s.parts_first = (s.parts_first + 1) % SLOTS_MAX
        s.parts_n -= 1
        fault = slot.fault
        lane_give(&stager_of(c).into, &s.into)
        c.protocol.part(c, part.of, part.nbytes, fault)
        slot = s.into.first


cdef inline bint is_copied(Lane *lane) noexcept nogil:
    return lane.first != NULL and load32(&lane.first.state) == SLOT_COPIED


cdef void staged_turn(Connection *c) noexcept nogil:
    cdef Staged *s = <Staged *>c.staged
    if s == NULL:
        return
    if pthread_mutex_trylock(&c.lock):
        polled_again(&c.polled)  # A caller uses it just now.
        return
    if is_copied(&s.into) or (c.out_left == 0 and is_copied(&s.out)):
        polled_again(&c.polled)
    pthread_mutex_unlock(&c.lock)
