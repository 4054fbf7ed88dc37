# SPDX-License-Identifier: Apache-2.0
# Rails over RDMA: the life of a pair. A source's end that fails is destroyed, the destination is
# asked to drain and destroy its own, and says which pieces had landed; only then is the rest
# written again elsewhere. So no late packet of a dead pair lands after an arrival was counted.

cdef Rail *control_lock(Link *link) noexcept nogil:
    """The connection of a link over RDMA, with its lock and the link's."""
    cdef Rail *r = link.rails[0]
    pthread_mutex_lock(&r.lock)
    pthread_mutex_lock(&link.lock)
    return r


cdef void control_unlock(Rail *r) noexcept nogil:
    """Sends at once what was queued meanwhile."""
    pthread_mutex_unlock(&r.link.lock)
    if not r.gone and not load32(&r.link.dead) and (r.queued_n or r.out_left):
        rail_send(r, 1)
        set_interest(r)
    pthread_mutex_unlock(&r.lock)


cdef void kick_pairs(Link *link) noexcept nogil:
    """Has the pairs look for something to send. Any thread."""
    add32(&link.kicks, 1)
    wake(link.worker)


cdef void pair_free(Pair *q) noexcept nogil:
    cdef Link *link = q.link
    if q.e != NULL:
        q.e.release(q.e)
    free(q.wrs)
    free(q.sges)
    free(q.lost)
    free(q)
    link_drop(link)


cdef int pair_new(
    Link *link, Endpoint *e, u32 index, u32 epoch, u32 near_nic, u32 far_nic, u64 fences
) noexcept nogil:
    """Hands a connected queue pair to the link's worker; 0, or an errno (then it is not taken)."""
    cdef Worker *w = link.worker
    cdef Pair *q = <Pair *>need(sizeof(Pair))
    cdef u32 i
    cdef int errnum
    q.plane = link.plane
    q.link = link
    q.worker = w
    q.e = e
    q.index, q.epoch, q.near_nic, q.far_nic, q.fences = index, epoch, near_nic, far_nic, fences
    q.faults_seen = load32(&link.plane.nic_faults[near_nic])
    q.progress_ns = now_ns()
    q.credit = RECEIVES
    q.confirmed = 0 if e.is_iwarp else <u64>-1
    if link.is_incoming:
        q.state = PAIR_UP
        errnum = post_receives(q, RECEIVES)
        if errnum:
            free(q)
            return errnum
    else:
        q.state = PAIR_PROBE
        q.wrs = <VSendWr *>need(e.send_depth * sizeof(VSendWr))
        q.sges = <VSge *>need(e.send_depth * sizeof(VSge))
        for i in range(e.send_depth):
            q.wrs[i].next = &q.wrs[i + 1]
            q.wrs[i].sg_list = &q.sges[i]
    add32(&link.refs, 1)
    pthread_mutex_lock(&w.lock)
    q.next = w.adopted_pairs
    w.adopted_pairs = q
    pthread_mutex_unlock(&w.lock)
    wake(w)
    return 0


cdef void pairs_adopt(Worker *w) noexcept nogil:
    cdef Pair *q
    cdef Pair *next
    cdef Pair *old
    cdef epoll_event event
    pthread_mutex_lock(&w.lock)
    q = w.adopted_pairs
    w.adopted_pairs = NULL
    pthread_mutex_unlock(&w.lock)
    while q != NULL:
        next = q.next
        q.next = w.pairs
        w.pairs = q
        event.events = EPOLLIN
        event.data.ptr = <void *>(<u64>q | 1)
        if load32(&q.link.dead) or epoll_ctl(w.epoll, EPOLL_CTL_ADD, q.e.fd, &event) < 0:
            pair_end(q)
        else:
            old = q.link.pairs[q.index]
            if old != NULL and old.ring_n:  # It must be closed by the destination first.
                store32(&old.doomed, PEER_BROKE)
                store32(&old.kick, 1)
                tell(q.plane, q.link, q.index, q.epoch, PEER_BROKE, 0)
                pair_end(q)
                q = next
                continue
            if old != NULL:
                pair_end(old)
            q.link.pairs[q.index] = q
            # Only now: a fence that comes from here on finds it, and those before are told.
            if q.e.accept != NULL and q.e.accept(q.e, q.link.fences):
                pair_end(q)
                q = next
                continue
            if q.state == PAIR_PROBE:
                post_probe(q)
            store32(&q.kick, 1)
        q = next


cdef void pairs_sweep(Worker *w) noexcept nogil:
    """Frees pairs that have gone; behind everything that may still point to one."""
    cdef Pair *q = w.pairs
    cdef Pair *next
    w.pairs = NULL
    while q != NULL:
        next = q.next
        if q.state == PAIR_GONE:
            pair_free(q)
        else:
            q.next = w.pairs
            w.pairs = q
        q = next


cdef void pair_end(Pair *q) noexcept nogil:
    """Destroys it: nothing is read or written through it any more."""
    if q.e != NULL:
        q.e.release(q.e)
        q.e = NULL
    if q.state == PAIR_DRAIN:
        q.worker.draining -= 1
    q.state = PAIR_GONE
    if q.link.pairs[q.index] == q:
        q.link.pairs[q.index] = NULL


cdef void pairs_end(Link *link) noexcept nogil:
    """The link has died. By its worker, before its transfers are failed."""
    cdef u32 i
    for i in range(RAILS_MAX):
        if link.pairs[i] != NULL:
            pair_end(link.pairs[i])
    if link.is_breaking:
        link.is_breaking = False
        link.worker.draining -= 1
    store32(&link.has_ended, 1)
    futex_wake_all(&link.breaks_done)


cdef void queue_pieces(
    Rail *r, uint8_t kind, u64 rail, u64 epoch, PieceId *items, u32 n
) noexcept nogil:
    """A word about one rail, with a list of pieces."""
    cdef Header h = header_of(kind, rail, epoch, 0)
    h.count = n
    queue_frame(r, &h, items, n * sizeof(PieceId))


# -- the source's end

cdef void pair_fail(Pair *q, int code, int errnum) noexcept nogil:
    """The source's end has failed, or is to be given up."""
    cdef PieceId items[POSTED_MAX]
    cdef Posted *one
    cdef Rail *r
    cdef u32 i, n = 0
    if q.state != PAIR_UP and q.state != PAIR_PROBE:
        return
    q.e.release(q.e)
    q.e = NULL
    q.state = PAIR_LOST
    q.code = code
    q.errnum = errnum
    q.building = NULL
    for i in range(q.ring_n):
        one = &q.ring[(q.ring_first + i) % POSTED_MAX]
        if one.transfer.kind == WRITE_DIRECT:
            items[n].transfer = one.transfer.id
            items[n].piece = one.piece
            n += 1
    r = control_lock(q.link)
    queue_pieces(r, RAIL_LOST, q.index, q.epoch, items, n)
    control_unlock(r)


cdef bint is_listed_in(PieceId *items, u32 n, u64 number, u64 piece) noexcept nogil:
    cdef u32 i
    for i in range(n):
        if items[i].transfer == number and items[i].piece == piece:
            return True
    return False


cdef void on_closed(Rail *r, Header *h) noexcept nogil:
    """The destination has closed its end of a lost rail: `r.body` says what had landed through it.
    The rest is written again."""
    cdef Link *link = r.link
    cdef Pair *q = link.pairs[h.transfer]
    cdef Posted *one
    cdef Transfer *t
    if q == NULL or q.epoch != h.tag or q.state != PAIR_LOST:
        return
    pthread_mutex_lock(&link.lock)
    while q.ring_n:
        one = &q.ring[q.ring_first]
        q.ring_first = (q.ring_first + 1) % POSTED_MAX
        q.ring_n -= 1
        t = one.transfer
        t.in_flight -= 1
        add64(&link.rail_flying[q.index], -<int64_t>one.nbytes)
        if not (
            t.kind == WRITE_DIRECT
            and is_listed_in(<PieceId *>r.body, h.count, t.id, one.piece)
        ):
            requeue(link, t, one.piece)
        advance_transfer(r, t)
    pthread_mutex_unlock(&link.lock)
    tell(q.plane, link, q.index, q.epoch, q.code, q.errnum)
    pair_end(q)
    kick_pairs(link)


cdef void on_broken(Rail *r, Header *h) noexcept nogil:
    """The destination has broken one rail, or by a fence all it had until then."""
    cdef Link *link = r.link
    cdef Pair *q
    cdef u32 i
    pthread_mutex_lock(&link.lock)
    link.fences = max(link.fences, h.total)
    pthread_mutex_unlock(&link.lock)
    for i in range(RAILS_MAX):
        q = link.pairs[i]
        if q == NULL or q.e == NULL:
            continue
        if (h.transfer == ANY_RAIL and q.fences < h.total) or (
            h.transfer == i and h.tag == q.epoch
        ):
            # The rail's lock is held here: `pair_fail` takes it.
            store32(&q.doomed, <u32>h.status << 8 | PEER_BROKE)
            store32(&q.kick, 1)
    store32(&link.worker.kicked, 1)
    kick_pairs(link)


# -- the destination's end

cdef void pair_drain(Pair *q) noexcept nogil:
    """Puts the destination's end into the error state: nothing more lands once all of its receives
    have come back."""
    if q.state != PAIR_UP:
        return
    q.e.to_error(q.e)
    q.state = PAIR_DRAIN
    q.drain_until = now_ns() + DRAIN_NS
    q.worker.draining += 1
    store32(&q.kick, 1)
    store32(&q.worker.kicked, 1)


cdef void pair_drained(Pair *q) noexcept nogil:
    cdef Rail *r
    q.worker.draining -= 1
    q.e.release(q.e)
    q.e = NULL
    q.state = PAIR_LOST
    if q.lost_asked:
        r = control_lock(q.link)
        answer_lost(r, q.index, q.epoch, q.lost, q.lost_n)
        control_unlock(r)
        pair_end(q)


cdef void answer_lost(Rail *r, u64 rail, u64 epoch, PieceId *items, u32 n) noexcept nogil:
    """Says which of the pieces have landed. Under the link's lock."""
    cdef PieceId landed[POSTED_MAX]
    cdef Arriving *a
    cdef u32 i, k = 0
    for i in range(n):
        # Checked by `has_asked`: the number of a transfer is never used again, so it has ended
        # since, or is still the same one.
        a = <Arriving *>map_get(&r.link.arriving, items[i].transfer)
        if a == NULL or a.bits[items[i].piece >> 6] >> (items[i].piece & 63) & 1:
            landed[k] = items[i]
            k += 1
    tell_table(r, 0)
    queue_pieces(r, RAIL_CLOSED, rail, epoch, landed, k)


cdef bint has_asked(Rail *r, PieceId *item) noexcept nogil:
    """Whether the source can have posted such a piece: of a transfer that it has asked for, and
    that has so many pieces if it is unfinished. Under the link's lock."""
    cdef Arriving *a = <Arriving *>map_get(&r.link.arriving, item.transfer)
    return item.transfer <= r.last_id and item.piece < (PIECES_MAX if a == NULL else a.pieces)


cdef bint on_lost(Rail *r, Header *h) noexcept nogil:
    """The source has given up its end of a rail."""
    cdef Link *link = r.link
    cdef PieceId *items = <PieceId *>r.body
    cdef Pair *q = link.pairs[h.transfer]
    cdef u32 i
    cdef bint good = q == NULL or q.epoch != h.tag or not q.lost_asked
    pthread_mutex_lock(&link.lock)
    for i in range(h.count):
        good &= has_asked(r, &items[i])
    if good and q != NULL and q.epoch == h.tag and (q.state == PAIR_UP or q.state == PAIR_DRAIN):
        q.lost = <PieceId *>need((h.count + 1) * sizeof(PieceId))
        memcpy(q.lost, items, h.count * sizeof(PieceId))
        q.lost_n = h.count
        q.lost_asked = True
        pair_drain(q)
    elif good:
        answer_lost(r, h.transfer, h.tag, items, h.count)
        if q != NULL and q.epoch == h.tag:
            pair_end(q)
    pthread_mutex_unlock(&link.lock)
    if not good:
        violate(r, b"it lost a rail or a piece that it cannot have")
    return good


cdef inline bint has_to_break(Link *link) noexcept nogil:
    return load32(&link.breaks_asked) != load32(&link.breaks_done)


cdef void break_link(Link *link) noexcept nogil:
    """For fences, until all that were asked for are done. A source is asked to stop what was granted
    under closed tags, and the rails go on; if it has not for too long, or was fenced as a whole,
    the rails are drained. A fence that comes in the middle has all of it looked at again."""
    cdef u32 asked = load32(&link.breaks_asked)
    if load32(&link.has_ended):
        return
    if not link.is_breaking:
        link.is_breaking = True
        link.worker.draining += 1
    if asked != link.breaks_begun:
        link.breaks_begun = asked
        link.must_drain = not link.is_incoming or load32(&link.dropped)
        revoke_closed(link)
    if link.is_draining and not are_drained(link):
        return
    if link.must_drain or is_overdue(link):
        link.must_drain = False
        drain_all(link)
        if not are_drained(link):
            return
    if link.revoked == 0:
        link.is_breaking = False
        link.worker.draining -= 1
        store32(&link.breaks_done, link.breaks_begun)
        futex_wake_all(&link.breaks_done)


cdef void revoke_closed(Link *link) noexcept nogil:
    """Refuses what was granted under tags that are closed by now."""
    cdef Rail *r = control_lock(link)
    cdef Arriving *a
    cdef u64 i, now = now_ns()
    cdef char reason[TEXT_MAX]
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a == NULL or a.bits == NULL or a.refused or a.opening == NULL:
            continue
        if not load32(&a.opening.is_open):
            snprintf(reason, TEXT_MAX, b"the tag 0x%llx was fenced", <unsigned long long>a.tag)
            refuse(r, a, reason)
            a.revoked_ns = now
            link.revoked += 1
    control_unlock(r)


cdef bint is_overdue(Link *link) noexcept nogil:
    """Whether the source has not stopped what was revoked for as long as makes a rail suspect; or
    cannot say so, without a rail."""
    cdef Arriving *a
    cdef u64 i, now = now_ns()
    cdef bint overdue = False, has_rail = False
    if link.revoked == 0:
        return False
    for i in range(RAILS_MAX):
        has_rail |= link.pairs[i] != NULL and link.pairs[i].state == PAIR_UP
    pthread_mutex_lock(&link.lock)
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a != NULL and a.refused and now > a.revoked_ns + link.plane.suspect_ns:
            overdue = True
    pthread_mutex_unlock(&link.lock)
    return overdue or not has_rail


cdef void drain_all(Link *link) noexcept nogil:
    """Nothing lands any more once every rail of now is drained; the source is told to make new
    ones."""
    cdef Rail *r
    cdef Arriving *a
    cdef u64 i = 0
    cdef u32 k
    # In this order: whoever adds a pair reads the number behind it.
    pthread_mutex_lock(&link.lock)
    link.fences += link.is_incoming
    pthread_mutex_unlock(&link.lock)
    pairs_adopt(link.worker)
    for k in range(RAILS_MAX):
        if link.pairs[k] != NULL and link.is_incoming:
            pair_drain(link.pairs[k])
        elif link.pairs[k] != NULL:
            pair_fail(link.pairs[k], FENCED, 0)
    r = control_lock(link)
    while i < link.arriving.size:
        a = <Arriving *>link.arriving.values[i]
        if a != NULL and a.refused and a.bits != NULL:
            forget_when_drained(link, a)
            i = 0  # What comes behind may have moved up.
            continue
        i += 1
    if link.is_incoming:
        queue_broken(r, ANY_RAIL, 0, NO_REASON)
    control_unlock(r)
    link.is_draining = True


cdef bint are_drained(Link *link) noexcept nogil:
    cdef u32 k
    for k in range(RAILS_MAX):
        if link.pairs[k] != NULL and link.pairs[k].state == PAIR_DRAIN:
            return False
    link.is_draining = False
    pthread_mutex_lock(&link.lock)
    forget_drained(link)
    pthread_mutex_unlock(&link.lock)
    return True


cdef void queue_broken(Rail *r, u64 rail, u64 epoch, u32 why) noexcept nogil:
    cdef Header h = header_of(RAIL_BROKEN, rail, epoch, r.link.fences)
    h.status = <uint8_t>why
    queue_frame(r, &h, NULL, 0)


# -- the worker's turn

cdef bint pair_poll(Pair *q) noexcept nogil:
    """Takes completions; whether there were any."""
    cdef VWc wc[POLLED_MAX]
    cdef int n = q.e.poll_cq(q.e.cq, POLLED_MAX, wc)
    if n < 0:
        if q.link.is_incoming:
            pair_drain(q)
        else:
            pair_fail(q, POLL_FAILED, -n)
        return True
    if n and q.link.is_incoming:
        marks_arrived(q, wc, n)
    elif n:
        writes_done(q, wc, n)
    return n > 0


cdef void pair_doomed(Pair *q) noexcept nogil:
    """What its other completions do not tell: the peer or its device says that it is broken."""
    cdef Rail *r
    cdef u32 code = load32(&q.doomed), fault = load32(&q.e.fault)
    if not code and fault:
        code = fault << 8 | PAIR_EVENT
    if not code or q.state == PAIR_DRAIN:
        return
    if not q.link.is_incoming:
        pair_fail(q, code & 0xFF, code >> 8)
        return
    r = control_lock(q.link)
    queue_broken(r, q.index, q.epoch, code & 0xFF)
    pair_drain(q)
    control_unlock(r)


cdef bint pair_turn(Pair *q) noexcept nogil:
    """Whatever the pair can do now; whether something moved."""
    cdef bint busy = False
    cdef int rounds = 0
    if q.e == NULL:
        return False
    while rounds < 8 and q.e != NULL and pair_poll(q):
        busy = True
        rounds += 1
    if rounds == 8:
        store32(&q.kick, 1)
        store32(&q.worker.kicked, 1)
    if q.e == NULL:
        return busy
    if not q.link.is_incoming:
        busy |= pieces_done(q)
    pair_doomed(q)
    if q.state == PAIR_DRAIN:
        if q.receives == 0 or now_ns() > q.drain_until:
            pair_drained(q)
    elif q.state == PAIR_UP and not q.link.is_incoming:
        busy |= post_pieces(q)
    return busy


cdef bint pairs_turn(Worker *w) noexcept nogil:
    """Pairs that were kicked, and those whose completions no event will tell of."""
    cdef Pair *q = w.pairs
    cdef u32 kicks, faults
    cdef bint busy = False
    while q != NULL:
        faults = load32(&w.plane.nic_faults[q.near_nic])
        if faults != q.faults_seen:
            q.faults_seen = faults
            store32(&q.doomed, load32(&w.plane.nic_reasons[q.near_nic]))
            store32(&q.kick, 1)
        kicks = load32(&q.link.kicks) + load32(&w.plane.kicks)
        if kicks != q.kicks_seen:
            q.kicks_seen = kicks
            store32(&q.kick, 1)
        if swap32(&q.kick, 0) or not q.armed or q.state == PAIR_DRAIN:
            busy |= pair_turn(q)
        q = q.next
    return busy


cdef void breaks_turn(Worker *w) noexcept nogil:
    cdef Rail *r = w.rails
    while r != NULL:
        if has_to_break(r.link) and not r.gone:
            break_link(r.link)
        r = r.next


cdef bint pairs_arm(Worker *w) noexcept nogil:
    """Before sleeping: asks for events, then looks once more; whether there was something."""
    cdef Pair *q = w.pairs
    cdef bint busy = False
    while q != NULL:
        if not q.armed and q.e != NULL:
            q.armed = True
            if q.e.req_notify_cq(q.e.cq, 0) == 0:
                busy |= pair_turn(q)
        q = q.next
    return busy


cdef void pair_event(Pair *q) noexcept nogil:
    """Its channel is readable."""
    if q.e != NULL:
        q.e.take_events(q.e)
        q.armed = False


cdef void pair_moved(Pair *q, u64 now) noexcept nogil:
    """Something came back."""
    q.progress_ns = now
    q.link.has_outlasted = False
    if q.suspect:
        q.suspect = False
        tell(q.plane, q.link, q.index, q.epoch, RAIL_MOVED, 0)


cdef void pairs_check(Worker *w, u64 now) noexcept nogil:
    """Suspects rails on which nothing came back for a while, and gives them up after too long: a
    device may try for ever. As with stalls, only silence after one more look counts."""
    cdef Pair *q = w.pairs
    cdef bint late, overdue
    while q != NULL:
        if q.e != NULL and not q.link.is_incoming:
            late = q.sequence != q.completed or q.marks > q.confirmed
            overdue = late and now > q.progress_ns + q.plane.rail_ns
            late = late and now > q.progress_ns + q.plane.suspect_ns
            if overdue and q.overdue:
                pair_fail(q, NO_COMPLETION, 0)
            elif late and q.late and q.state == PAIR_UP and not q.suspect:
                q.suspect = True
                tell(q.plane, q.link, q.index, q.epoch, RAIL_SUSPECT, 0)
                kick_pairs(q.link)
            q.late = late
            q.overdue = overdue
        q = q.next
