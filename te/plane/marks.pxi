# SPDX-License-Identifier: Apache-2.0
# RDMA, the destination's side: lets a transfer be written, and counts what has landed. Each piece of
# a transfer is trailed by a mark on the same rail, (slot, generation, piece): a queue pair delivers
# in order, so a mark is never earlier than the data before it.

cdef int post_receives(Pair *q, u32 n) noexcept nogil:
    """Room for that many more marks; 0 or an errno."""
    cdef VRecvWr wrs[RECEIVES]
    cdef VSge sges[RECEIVES]
    cdef VRecvWr *bad = NULL
    cdef u32 i, slot
    cdef int errnum
    if n == 0:
        return 0
    for i in range(n):
        slot = (q.receives_turn + i) % RECEIVES
        wrs[i].wr_id = slot
        wrs[i].next = &wrs[i + 1] if i + 1 < n else NULL
        wrs[i].num_sge = 0
        wrs[i].sg_list = &sges[i]
        if q.e.is_iwarp:
            sges[i].addr = <u64>(q.e.scratch + 8 * slot)
            sges[i].length = 8
            sges[i].lkey = q.e.scratch_lkey
            wrs[i].num_sge = 1
    errnum = q.e.post_recv(q.e.qp, wrs, &bad)
    if errnum == 0:
        q.receives += n
        q.receives_turn += n
    return errnum


# -- letting in

cdef void forget(Link *link, Arriving *a) noexcept nogil:
    """Of a transfer over RDMA there is nothing more to come. Under the link's lock."""
    map_take(&link.arriving, a.id)
    ungrant(link, a)
    opening_drop(a.opening)
    free(a)


cdef void give_slot_back(Link *link, Arriving *a) noexcept nogil:
    link.slots[a.slot] = NULL
    link.slots_taken -= 1
    if a.refused:
        link.revoked -= 1
    free(a.bits)
    a.bits = NULL


cdef void ungrant(Link *link, Arriving *a) noexcept nogil:
    if a.bits == NULL:
        return
    give_slot_back(link, a)
    if a.opening != NULL:
        add32(&a.opening.granted, -1)


cdef bint may_begin(Rail *r, Arriving *a) noexcept nogil:
    """Inside the mark, so that a fence that closes the tag sees the grant, or prevents it."""
    cdef bint good = True
    enter(&r.worker.section, r.link, a.opening)
    if load32(&r.link.dropped):
        good = False
    elif a.opening != NULL:
        good = load32(&a.opening.is_open) != 0
        if good:
            add32(&a.opening.granted, 1)
    leave(&r.worker.section)
    return good


cdef bint on_ask(Rail *r, Header *h) noexcept nogil:
    """A source asks for a transfer to be written, or with no pieces, only for the table. Under the
    link's lock; False after a violation."""
    cdef Link *link = r.link
    cdef Arriving *a
    cdef char reason[TEXT_MAX]
    cdef u32 slot
    if h.count == 0:
        tell_table(r, RIGHT_READ)
        queue_grant(r, h.transfer, 0)
        return True
    if not may_ask(r, h):
        return False
    a = begin(r, h)
    if a == NULL:
        return False
    r.last_id = max(r.last_id, h.transfer)
    if not a.refused and link.slots_taken == BEGUN_MAX:
        refuse(r, a, b"the destination still waits for the ends of transfers that were fenced")
    elif not a.refused and not may_begin(r, a):
        snprintf(reason, TEXT_MAX, b"the tag 0x%llx was fenced", <unsigned long long>a.tag)
        refuse(r, a, reason)
    if a.refused:
        forget(link, a)
        return True
    slot = link.slots_turn
    while link.slots[slot] != NULL:  # One is free, as seen above.
        slot = (slot + 1) % BEGUN_MAX
    link.slots_turn = (slot + 1) % BEGUN_MAX
    link.slots_taken += 1
    link.generations[slot] += 1
    if link.generations[slot] == 0:  # Which is the probes'.
        link.generations[slot] = 1
    link.slots[slot] = a
    a.slot = slot
    a.pieces = h.count
    a.bits = <u64 *>need((h.count / 64 + 1) * sizeof(u64))
    tell_table(r, right_to_write(a.tag))
    queue_grant(r, a.id, slot << 24 | <u32>link.generations[slot] << 16)
    return True


cdef bint may_ask(Rail *r, Header *h) noexcept nogil:
    """Whether a source may ask for that; False after a violation. Each transfer is asked for once,
    and all that have a slot and were not fenced are unfinished at the source, which has BEGUN_MAX of
    those at most."""
    cdef char text[TEXT_MAX]
    if map_get(&r.link.arriving, h.transfer) != NULL:
        snprintf(text, TEXT_MAX, b"transfer %llu is asked for twice",
                 <unsigned long long>h.transfer)
    elif r.link.slots_taken - r.link.revoked == BEGUN_MAX:
        snprintf(text, TEXT_MAX, b"more than %d unfinished transfers are asked for", BEGUN_MAX)
    else:
        return True
    violate_locked(r, text)
    return False


cdef void queue_grant(Rail *r, u64 number, u64 mark) noexcept nogil:
    cdef Header h = header_of(ACK, number, mark, 0)
    h.status = GRANTED
    queue_frame(r, &h, NULL, 0)


cdef void tell_table(Rail *r, u32 right) noexcept nogil:
    """Sends the memory that is registered for peers, if it has changed since the last time or the
    source needs more keys: of regions that allow it something that it has asked for."""
    cdef Link *link = r.link
    cdef Snapshot *s
    cdef Far *all = NULL
    cdef Key *key
    cdef u32 i, k, rights, n = 0
    enter(&r.worker.section, r.link, NULL)
    s = <Snapshot *>load_pointer(&r.plane.regions.now)
    if s.version != link.table_told or right & ~link.table_rights:
        link.table_told = s.version
        link.table_rights |= right
        for i in range(s.count):
            n += s.regions[i].keys_n
        all = <Far *>need((n + 1) * sizeof(Far))
        n = 0
        for i in range(s.count):
            rights = s.regions[i].rights & REMOTE_RIGHTS
            for k in range(s.regions[i].keys_n if rights else 0):
                key = &s.regions[i].keys[k]
                all[n].start, all[n].end, all[n].rights = key.start, key.end, rights
                if rights & link.table_rights:
                    memcpy(all[n].keys, key.far, sizeof(key.far))
                n += 1
    leave(&r.worker.section)
    if all == NULL:
        return
    i = 0
    while True:
        k = min(n - i, <u32>TABLE_MAX)
        queue_table(r, all + i, k, TABLE_FIRST if i == 0 else 0)
        i += k
        if i == n:
            break
    free(all)


cdef void queue_table(Rail *r, Far *items, u32 n, uint16_t flags) noexcept nogil:
    cdef Header h = header_of(TABLE, 0, 0, 0)
    h.flags = flags
    h.count = n
    queue_frame(r, &h, items, n * sizeof(Far))


# -- counting

cdef void marks_arrived(Pair *q, VWc *wc, int n) noexcept nogil:
    cdef Rail *r = control_lock(q.link)
    cdef Header h
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
        good &= land_mark(r, ntohl(mark))
    if q.state == PAIR_UP and not broken:
        broken = post_receives(q, RECEIVES - q.receives) != 0
    if broken and q.state == PAIR_UP:
        queue_broken(r, q.index, q.epoch, NO_REASON)
        pair_drain(q)
    elif q.marks_seen - q.marks_told >= (1 if q.e.is_iwarp else RECEIVES / 4):
        q.marks_told = q.marks_seen
        h = header_of(CREDIT, q.index, q.epoch, q.marks_seen)
        queue_frame(r, &h, NULL, 0)
    if not good:
        violate_locked(r, b"a mark of a piece that its transfer does not have")
    control_unlock(r)


cdef bint land_mark(Rail *r, u32 mark) noexcept nogil:
    """One piece has landed; False after a violation. Under the link's lock."""
    cdef Link *link = r.link
    cdef u32 slot = mark >> 24, piece = mark & 0xFFFF
    cdef Arriving *a = <Arriving *>link.slots[slot]
    cdef u64 bit = <u64>1 << (piece & 63)
    store64(&link.progress_ns, now_ns())
    # None: a probe, or the last words of a transfer that was refused meanwhile.
    if a == NULL or link.generations[slot] != mark >> 16 & 0xFF:
        return True
    if piece >= a.pieces:
        return False
    if a.bits[piece >> 6] & bit:
        return True
    a.bits[piece >> 6] |= bit
    a.landed += 1
    if a.landed == a.pieces:
        add64(&r.plane.bytes_received, a.total)
        ungrant(link, a)
        a.arrived = a.total
        finish(r, a)
    else:
        end_if_stopped(r, a)
    return True


cdef void end_if_stopped(Rail *r, Arriving *a) noexcept nogil:
    """Nothing more of it can land once the marks of all pieces that were written have come."""
    if a.abandoned and a.landed >= a.announced:
        finish(r, a)


cdef bint on_stop(Rail *r, Header *h) noexcept nogil:
    """The source has given a transfer up and writes no more of it: `total` of its pieces are
    written. False after a violation."""
    cdef Arriving *a
    cdef bint good = True
    pthread_mutex_lock(&r.link.lock)
    a = <Arriving *>map_get(&r.link.arriving, h.transfer)
    if a != NULL:  # Else it has been refused, and the answer crossed this.
        good = a.tag == h.tag and not a.abandoned and h.total <= a.pieces
        if good:
            a.abandoned = True
            a.announced = h.total
            end_if_stopped(r, a)
        else:
            violate_locked(r, b"it gives a transfer up that it cannot have written so much of")
    pthread_mutex_unlock(&r.link.lock)
    return good


# -- frames

cdef bint on_direct(Rail *r, Header *h) noexcept nogil:
    """A frame about RDMA; False after a violation."""
    cdef bint good = True
    if h.kind == ASK:
        pthread_mutex_lock(&r.link.lock)
        good = on_ask(r, h)
        pthread_mutex_unlock(&r.link.lock)
    elif h.kind == RAIL_LOST:
        good = on_lost(r, h)
    elif h.kind == RAIL_CLOSED:
        on_closed(r, h)
    elif h.kind == TABLE:
        good = on_table(r, h)
    elif h.kind == RAIL_BROKEN:
        on_broken(r, h)
    else:
        on_credit(r, h)
    return good
