# SPDX-License-Identifier: Apache-2.0
# The source's side: transfers in order of submission, cut into frames that any rail may take.
# `fill`, `take`, `frame_sent`, `answered` and everything that settles run under the link's lock.

# -- descriptors

cdef enum:
    SPARE_LEAST = 128 << 10  # bytes: above that malloc asks the kernel, for pages to clear
    SPARE_NBYTES = 1 << 20


cdef Block *blocks_new(Link *link, u64 n) noexcept nogil:
    """Room for n blocks, NULL without memory. A link keeps one room of some ten thousand blocks
    for the next transfer: new pages cost 11 ns a block, which is as much as all else of it."""
    cdef Block *blocks
    if not SPARE_LEAST < n * sizeof(Block) <= SPARE_NBYTES:
        return <Block *>malloc((n + 1) * sizeof(Block))
    blocks = <Block *>swap_pointer(&link.spare, NULL)
    return <Block *>malloc(SPARE_NBYTES) if blocks == NULL else blocks


cdef void blocks_free(Link *link, Block *blocks) noexcept nogil:
    """Of `blocks_new`, or malloc's own."""
    cdef size_t room = 0 if blocks == NULL else malloc_usable_size(blocks)
    if SPARE_NBYTES <= room < 2 * SPARE_NBYTES:
        blocks = <Block *>swap_pointer(&link.spare, blocks)
    free(blocks)


# -- the life of a transfer

cdef Transfer *transfer_new(
    Link *link, uint8_t kind, u64 tag, Block *blocks, u64 n, u64 total, Region **held, u32 held_n
) noexcept nogil:
    """Takes over `blocks` and `held`; has one reference, the caller's."""
    cdef Transfer *t = <Transfer *>need(sizeof(Transfer))
    add32(&link.refs, 1)
    t.link = link
    t.kind = kind
    t.tag = tag
    t.blocks = blocks
    t.n = n
    t.total = total
    t.held = held
    t.held_n = held_n
    t.answer = NO_ANSWER
    t.refs = 1
    t.submitted_ns = now_ns()
    return t


cdef void transfer_drop(Transfer *t) noexcept nogil:
    if add32(&t.refs, -1) == 0:
        free(t.text)
        opening_drop(t.opening)
        link_drop(t.link)
        free(t)


cdef void settle(Transfer *t, u32 status, int code) noexcept nogil:
    """The outcome, exactly once: only when nothing here reads the source memory again."""
    cdef Plane *p = t.link.plane
    cdef u32 i
    for i in range(t.held_n):
        add32(&t.held[i].readers, -1)
        region_drop(t.held[i])
    free(t.held)
    blocks_free(t.link, t.blocks)
    free(t.pieces)
    t.held = NULL
    t.held_n = 0
    t.blocks = NULL
    t.pieces = NULL
    t.code = code
    t.settled_ns = now_ns()
    if t.opening != NULL:
        store32(&t.opening.is_open, 0)
    if not t.flags & FLAG_REPLY:
        add64(&p.outcomes[status], 1)
    store32(&t.status, status)
    if load32(&t.waiters):
        futex_wake_all(&t.status)
    if swap32(&t.notify, 2) == 1:
        add32(&t.refs, 1)
        pthread_mutex_lock(&p.notices_lock)
        t.next_notice = p.notices
        p.notices = t
        pthread_mutex_unlock(&p.notices_lock)
        eventfd_write(p.notices_eventfd, 1)


cdef void unlist(Link *link, Transfer *t, u32 status, int code) noexcept nogil:
    """Ends a listed transfer and drops the list's reference. The one behind it has its whole time
    from now on."""
    cdef Transfer *after = t.after
    if t.before == NULL:
        link.first = t.after
    else:
        t.before.after = t.after
    if t.after == NULL:
        link.last = t.before
    else:
        t.after.before = t.before
    if link.issue == t:
        link.issue = t.after
    map_take(&link.by_id, t.id)
    t.is_listed = False
    if t.begun:
        link.begun -= 1
    if t.is_ready:
        take_ready(link, t)
    if t.flags & FLAG_REPLY:
        link.reads_served -= 1
    else:
        link.unfinished -= 1
    if t.kind == READ:
        link.reads_asked -= <u32>t.outstanding
    settle(t, status, code)
    if after != NULL:
        store64(&after.progress_ns, t.settled_ns)
    transfer_drop(t)


cdef void enlist(Link *link, Transfer *t) noexcept nogil:
    """Adds a transfer at the end, with a reference of the list's."""
    add32(&t.refs, 1)
    link.next_id += 1
    t.id = link.next_id
    t.before = link.last
    if link.last == NULL:
        link.first = t
    else:
        link.last.after = t
    link.last = t
    if link.issue == NULL:
        link.issue = t
    map_put(&link.by_id, t.id, t)
    t.is_listed = True
    if t.flags & FLAG_REPLY:
        link.reads_served += 1
    else:
        link.unfinished += 1
    store64(&t.progress_ns, t.submitted_ns)
    # Small transfers of several segments are spread too, but not below 256 KiB a segment.
    cdef u64 share = t.total / (4 * link.rails_n) if link.rails_n else t.total
    t.segment_bytes = min(max(share, <u64>(256 << 10)), link.plane.segment_bytes)


cdef void conclude(Link *link, Transfer *t) noexcept nogil:
    """Settles a transfer that has its answer, once no rail is sending a frame of it."""
    if not t.closed or t.in_flight:
        return
    if t.answer == LANDED and t.kind != READ:
        unlist(link, t, DONE, NO_REASON)
    elif t.answer == REFUSED:
        unlist(link, t, FAILED, WAS_REFUSED)
    elif t.answer == ABANDONED:
        if t.fault:
            unlist(link, t, FAILED, SOURCE_FAULT)
        elif t.verdict:
            unlist(link, t, FAILED, t.verdict)
        elif t.kind != READ or t.is_quiet:  # `cancel_read` sees first that nothing lands.
            unlist(link, t, CANCELLED, NO_REASON)
    elif t.kind == READ and t.returned == t.total and t.issued == t.total:
        unlist(link, t, DONE, NO_REASON)


cdef inline bint is_given_up(Transfer *t) noexcept nogil:
    return load32(&t.cancel) or t.fault or t.verdict or t.answer == REFUSED


cdef void give_up(Rail *r, Transfer *t) noexcept nogil:
    """Issues no more of a transfer that has begun: the destination is told how much it got.

    A read has nothing to tell: its opening is closed, so replies under way are refused here.
    """
    cdef Header h
    if t.kind == READ:
        if t.answer == NO_ANSWER:
            t.answer = ABANDONED
    else:
        h = header_of(ABANDON, t.id, t.tag, t.issued)
        h.flags = t.flags
        queue_frame(r, &h, NULL, 0)
    t.closed = True


# -- frames

cdef void fill(Rail *r, Transfer *t) noexcept nogil:
    """Makes the rail's next frame of the transfer: header and descriptors, and for a SEGMENT the
    memory they describe. Blocks are taken from a cursor, so that a transfer of any size needs no
    table of segments."""
    cdef Header *h = <Header *>r.frame
    cdef Landing *landings = <Landing *>(r.frame + sizeof(Header))
    cdef Block *descriptors = <Block *>(r.frame + sizeof(Header))
    cdef u64 left = t.segment_bytes, take
    cdef u32 k = 0, most = r.plane.segment_blocks
    cdef Block b
    cdef bint is_segment = t.kind == SEGMENT
    while t.index < t.n and k < most and left:
        b = t.blocks[t.index]
        take = min(b.nbytes - t.offset, left)
        b.src += t.offset
        b.dst += t.offset
        if is_segment:
            r.out[2 + k].iov_base = <void *>b.src
            r.out[2 + k].iov_len = take
            landings[k].dst = b.dst
            landings[k].nbytes = take
        else:
            descriptors[k].src = b.src
            descriptors[k].dst = b.dst
            descriptors[k].nbytes = take
        k += 1
        left -= take
        t.offset += take
        if t.offset == t.blocks[t.index].nbytes:
            t.index += 1
            t.offset = 0
    h[0] = header_of(t.kind if t.n else <uint8_t>END, t.id, t.tag, t.total)
    h.flags = t.flags
    h.count = k
    h.nbytes = t.segment_bytes - left if t.n else 0
    t.issued += h.nbytes
    r.out[1].iov_base = r.frame
    r.out[1].iov_len = sizeof(Header) + k * (sizeof(Landing) if is_segment else sizeof(Block))
    r.out_n = 2
    r.out_payload = r.out_tail = 0
    if is_segment and t.n:
        r.trailer = 0
        r.out[2 + k].iov_base = &r.trailer
        r.out[2 + k].iov_len = TRAILER_BYTES
        r.out_n = 3 + k
        r.out_payload = h.nbytes
        r.out_tail = h.nbytes + TRAILER_BYTES
    r.out_left = r.out[1].iov_len + r.out_tail


cdef bint take(Rail *r) noexcept nogil:
    """Gives the rail the next frame of the link's transfers, if there is one it may send now."""
    cdef Link *link = r.link
    cdef Transfer *t
    cdef bint taken = False
    pthread_mutex_lock(&link.lock)
    while not taken and link.issue != NULL:
        t = link.issue
        if is_given_up(t):
            if not t.begun:
                unlist(link, t, CANCELLED, NO_REASON)
                continue
            link.issue = t.after
            t.stopped = True
            if t.in_flight == 0:
                give_up(r, t)
                conclude(link, t)
            continue
        if not t.begun:
            if link.begun == BEGUN_MAX:
                break
            t.begun = True
            link.begun += 1
        if t.kind >= WRITE_DIRECT:
            fill_ask(r, t)
            link.issue = t.after
            taken = True
            continue
        if t.kind == PULL and (
            t.issued >= t.confirmed + PULLS_AHEAD * link.rails_n * t.segment_bytes
        ):
            break
        if t.kind == READ:
            if link.reads_asked == READS_ASKED_MAX:
                break
            link.reads_asked += 1
            t.outstanding += 1
        fill(r, t)
        if t.index == t.n:
            t.closed = True
            link.issue = t.after
        t.in_flight += 1
        store_pointer(&t.rail, r)
        add32(&t.refs, 1)
        r.out_transfer = t
        taken = True
    pthread_mutex_unlock(&link.lock)
    return taken


cdef void frame_sent(Rail *r) noexcept nogil:
    """The rail's frame is sent, or never will be because the rail is gone."""
    cdef Link *link = r.link
    cdef Transfer *t = r.out_transfer
    if t == NULL:
        return
    r.out_transfer = NULL
    pthread_mutex_lock(&link.lock)
    t.in_flight -= 1
    if t.is_listed and t.in_flight == 0:
        if not t.closed and t.stopped:
            give_up(r, t)
        conclude(link, t)
    pthread_mutex_unlock(&link.lock)
    transfer_drop(t)


# -- what comes back

cdef bint answered(Rail *r, Header *h, uint8_t *reason) noexcept nogil:
    """An acknowledgement; False when nothing waits for it."""
    cdef Link *link = r.link
    cdef bint known = True
    pthread_mutex_lock(&link.lock)
    cdef Transfer *t = <Transfer *>map_get(&link.by_id, h.transfer)
    store64(&link.progress_ns, now_ns())
    r.is_bulk = h.status == PROGRESS
    if h.status == PROGRESS:
        # One that is late, of a transfer that has ended, says nothing.
        known = t == NULL or (t.kind == PULL and 0 < h.nbytes <= t.issued - t.confirmed)
        if known and t != NULL:
            t.confirmed += h.nbytes
            store64(&t.progress_ns, load64(&link.progress_ns))
    elif h.status == GRANTED:
        # One that was given up is granted late.
        known = h.transfer <= link.next_id if t == NULL else may_grant(t)
        if known and t != NULL:
            grant(r, t, h.tag)
    elif t == NULL or t.answer != NO_ANSWER:
        # A refusal can be late: the pieces of a read are refused one by one.
        known = h.status == REFUSED
    elif h.status == REFUSED:
        known = t.begun
        if known:
            t.text = <char *>need(h.count + 1)
            memcpy(t.text, reason, h.count)
            t.answer = REFUSED
            if t.kind == READ:
                store32(&t.opening.is_open, 0)
    elif t.kind == READ:
        known = False
    elif h.status == LANDED:
        known = t.closed and (t.issued == t.total or t.kind == WRITE_DIRECT) and not t.stopped
        if known:
            t.answer = LANDED
    else:
        known = t.closed and (t.stopped or t.fault != 0 or t.verdict != 0)
        if known:
            t.answer = ABANDONED
    if known and t != NULL:
        if t.kind >= WRITE_DIRECT:
            advance_transfer(r, t)
        else:
            conclude(link, t)
        if link.issue != NULL:
            store32(&r.kick, 1)  # There may be room for one more that has to begin.
    pthread_mutex_unlock(&link.lock)
    return known


cdef void stop(Transfer *t) noexcept nogil:
    """Ends a listed transfer that was cancelled: at once if nothing of it was issued. Under the
    link's lock."""
    cdef Link *link = t.link
    cdef u32 i
    if not t.begun:
        unlist(link, t, CANCELLED, NO_REASON)
    elif t.kind == READ and t.closed:
        if t.answer == NO_ANSWER:
            t.answer = ABANDONED
        conclude(link, t)
    else:
        for i in range(link.rails_n):
            kick(link.rails[i])


cdef void cancel(Transfer *t) noexcept nogil:
    """Asks that a transfer stop."""
    if load32(&t.status) or swap32(&t.cancel, 1):
        return
    if t.kind >= WRITE_DIRECT:
        cancel_direct(t)
        return
    pthread_mutex_lock(&t.link.lock)
    if t.is_listed:
        stop(t)
    pthread_mutex_unlock(&t.link.lock)


# -- links

cdef void unmap(Plane *p, Mapping *m) noexcept nogil:
    munmap(m.near, m.mapped)
    add64(&p.mapped_bytes, -m.mapped)
    free(m)


cdef void unmap_all(Plane *p, Mapping *first) noexcept nogil:
    cdef Mapping *next
    while first != NULL:
        next = first.next
        unmap(p, first)
        first = next


cdef void link_drop(Link *link) noexcept nogil:
    cdef u32 i
    if add32(&link.refs, -1):
        return
    for i in range(link.rails_n):
        rail_free(link.rails[i])
    unmap_all(link.plane, link.mappings)
    unmap_all(link.plane, link.unlinked)
    if link.pidfd >= 0:
        close(link.pidfd)
    map_free(&link.by_id)
    map_free(&link.arriving)
    free(link.table)
    free(link.spare)
    pthread_mutex_destroy(&link.lock)
    free(link)


cdef void link_die_locked(Link *link, int code, int errnum, const char *text) noexcept nogil:
    """Has all rails of the link go; each rail's worker closes its own. The first reason counts."""
    cdef u32 i
    if load32(&link.dead):
        return
    link.code = code
    link.errnum = errnum
    if text != NULL:
        snprintf(link.text, TEXT_MAX, b"%s", text)
    store32(&link.dead, 1)
    for i in range(link.rails_n):
        kick(link.rails[i])


cdef void link_die(Link *link, int code, int errnum, const char *text) noexcept nogil:
    pthread_mutex_lock(&link.lock)
    link_die_locked(link, code, errnum, text)
    pthread_mutex_unlock(&link.lock)


cdef void link_ended(Link *link) noexcept nogil:
    """The last rail has gone, so nothing is read or written for the link any more."""
    cdef u64 i
    cdef Arriving *a
    cdef Job *job
    pthread_mutex_lock(&link.lock)
    link.issue = NULL
    while link.first != NULL:
        unlist(link, link.first, FAILED, LINK_DIED)
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a != NULL:
            ungrant(link, a)
            opening_drop(a.opening)
            free(a)
    map_free(&link.arriving)
    forget_drained(link)
    while link.jobs != NULL:
        job = link.jobs
        link.jobs = job.next
        free(job)
    store32(&link.jobs_n, 0)
    pthread_mutex_unlock(&link.lock)
    store32(&link.has_ended, 1)
    tell(link.plane, link, -1, 0, link.code, link.errnum)
