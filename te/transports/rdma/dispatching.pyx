# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.string cimport memcpy
from te.core.link cimport *
from te.core.regions cimport UNUSED
from te.core.sync cimport *
from te.core.transfer cimport ALL_SENT, advance, is_given_up
from te.core.wire cimport POSTED_MAX, RAILS_MAX
from te.transports.rdma.balance cimport *
from te.transports.rdma.control cimport *
from te.transports.rdma.outgoing cimport go_on, take_ready
from te.transports.rdma.pieces cimport Piece
from te.transports.rdma.rails cimport carries, RAIL_SUSPECT, RAIL_UP
from te.transports.rdma.state cimport *

cdef enum:
    POSTED_BYTES = 8 << 20  # of a qp under way at once; the last piece may exceed it
    # A rail that was slow for so long is taken to be as fast as any, until it is measured: where
    # transfers are small, one that was slow once would never be used again.
    RETRY_NS = 5000000000


# -- what rails can take

cdef bint has_room(Qp *q) noexcept nogil:
    return (
        q.ring_n < POSTED_MAX
        and (q.ring_n == 0 or q.ring_bytes < POSTED_BYTES)
        and q.marks + q.unbuilt < q.credit
        and q.sequence - q.completed + q.unbuilt_blocks < q.e.send_depth
    )


cdef inline bint has_room_for(Qp *q, bint is_far) noexcept nogil:
    """A rail that is farther from the memory than another takes one piece at a time."""
    return has_room(q) and not (is_far and q.ring_n)


cdef bint find_carriers(Direct *d, bint *can_carry) noexcept nogil:
    """By rail, whether it carries anything now: not one that is suspect while another is well. False
    if there is none with room."""
    cdef u32 i
    cdef Qp *q
    cdef bint any_well = False, any_room = False
    for i in range(d.rails_n):
        q = d.qps[i]
        can_carry[i] = carries(&d.rails[i]) and load64(&d.fences) >= q.fences
        any_well |= can_carry[i] and d.rails[i].state == RAIL_UP
    for i in range(d.rails_n):
        can_carry[i] = can_carry[i] and not (any_well and d.rails[i].state == RAIL_SUSPECT)
        any_room |= can_carry[i] and has_room(d.qps[i])
    return any_room


cdef void set_lanes(
    Direct *d, const uint8_t *distances, const bint *can_carry, Lane *lanes, bint *is_far
) noexcept nogil:
    cdef u32 i
    cdef uint8_t distance, nearest = UNUSED
    for i in range(d.rails_n):
        if can_carry[i]:
            nearest = min(nearest, distances[d.qps[i].local_nic])
    for i in range(d.rails_n):
        lanes[i].speed = 0
        if not can_carry[i]:
            continue
        distance = distances[d.qps[i].local_nic]
        if distance == UNUSED and nearest != UNUSED:
            continue
        lanes[i].speed = d.speeds[i] / slowness(distance)
        lanes[i].in_flight = <double>d.qps[i].ring_bytes
        is_far[i] = distance != nearest
        lanes[i].has_room = has_room_for(d.qps[i], is_far[i])


cdef void level_speeds(Direct *d, u64 now) noexcept nogil:
    cdef double rates[RAILS_MAX]
    cdef u32 i
    for i in range(d.rails_n):
        rates[i] = pace_rate(&d.paces[i])
    pthread_mutex_lock(&d.rails_lock)
    memcpy(d.rates, rates, d.rails_n * sizeof(double))
    pthread_mutex_unlock(&d.rails_lock)
    d.fastest = speeds_of(rates, d.speeds, d.rails_n)
    for i in range(d.rails_n):
        if d.speeds[i] == d.fastest:
            d.tried_ns[i] = now


cdef void retry_slow(Direct *d, u64 now) noexcept nogil:
    cdef u32 i
    for i in range(d.rails_n):
        if d.speeds[i] < d.fastest and now > d.tried_ns[i] + RETRY_NS:
            pace_retry(&d.paces[i], d.fastest)
            level_speeds(d, now)


# -- giving

cdef u64 give(Qp *q, Transfer *t) noexcept nogil:
    """The next piece of the transfer; how many bytes that is. Under the link's lock."""
    cdef Posting *p = posting_of(t)
    cdef Posted *one = &q.ring[(q.ring_first + q.ring_n) % POSTED_MAX]
    cdef Piece *piece = &p.pieces[p.head - 1]
    one.transfer, one.piece, one.blocks, one.nbytes = t, p.head - 1, piece.blocks, piece.nbytes
    one.sequence = <u64>-1
    one.is_unmarked = False
    p.head = piece.next
    p.waiting -= 1
    p.waiting_bytes -= piece.nbytes
    t.in_flight += 1
    if p.waiting == 0:
        take_ready(q.link, t)
        advance(t, ALL_SENT)
    if q.ring_n == 0:
        q.busy_since = now_ns()
        q.busy_bytes = 0
    q.ring_n += 1
    q.unbuilt += 1
    q.unbuilt_blocks += piece.blocks
    q.ring_bytes += piece.nbytes
    add64(&direct_of(q.link).rail_flying[q.index], piece.nbytes)
    return piece.nbytes


cdef bint give_all(Direct *d, Transfer *t, const bint *can_carry) noexcept nogil:
    """As many of its pieces as rails take."""
    cdef Posting *p = posting_of(t)
    cdef Lane lanes[RAILS_MAX]
    cdef bint is_far[RAILS_MAX]
    cdef u32 i
    cdef bint given = False
    set_lanes(d, p.distances, can_carry, lanes, is_far)
    while p.head:
        i = choose(
            lanes, d.rails_n, <double>p.pieces[p.head - 1].nbytes, <double>p.waiting_bytes, d.turn)
        if i == NO_LANE:
            break
        given = True
        lanes[i].in_flight += give(d.qps[i], t)
        lanes[i].has_room = has_room_for(d.qps[i], is_far[i])
        d.turn = i + 1
    return given


cdef bint dispatch(Link *link) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef Connection *c
    cdef Transfer *t
    cdef Transfer *next
    cdef bint can_carry[RAILS_MAX]
    cdef bint given = False
    if load_pointer(&d.ready) == NULL or not find_carriers(d, can_carry):
        return False
    c = control_lock(link)
    retry_slow(d, now_ns())
    t = d.ready
    while t != NULL:
        next = posting_of(t).next_ready
        if is_given_up(t):
            go_on(c, t)
        else:
            given |= give_all(d, t, can_carry)
        t = next
    control_unlock(c)
    return given
