# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.heap cimport need
from te.core.regions cimport Snapshot
from te.core.stager cimport Stager, spans_of
from te.core.staging cimport *
from te.core.sync cimport *
from te.core.worker cimport polled_again


cdef inline Stager *stager_of(Connection *c) noexcept nogil:
    return <Stager *>load_pointer(&c.link.plane.stagers[c.polled.worker.index])


cdef inline Staged *staged_of(Connection *c) noexcept nogil:
    return <Staged *>c.own


# -- the source

cdef Slot *staged_take(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    s.out.owner = &c.polled
    return NULL if s.n == FRAMES_AHEAD else lane_take(&stager_of(c).out, &s.out)


cdef u64 staged_slot_bytes(Connection *c) noexcept nogil:
    return stager_of(c).out.slot_bytes


cdef void staged_put(
    Connection *c, Slot *slot, Transfer *t, const void *frame, u64 frame_nbytes, iovec *ranges,
    u64 nbytes
) noexcept nogil:
    cdef Span spans[SPANS_MAX]
    cdef Staged *s = staged_of(c)
    cdef Prepared *p = &s.frames[(s.first + s.n) % FRAMES_AHEAD]
    s.n += 1
    add32(&t.refs, 1)
    p.transfer = t
    p.frame = need(frame_nbytes)
    p.frame_nbytes = frame_nbytes
    memcpy(p.frame, frame, frame_nbytes)
    slot_gather(
        &stager_of(c).out, slot, spans, spans_of(t.held, t.held_n, ranges, nbytes, spans), c.link, t)


cdef Prepared *staged_load(Connection *c, Slot **slot) noexcept nogil:
    cdef Staged *s = staged_of(c)
    slot[0] = s.out.first
    if load32(&s.out.first.state) != SLOT_COPIED:
        return NULL
    s.is_loaded = True
    return &s.frames[s.first]


cdef Transfer *pop_frame(Staged *s) noexcept nogil:
    cdef Prepared *p = &s.frames[s.first]
    s.is_loaded = False
    s.first = (s.first + 1) % FRAMES_AHEAD
    s.n -= 1
    free(p.frame)
    return p.transfer


cdef void staged_sent(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    if s.is_loaded:
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
    cdef Staged *s = staged_of(c)
    if stager_of(c) == NULL:
        return True
    staging_poll(&stager_of(c).out)
    staging_poll(&stager_of(c).into)
    return not is_reading(s.out.first, True) and not is_reading(s.into.first, False)


cdef Transfer *staged_forget(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    if stager_of(c) == NULL:
        return NULL
    if s.is_loaded:
        pop_frame(s)
    if s.n:
        return pop_frame(s)
    lane_drop(&stager_of(c).out, &s.out)
    lane_drop(&stager_of(c).into, &s.into)
    return NULL


# -- the destination

cdef void staged_expect(Connection *c, void *of) noexcept nogil:
    cdef Staged *s = staged_of(c)
    s.into.owner = &c.polled
    s.of = of
    s.have = s.handed_over = 0


cdef u64 staged_end(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    if not staged_is_open(c):
        return 0
    s.of = NULL
    c.is_held_up = False
    if s.into.last != NULL and load32(&s.into.last.state) == SLOT_HELD:
        lane_return(&stager_of(c).into, &s.into)
    lane_leave(&stager_of(c).into, &s.into)
    return s.handed_over


cdef Slot *staged_slot(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    cdef Slot *slot = s.into.last
    if slot == NULL or load32(&slot.state) != SLOT_HELD:
        s.have = 0
        slot = lane_take(&stager_of(c).into, &s.into)
    c.is_held_up = slot == NULL
    return slot


cdef void staged_return(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    s.have = 0
    lane_return(&stager_of(c).into, &s.into)


cdef void note_part(Staged *s, u64 nbytes) noexcept nogil:
    """So much is being copied to where it belongs."""
    cdef Part *part = &s.parts[(s.parts_first + s.parts_n) % SLOTS_MAX]
    part.of, part.nbytes = s.of, nbytes
    s.parts_n += 1
    s.have = 0
    s.handed_over += nbytes


cdef void staged_scatter(Connection *c, iovec *ranges, void *opening) noexcept nogil:
    cdef Span spans[SPANS_MAX]
    cdef Staged *s = staged_of(c)
    cdef Snapshot *now = <Snapshot *>load_pointer(&c.link.plane.regions.now)
    slot_scatter(
        &stager_of(c).into, s.into.last, spans,
        spans_of(now.regions, now.count, ranges, s.have, spans), c.link, opening)
    note_part(s, s.have)


cdef void staged_move(
    Connection *c, Kind *kind, const Copy *copies, u32 n, u64 nbytes, void *opening
) noexcept nogil:
    cdef Staged *s = staged_of(c)
    s.into.last.is_foreign = True
    slot_move(&stager_of(c).into, s.into.last, kind, copies, n, nbytes, c.link, opening)
    note_part(s, nbytes)


cdef void staged_gather(Connection *c, Kind *kind, const Copy *copies, u32 n, void *opening) noexcept nogil:
    cdef Span spans[SPANS_MAX]
    cdef Staged *s = staged_of(c)
    cdef u32 i
    for i in range(n):
        spans[i].kind, spans[i].at, spans[i].nbytes = kind, <uint8_t *>copies[i].src, copies[i].nbytes
    s.into.last.is_foreign = s.is_gathering = c.is_held_up = True
    slot_gather(&stager_of(c).into, s.into.last, spans, n, c.link, opening)


cdef Slot *staged_gathered(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    cdef Slot *slot = s.into.last
    if load32(&slot.state) != SLOT_COPIED:
        return NULL
    slot.is_foreign = s.is_gathering = c.is_held_up = False
    store32(&slot.state, SLOT_HELD)
    return slot


cdef bint staged_is_scarce(Connection *c) noexcept nogil:
    return staging_is_scarce(&stager_of(c).into)


cdef bint staged_done(Connection *c, Part *part) noexcept nogil:
    cdef Staged *s = staged_of(c)
    cdef Slot *slot = s.into.first
    if slot == NULL or load32(&slot.state) != SLOT_COPIED or (
        s.is_gathering and slot == s.into.last
    ):
        return False
    part[0] = s.parts[s.parts_first]
    part.fault = slot.fault
    s.parts_first = (s.parts_first + 1) % SLOTS_MAX
    s.parts_n -= 1
    lane_give(&stager_of(c).into, &s.into)
    return True


# -- its worker

cdef inline bint is_copied(Lane *lane) noexcept nogil:
    return lane.first != NULL and load32(&lane.first.state) == SLOT_COPIED


cdef void staged_turn(Connection *c) noexcept nogil:
    cdef Staged *s = staged_of(c)
    if s.into.owner == NULL and s.out.owner == NULL:
        return
    if is_copied(&s.into) or (c.out_left == 0 and is_copied(&s.out)):
        polled_again(&c.polled)
