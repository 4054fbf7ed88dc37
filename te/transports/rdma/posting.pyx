# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport int64_t
from te.core.link cimport *
from te.core.posix cimport EAGAIN, ENOMEM, htonl
from te.core.plane cimport Plane
from te.core.regions cimport Key, Region, regions_above
from te.core.sync cimport *
from te.core.transfer cimport ALL_SENT, MORE, advance, is_given_up
from te.core.wire cimport *
from te.transports.rdma.control cimport *
from te.transports.rdma.outgoing cimport go_on, take_ready
from te.transports.rdma.qps cimport qp_fail, qp_moved
from te.transports.rdma.remote cimport remote_range, remote_right, text_outside
from te.transports.rdma.state cimport *
from te.verbs.abi cimport *

cdef enum:
    POSTED_BYTES = 8 << 20  # of a qp under way at once; the last piece may exceed it
    # Of a measurement of a rail's rate: what is over sooner tells of the way there and back instead.
    MEASURED_BYTES = 128 << 10
    SIGNAL_EVERY = 64  # work requests: returns send credits in the middle of long pieces


# -- choosing

cdef inline bint is_rail_well(Direct *d, u32 rail) noexcept nogil:
    cdef Qp *q = d.qps[rail]
    return q != NULL and q.state == QP_UP and not q.suspect


cdef bint is_held_back(Qp *q) noexcept nogil:
    """It is suspect, and another rail is well: that one takes what is left."""
    cdef u32 i
    if q.suspect:
        for i in range(RAILS_MAX):
            if is_rail_well(direct_of(q.link), i):
                return True
    return False


cdef bint has_waiting(Posting *p, u32 rail, u32 least) noexcept nogil:
    cdef u32 one = p.heads[rail]
    while one and least > 1:
        one = p.pieces[one - 1].next
        least -= 1
    return one != 0


cdef bint has_rail(Direct *d, Posting *p) noexcept nogil:
    cdef u32 i
    for i in range(RAILS_MAX):
        if p.least[i] and is_rail_well(d, i):
            return True
    return False


cdef u32 choose_rail(Qp *q, Posting *p) noexcept nogil:
    """Whose next piece the qp takes: its own; or one of a rail that is dead or suspect; or, when it
    has nothing at all to do, one of a rail that has so many that even one that is farther from the
    memory helps."""
    cdef Direct *d = direct_of(q.link)
    cdef u32 i, least = p.least[q.index]
    if p.heads[q.index]:
        return q.index
    if least == 0 and has_rail(d, p):
        return ANY_RAIL
    for i in range(RAILS_MAX):
        if p.heads[i] and not is_rail_well(d, i):
            return i
    if q.ring_n == 0:
        for i in range(RAILS_MAX):
            if has_waiting(p, i, max(least, <u32>2)):
                return i
    return ANY_RAIL


cdef void take_piece(Qp *q, Transfer *t, u32 rail) noexcept nogil:
    """As what the qp builds next. Under the link's lock."""
    cdef Posting *p = posting_of(t)
    cdef Posted *one = &q.ring[(q.ring_first + q.ring_n) % POSTED_MAX]
    cdef Piece *piece
    q.building = t
    q.building_piece = p.heads[rail] - 1
    piece = &p.pieces[q.building_piece]
    p.heads[rail] = piece.next
    p.waiting -= 1
    t.in_flight += 1
    if p.waiting == 0:
        take_ready(q.link, t)
        advance(t, ALL_SENT)
    q.at_block, q.at_offset, q.at_left = piece.first, piece.offset, piece.nbytes
    one.transfer, one.piece, one.nbytes = t, q.building_piece, piece.nbytes
    one.sequence = <u64>-1  # not known before its last work request is built
    if q.ring_n == 0:
        q.busy_since = now_ns()
        q.busy_bytes = 0
    q.ring_n += 1
    q.ring_bytes += piece.nbytes
    add64(&direct_of(q.link).rail_flying[q.index], piece.nbytes)


cdef bint next_piece(Qp *q) noexcept nogil:
    """Gives the qp its next piece, as `building`; False if there is none for it."""
    cdef Direct *d = direct_of(q.link)
    cdef Connection *c = control_lock(q.link)
    cdef Transfer *t = d.ready
    cdef Transfer *next
    cdef u32 rail = ANY_RAIL
    while t != NULL and d.fences >= q.fences:
        next = posting_of(t).next_ready
        if is_given_up(t):
            go_on(c, t)
        else:
            rail = choose_rail(q, posting_of(t))
            if rail != ANY_RAIL:
                take_piece(q, t, rail)
                break
        t = next
    control_unlock(c)
    return rail != ANY_RAIL


# -- building

cdef inline Key *local_key(Transfer *t, u64 address) noexcept nogil:
    """A transfer's own blocks lie in regions that it holds, and that may go with it."""
    cdef Region *region = t.held[regions_above(t.held, t.held_n, address) - 1]
    cdef u32 i
    for i in range(region.keys_n):
        if region.keys[i].start <= address < region.keys[i].end:
            return &region.keys[i]
    return NULL


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
    cdef Transfer *t = q.building
    cdef Connection *c = control_lock(q.link)
    if t.text == NULL and t.verdict == 0:
        t.text = text_outside(q.link, t, address, nbytes)
        t.verdict = WAS_REFUSED
    posting_of(t).unmarked += 1
    advance(t, MORE)  # It cannot land as a whole any more.
    control_unlock(c)


cdef bint build(Qp *q) noexcept nogil:
    """Work requests for the piece under way, as many as the queue takes; whether the piece is
    complete. What has lost its place since it was granted is given up, its mark is not sent."""
    cdef Transfer *t = q.building
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
            local = local_key(t, local_at)
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
        build_mark(q, posting_of(t).mark + q.building_piece)
    return True


cdef bint hand_over(Qp *q) noexcept nogil:
    """One call for the whole chain; False if the device did not take all of it."""
    cdef VSendWr *bad = NULL
    cdef int errnum
    if q.built_at == q.built_n:
        return True
    if q.ring_n <= 1 and q.completed == q.sequence - (q.built_n - q.built_at):
        q.progress_ns = now_ns()  # Nothing was under way: its time begins now.
    q.wrs[q.built_n - 1].next = NULL
    errnum = q.e.post_send(q.e.qp, &q.wrs[q.built_at], &bad)
    q.wrs[q.built_n - 1].next = &q.wrs[q.built_n]
    if errnum == 0:
        q.built_at = q.built_n = 0
        return True
    q.built_at = <u32>(bad - q.wrs)
    if (errnum == ENOMEM or errnum == EAGAIN) and (
        q.completed < q.wrs[q.built_at].wr_id - 1
    ):
        return False  # A completion makes room.
    qp_fail(q, POST_FAILED, errnum)
    return False


cdef void post_probe(Qp *q) noexcept nogil:
    build_mark(q, 0)
    hand_over(q)


cdef bint post_pieces(Qp *q) noexcept nogil:
    cdef bint busy = False
    cdef Posted *last
    while hand_over(q):
        if q.building == NULL:
            if q.ring_n == POSTED_MAX or (q.ring_n and q.ring_bytes >= POSTED_BYTES):
                return busy
            if q.marks >= q.credit or is_held_back(q) or not next_piece(q):
                return busy
        busy = True
        if q.sequence - q.completed + 1 >= q.e.send_depth:
            return busy
        if build(q):
            last = &q.ring[(q.ring_first + q.ring_n - 1) % POSTED_MAX]
            last.sequence = q.sequence
            last.mark = 0 if last.transfer.is_read else q.marks
            q.building = NULL
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
    d.rail_moved[q.index] += q.busy_bytes
    d.rail_busy_ns[q.index] += q.progress_ns - q.busy_since
    q.busy_since = q.progress_ns
    q.busy_bytes = 0


cdef bint pieces_done(Qp *q) noexcept nogil:
    cdef Direct *d = direct_of(q.link)
    cdef Connection *c
    cdef Transfer *t
    cdef Posted *one
    cdef Plane *plane = q.link.plane
    cdef u64 moved = 0
    if q.state == QP_PROBE and q.completed and q.confirmed:
        q.state = QP_UP
        qp_moved(q, now_ns())
        link_tell(q.link, q.index, q.epoch, RAIL_UP, 0)
    if not is_done(q):
        return False
    qp_moved(q, now_ns())
    store64(&q.link.progress_ns, q.progress_ns)
    c = control_lock(q.link)
    while is_done(q):
        one = &q.ring[q.ring_first]
        q.ring_first = (q.ring_first + 1) % POSTED_MAX
        q.ring_n -= 1
        q.ring_bytes -= one.nbytes
        moved += one.nbytes
        t = one.transfer
        t.in_flight -= 1
        store64(&t.progress_ns, q.progress_ns)
        add64(&plane.bytes_received if t.is_read else &plane.bytes_sent, one.nbytes)
        add64(&d.rail_bytes[q.index], one.nbytes)
        add64(&d.rail_flying[q.index], -<int64_t>one.nbytes)
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
