# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.string cimport memcpy
from te.core.link cimport *
from te.core.posix cimport EAGAIN, ENOMEM, htonl
from te.core.regions cimport Key, UNUSED
from te.core.sync cimport *
from te.core.tally cimport Flow, count
from te.core.transfer cimport ALL_SENT, MORE, advance, is_given_up
from te.core.wire cimport *
from te.transports.rdma.balance cimport *
from te.transports.rdma.control cimport *
from te.transports.rdma.outgoing cimport *
from te.transports.rdma.pieces cimport Piece
from te.transports.rdma.qps cimport qp_fail, qp_moved, rail_step
from te.transports.rdma.rails cimport (
    ANSWERS, BAD_STATUS, carries, POST_FAILED, RAIL_PROBED, RAIL_SUSPECT, RAIL_UP,
)
from te.transports.rdma.state cimport *
from te.verbs.abi cimport *

cdef enum:
    POSTED_BYTES = 8 << 20  # of a qp under way at once; the last piece may exceed it
    # A rail that was slow for so long is taken to be as fast as any, until it is measured: where
    # transfers are small, one that was slow once would never be used again.
    RETRY_NS = 5000000000
    # Of a measurement of a rail's rate: what is over sooner tells of the way there and back instead.
    MEASURED_BYTES = 128 << 10
    SIGNAL_EVERY = 64  # work requests: returns send credits in the middle of long pieces


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


# -- building

cdef void build_mark(Qp *q, u32 mark) noexcept nogil:
    """The trailing write of a piece, or a probe: it lands behind everything before it."""
    cdef VSendWr *w = &q.wrs[q.built_n]
    q.built_n += 1
    q.sequence += 1
    q.since_signal = 0
    w.wr_id = q.sequence
    w.opcode = WR_RDMA_WRITE_WITH_IMM
    w.send_flags = SEND_SIGNALED
    q.marks += 1
    w.imm_data = htonl(mark)
    w.num_sge = 0
    w.remote_addr = 0
    w.rkey = 0
    if q.e.is_iwarp:
        w.opcode = WR_SEND
        w.send_flags |= SEND_INLINE
        w.num_sge = 1
        q.mark_data = htonl(mark)
        w.sg_list.addr = <u64>&q.mark_data
        w.sg_list.length = sizeof(u32)
        w.sg_list.lkey = 0


cdef void refuse_here(Qp *q, u64 address, u64 nbytes) noexcept nogil:
    """The other side has such memory no longer."""
    cdef Posted *one = first_unbuilt(q)
    cdef Transfer *t = one.transfer
    cdef Connection *c = control_lock(q.link)
    if t.text == NULL and t.verdict == 0:
        t.text = text_outside(q.link, t, address, nbytes)
        t.verdict = WAS_REFUSED
    one.is_unmarked = True
    posting_of(t).unmarked += 1
    advance(t, MORE)  # It cannot land as a whole any more.
    control_unlock(c)


cdef bint build(Qp *q) noexcept nogil:
    """Work requests for the piece under way, as many as the queue takes; whether the piece is
    complete. What has lost its place since it was granted is given up, its mark is not sent."""
    cdef Posted *one = first_unbuilt(q)
    cdef Transfer *t = one.transfer
    cdef Direct *d = direct_of(q.link)
    # All of it in registers: through `q`, each request would load and store it again.
    cdef Block *b = t.blocks + q.at_block
    cdef VSendWr *w = q.wrs + q.built_n
    cdef RemoteRange *remote = NULL
    cdef Key *local = NULL
    cdef u64 offset = q.at_offset, left = q.at_left, sequence = q.sequence
    cdef u64 n, local_at, remote_at, room = q.e.send_depth - (q.sequence - q.completed)
    cdef u32 since_signal = q.since_signal
    cdef bint is_read = t.is_read, lost = False
    cdef u32 local_nic = q.local_nic, remote_nic = q.remote_nic, most = q.e.max_msg_bytes
    cdef u32 right = remote_right(t)
    room = min(room, <u64>(q.e.send_depth - q.built_n))
    while left and room > 1:
        local_at = (b.dst if is_read else b.src) + offset
        remote_at = (b.src if is_read else b.dst) + offset
        if remote == NULL or remote_at < remote.start or remote_at >= remote.end:
            remote = remote_range(d, remote_at)
            lost = remote == NULL or not remote.rights & right
            if lost:
                break
        if local == NULL or local_at < local.start or local_at >= local.end:
            local = own_key(t, local_at)
        n = min(min(b.nbytes - offset, left), min(remote.end - remote_at, local.end - local_at))
        n = min(n, <u64>most)
        sequence += 1
        since_signal += 1
        w.wr_id = sequence
        w.opcode = WR_RDMA_READ if is_read else WR_RDMA_WRITE
        w.num_sge = 1
        w.send_flags = 0
        if since_signal == SIGNAL_EVERY:
            since_signal = 0
            w.send_flags = SEND_SIGNALED
        w.remote_addr = remote_at
        w.rkey = remote.keys[remote_nic]
        w.sg_list.addr = local_at
        w.sg_list.length = <u32>n
        w.sg_list.lkey = local.lkeys[local_nic]
        w += 1
        room -= 1
        left -= n
        offset += n
        if offset == b.nbytes:
            b += 1
            offset = 0
    q.built_n = <u32>(w - q.wrs)
    q.sequence = sequence
    q.since_signal = since_signal
    q.at_block = b - t.blocks
    q.at_offset = offset
    q.at_left = 0 if lost else left
    if lost:
        refuse_here(q, remote_at, b.nbytes - offset)
        build_mark(q, 0)  # A completion for what was built; the destination ignores it.
        return True
    if q.at_left or room == 0:
        return False
    if is_read:
        q.wrs[q.built_n - 1].send_flags = SEND_SIGNALED
        q.since_signal = 0
    else:
        build_mark(q, posting_of(t).mark + one.piece)
    return True


cdef bint post_chain(Qp *q) noexcept nogil:
    """One call for the whole chain; False if the device did not take all of it."""
    cdef VSendWr *bad = NULL
    cdef int errnum
    if q.built_at == q.built_n:
        return True
    # A piece in the ring that is neither this nor yet to be built may be under way (iWARP).
    if q.ring_n <= q.unbuilt + 1 and q.completed == q.sequence - (q.built_n - q.built_at):
        q.progress_ns = now_ns()  # Nothing was under way: its time begins now.
    q.wrs[q.built_n - 1].next = NULL
    errnum = q.e.post_send(q.e.qp, &q.wrs[q.built_at], &bad)
    q.wrs[q.built_n - 1].next = &q.wrs[q.built_n]
    if errnum == 0:
        q.built_at = q.built_n = 0
        return True
    if bad != NULL:  # Else nobody knows which were taken.
        q.built_at = <u32>(bad - q.wrs)
        if (errnum == ENOMEM or errnum == EAGAIN) and (
            q.completed < q.wrs[q.built_at].wr_id - 1
        ):
            return False  # A completion makes room.
    qp_fail(q, POST_FAILED, errnum)
    return False


cdef void post_probe(Qp *q) noexcept nogil:
    build_mark(q, 0)
    post_chain(q)


cdef void begin(Qp *q) noexcept nogil:
    cdef Posted *one = first_unbuilt(q)
    cdef Piece *piece = &posting_of(one.transfer).pieces[one.piece]
    q.at_block, q.at_offset, q.at_left = piece.first, piece.offset, piece.nbytes
    q.is_building = True


cdef bint post_given(Qp *q) noexcept nogil:
    """Sends what the qp was given; whether there was something."""
    cdef bint busy = False
    cdef Posted *one
    while post_chain(q) and q.unbuilt:
        busy = True
        if q.sequence - q.completed + 1 >= q.e.send_depth:
            return busy
        if not q.is_building:
            begin(q)
        if build(q):
            one = first_unbuilt(q)
            one.sequence = q.sequence
            one.mark = 0 if one.transfer.is_read else q.marks
            q.unbuilt -= 1
            q.unbuilt_blocks -= one.blocks
            q.is_building = False
    return busy


cdef bint post_pieces(Qp *q) noexcept nogil:
    cdef Direct *d = direct_of(q.link)
    cdef Qp *other
    cdef u32 i
    cdef bint busy = post_given(q)
    if dispatch(q.link):
        busy = True
        for i in range(d.rails_n):
            other = d.qps[i]
            if carries(&d.rails[i]) and other.unbuilt:
                post_given(other)
    return busy


# -- what comes back

cdef void sends_completed(Qp *q, VWc *wc, int n) noexcept nogil:
    cdef int i
    for i in range(n):
        if wc[i].status != WC_SUCCESS:
            qp_fail(q, BAD_STATUS, wc[i].status)
            return
        q.completed = wc[i].wr_id
    if not q.e.is_iwarp:
        qp_moved(q, now_ns())


cdef inline bint is_done(Qp *q) noexcept nogil:
    """Whether the first piece under way has left this side for good."""
    cdef Posted *one = &q.ring[q.ring_first]
    return q.ring_n != 0 and one.sequence <= q.completed and one.mark <= q.confirmed


cdef void measure(Qp *q, u64 nbytes) noexcept nogil:
    """Notes what the qp moved while there always was something under way. Under the link's lock."""
    cdef Direct *d = direct_of(q.link)
    q.busy_bytes += nbytes
    if q.busy_bytes < MEASURED_BYTES:
        return
    pace_note(&d.paces[q.index], q.busy_bytes, (q.progress_ns - q.busy_since) * 1e-9)
    level_speeds(d, q.progress_ns)
    q.busy_since = q.progress_ns
    q.busy_bytes = 0


cdef bint pieces_done(Qp *q) noexcept nogil:
    cdef Connection *c
    cdef Transfer *t
    cdef Posted *one
    cdef Flow *flow = &q.link.flows[q.index]
    cdef u64 moved = 0
    if rail_of(q).state == RAIL_PROBED and q.completed and q.confirmed:
        qp_moved(q, now_ns())
        rail_step(q.link, q.index, ANSWERS)
    if not is_done(q):
        return False
    qp_moved(q, now_ns())
    store64(&q.link.progress_ns, q.progress_ns)
    c = control_lock(q.link)
    while is_done(q):
        one = take_posted(q)
        moved += one.nbytes
        t = one.transfer
        store64(&t.progress_ns, q.progress_ns)
        count(&flow.received_nbytes if t.is_read else &flow.sent_nbytes, one.nbytes)
        go_on(c, t)
    measure(q, moved)
    control_unlock(c)
    return True


cdef void on_credit(Connection *c) noexcept nogil:
    cdef Header *h = &c.head
    cdef Qp *q = direct_of(c.link).qps[h.transfer]
    if q != NULL and q.epoch == h.tag and q.e != NULL:
        q.credit = max(q.credit, h.total + RECEIVES)
        q.confirmed = max(q.confirmed, h.total)
        kick_qps(c.link)
