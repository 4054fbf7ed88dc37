# SPDX-License-Identifier: Apache-2.0
# RDMA, the source's side: pieces become work requests in kept arrays, handed over by one call. What
# `requeue`, `advance_transfer` and `next_piece` touch is under the link's lock.

# -- transfers over RDMA

cdef void put_ready(Link *link, Transfer *t) noexcept nogil:
    if t.is_ready:
        return
    t.is_ready = True
    t.next_ready = NULL
    if link.ready == NULL:
        link.ready = t
    else:
        link.ready_last.next_ready = t
    link.ready_last = t


cdef void take_ready(Link *link, Transfer *t) noexcept nogil:
    cdef Transfer *before = NULL
    cdef Transfer *one = link.ready
    if not t.is_ready:
        return
    while one != t:
        before = one
        one = one.next_ready
    if before == NULL:
        link.ready = t.next_ready
    else:
        before.next_ready = t.next_ready
    if link.ready_last == t:
        link.ready_last = before
    t.is_ready = False


cdef void requeue(Link *link, Transfer *t, u32 piece) noexcept nogil:
    """The piece waits for a rail, as the next one."""
    cdef Piece *p = &t.pieces[piece]
    p.next = t.heads[p.rail]
    t.heads[p.rail] = piece + 1
    t.waiting += 1
    t.closed = False
    if t.granted and not is_given_up(t):
        put_ready(link, t)


cdef void line_up(Transfer *t) noexcept nogil:
    """All pieces wait, in their order."""
    cdef u32 i = t.pieces_n
    while i:
        i -= 1
        t.pieces[i].next = t.heads[t.pieces[i].rail]
        t.heads[t.pieces[i].rail] = i + 1
    t.waiting = t.pieces_n


cdef void advance_transfer(Rail *r, Transfer *t) noexcept nogil:
    """After whatever may have ended it."""
    if t.answer == REFUSED and t.granted and not t.stopped:
        t.closed = False  # The destination waits to hear that nothing more is written.
    if is_given_up(t) and not t.closed:
        take_ready(r.link, t)
        t.stopped = True
        if t.in_flight:
            return
        if (t.answer == REFUSED and not t.granted) or t.kind == READ_DIRECT:
            t.closed = True
            if t.answer == NO_ANSWER:
                t.answer = ABANDONED
        elif t.begun:
            t.issued = t.pieces_n - t.waiting - t.unmarked
            give_up(r, t)
    elif t.kind == READ_DIRECT and t.granted and t.waiting == 0 and t.in_flight == 0:
        t.closed = True
        if t.answer == NO_ANSWER:
            t.answer = LANDED
    conclude(r.link, t)


cdef bint may_grant(Transfer *t) noexcept nogil:
    """Whether the destination was asked for it, and has not answered."""
    return t.kind >= WRITE_DIRECT and t.begun and not t.granted


cdef void grant(Rail *r, Transfer *t, u64 mark) noexcept nogil:
    """The destination lets it be written. Under the link's lock."""
    t.granted = True
    t.mark = <u32>mark
    store64(&r.link.progress_ns, now_ns())
    store64(&t.progress_ns, load64(&r.link.progress_ns))
    if not is_given_up(t):
        check_far(r.link, t)
    if not is_given_up(t):
        put_ready(r.link, t)
        kick_pairs(r.link)


cdef void cancel_direct(Transfer *t) noexcept nogil:
    cdef Rail *r = control_lock(t.link)
    if t.is_listed:
        if not t.begun:
            unlist(t.link, t, CANCELLED, NO_REASON)
        else:
            advance_transfer(r, t)
    control_unlock(r)


cdef void give_up_all(Link *link, int verdict) noexcept nogil:
    """Fails what is unfinished, with the destination's knowledge."""
    cdef Rail *r = control_lock(link)
    cdef Transfer *t = link.first
    cdef Transfer *after
    while t != NULL:
        after = t.after
        if t.kind >= WRITE_DIRECT and not is_given_up(t):
            t.verdict = verdict
            if t.begun:
                advance_transfer(r, t)
            else:
                unlist(link, t, FAILED, verdict)
        t = after
    control_unlock(r)


cdef void fill_ask(Rail *r, Transfer *t) noexcept nogil:
    """The rail's next frame: may this be written?"""
    cdef Header *h = <Header *>r.frame
    h[0] = header_of(ASK, t.id, t.tag, t.total)
    h.count = t.pieces_n if t.kind == WRITE_DIRECT else 0
    r.out[1].iov_base = r.frame
    r.out[1].iov_len = r.out_left = sizeof(Header)
    r.out_n = 2
    r.out_payload = r.out_tail = 0
    store_pointer(&t.rail, r)


# -- choosing

cdef inline bint is_rail_well(Link *link, u32 rail) noexcept nogil:
    cdef Pair *q = link.pairs[rail]
    return q != NULL and q.state == PAIR_UP and not q.suspect


cdef bint is_held_back(Pair *q) noexcept nogil:
    """It is suspect, and another rail is well: that one takes what is left."""
    cdef u32 i
    if q.suspect:
        for i in range(RAILS_MAX):
            if is_rail_well(q.link, i):
                return True
    return False


cdef bint has_waiting(Transfer *t, u32 rail, u32 least) noexcept nogil:
    cdef u32 one = t.heads[rail]
    while one and least > 1:
        one = t.pieces[one - 1].next
        least -= 1
    return one != 0


cdef bint has_rail(Link *link, Transfer *t) noexcept nogil:
    cdef u32 i
    for i in range(RAILS_MAX):
        if t.least[i] and is_rail_well(link, i):
            return True
    return False


cdef u32 choose_rail(Pair *q, Transfer *t) noexcept nogil:
    """Whose next piece the pair takes: its own; or one of a rail that is dead or suspect; or, when
    it has nothing at all to do, one of a rail that has so many that even one that is farther from
    the memory helps."""
    cdef u32 i, least = t.least[q.index]
    if t.heads[q.index]:
        return q.index
    if least == 0 and has_rail(q.link, t):
        return ANY_RAIL
    for i in range(RAILS_MAX):
        if t.heads[i] and not is_rail_well(q.link, i):
            return i
    if q.ring_n == 0:
        for i in range(RAILS_MAX):
            if has_waiting(t, i, max(least, <u32>2)):
                return i
    return ANY_RAIL


cdef bint next_piece(Pair *q) noexcept nogil:
    """Gives the pair its next piece, as `building`; False if there is none for it."""
    cdef Link *link = q.link
    cdef Rail *r = control_lock(link)
    cdef Transfer *t = link.ready
    cdef Transfer *next
    cdef Piece *p
    cdef Posted *one
    cdef u32 rail
    cdef bint found = False
    while t != NULL and not found and link.fences >= q.fences:
        next = t.next_ready
        if is_given_up(t):
            advance_transfer(r, t)
        else:
            rail = choose_rail(q, t)
            found = rail != ANY_RAIL
        if not found:
            t = next
    if found:
        q.building = t
        q.building_piece = t.heads[rail] - 1
        p = &t.pieces[q.building_piece]
        t.heads[rail] = p.next
        t.waiting -= 1
        t.in_flight += 1
        if t.waiting == 0:
            take_ready(link, t)
            t.closed = True
        q.at_block, q.at_offset, q.at_left = p.first, p.offset, p.nbytes
        one = &q.ring[(q.ring_first + q.ring_n) % POSTED_MAX]
        one.transfer, one.piece, one.nbytes = t, q.building_piece, p.nbytes
        one.sequence = <u64>-1  # not known before its last work request is built
        if q.ring_n == 0:
            q.busy_since = now_ns()
            q.busy_bytes = 0
        q.ring_n += 1
        q.ring_bytes += p.nbytes
        add64(&link.rail_flying[q.index], p.nbytes)
    control_unlock(r)
    return found


# -- building


cdef inline Key *near_key(Transfer *t, u64 address) noexcept nogil:
    """A transfer's own blocks lie in regions that it holds, and that may go with it."""
    cdef Region *region = t.held[regions_above(t.held, t.held_n, address) - 1]
    cdef u32 i
    for i in range(region.keys_n):
        if region.keys[i].start <= address < region.keys[i].end:
            return &region.keys[i]
    return NULL


cdef void build_mark(Pair *q, u32 mark) noexcept nogil:
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


cdef void refuse_here(Pair *q, u64 address, u64 nbytes) noexcept nogil:
    """The other side has such memory no longer."""
    cdef Transfer *t = q.building
    cdef Rail *r = control_lock(q.link)
    if t.text == NULL and t.verdict == 0:
        t.text = text_outside(q.link, t, address, nbytes)
        t.verdict = WAS_REFUSED
    t.unmarked += 1
    t.closed = False  # It cannot land as a whole any more.
    control_unlock(r)


cdef bint build(Pair *q) noexcept nogil:
    """Work requests for the piece under way, as many as the queue takes; whether the piece is
    complete. What has lost its place since it was granted is given up, its mark is not sent."""
    cdef Transfer *t = q.building
    # All of it in registers: through `q`, each request would load and store it again.
    cdef Block *b = t.blocks + q.at_block
    cdef VSendWr *w = q.wrs + q.built_n
    cdef Far *far = NULL
    cdef Key *near = NULL
    cdef u64 offset = q.at_offset, left = q.at_left, sequence = q.sequence
    cdef u64 n, near_at, far_at, room = q.e.send_depth - (q.sequence - q.completed)
    cdef u32 since_signal = q.since_signal
    cdef bint is_read = t.kind == READ_DIRECT, lost = False
    cdef u32 right = right_of(t), near_nic = q.near_nic, far_nic = q.far_nic, most = q.e.max_msg_bytes
    room = min(room, <u64>(q.e.send_depth - q.built_n))
    while left and room > 1:
        near_at = (b.dst if is_read else b.src) + offset
        far_at = (b.src if is_read else b.dst) + offset
        if far == NULL or far_at < far.start or far_at >= far.end:
            far = far_key(q.link, far_at)
            lost = far == NULL or not far.rights & right
            if lost:
                break
        if near == NULL or near_at < near.start or near_at >= near.end:
            near = near_key(t, near_at)
        n = min(min(b.nbytes - offset, left), min(far.end - far_at, near.end - near_at))
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
        w.remote_addr = far_at
        w.rkey = far.keys[far_nic]
        w.sg_list.addr = near_at
        w.sg_list.length = <u32>n
        w.sg_list.lkey = near.near[near_nic]
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
        refuse_here(q, far_at, b.nbytes - offset)
        build_mark(q, 0)  # A completion for what was built; the destination ignores it.
        return True
    if q.at_left or room == 0:
        return False
    if is_read:
        q.wrs[q.built_n - 1].send_flags = SEND_SIGNALED
        q.since_signal = 0
    else:
        build_mark(q, t.mark + q.building_piece)
    return True


cdef bint hand_over(Pair *q) noexcept nogil:
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
    pair_fail(q, POST_FAILED, errnum)
    return False


cdef void post_probe(Pair *q) noexcept nogil:
    build_mark(q, 0)
    hand_over(q)


cdef bint post_pieces(Pair *q) noexcept nogil:
    """Sends what the pair has room for."""
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
            last.mark = 0 if last.transfer.kind == READ_DIRECT else q.marks
            q.building = NULL
    return busy


# -- what comes back

cdef void writes_done(Pair *q, VWc *wc, int n) noexcept nogil:
    cdef int i
    for i in range(n):
        if wc[i].status != WC_SUCCESS:
            pair_fail(q, BAD_STATUS, wc[i].status)
            return
        q.completed = wc[i].wr_id
    if not q.e.is_iwarp:
        pair_moved(q, now_ns())


cdef inline bint is_done(Pair *q) noexcept nogil:
    """Whether the first piece under way has left this side for good."""
    cdef Posted *one = &q.ring[q.ring_first]
    return q.ring_n != 0 and one.sequence <= q.completed and one.mark <= q.confirmed


cdef void measure(Pair *q, u64 nbytes) noexcept nogil:
    """Notes what the pair moved while there always was something under way. Under the link's
    lock."""
    q.busy_bytes += nbytes
    if q.busy_bytes < MEASURED_BYTES:
        return
    q.link.rail_moved[q.index] += q.busy_bytes
    q.link.rail_busy_ns[q.index] += q.progress_ns - q.busy_since
    q.busy_since = q.progress_ns
    q.busy_bytes = 0


cdef bint pieces_done(Pair *q) noexcept nogil:
    """After completions or a word of the destination; whether anything was done by them."""
    cdef Rail *r
    cdef Transfer *t
    cdef Posted *one
    cdef u64 sent = 0
    if q.state == PAIR_PROBE and q.completed and q.confirmed:
        q.state = PAIR_UP
        pair_moved(q, now_ns())
        tell(q.plane, q.link, q.index, q.epoch, RAIL_UP, 0)
    if not is_done(q):
        return False
    pair_moved(q, now_ns())
    store64(&q.link.progress_ns, q.progress_ns)
    r = control_lock(q.link)
    while is_done(q):
        one = &q.ring[q.ring_first]
        q.ring_first = (q.ring_first + 1) % POSTED_MAX
        q.ring_n -= 1
        q.ring_bytes -= one.nbytes
        sent += one.nbytes
        t = one.transfer
        t.in_flight -= 1
        store64(&t.progress_ns, q.progress_ns)
        add64(&q.link.rail_bytes[q.index], one.nbytes)
        add64(&q.link.rail_flying[q.index], -<int64_t>one.nbytes)
        advance_transfer(r, t)
    measure(q, sent)
    control_unlock(r)
    add64(&q.plane.bytes_sent, sent)
    return True


cdef void on_credit(Rail *r, Header *h) noexcept nogil:
    cdef Pair *q = r.link.pairs[h.transfer]
    if q != NULL and q.epoch == h.tag and q.e != NULL:
        q.credit = max(q.credit, h.total + RECEIVES)
        q.confirmed = max(q.confirmed, h.total)
        kick_pairs(r.link)
