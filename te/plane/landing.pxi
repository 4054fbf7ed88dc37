# SPDX-License-Identifier: Apache-2.0
# The destination's side: checks what a source sends, lands it, counts it.

# -- saying no

cdef void violate(Rail *r, const char *text) noexcept nogil:
    link_die(r.link, VIOLATED, 0, text)


cdef void violate_locked(Rail *r, const char *text) noexcept nogil:
    link_die_locked(r.link, VIOLATED, 0, text)


cdef void refuse(Rail *r, Arriving *a, const char *reason) noexcept nogil:
    """Answers a transfer early; the rest of it is thrown away. Once per transfer. Under the link's
    lock. The reply to a read ends the read here, too."""
    if a.refused:
        return
    store32(&a.refused, 1)
    if load32(&r.link.dropped):  # Nothing is worth answering: its rails are being closed.
        link_die_locked(r.link, FENCED, 0, NULL)
        return
    queue_answer(r, a.id, REFUSED, reason)
    if a.flags & FLAG_REPLY:
        fail_read(r, a.tag, reason)


cdef void fail_read(Rail *r, u64 number, const char *reason) noexcept nogil:
    cdef Transfer *read = <Transfer *>map_get(&r.link.by_id, number)
    if read == NULL or read.kind != READ:
        return
    if read.answer == NO_ANSWER and load32(&read.cancel):
        read.answer = ABANDONED
    elif read.answer == NO_ANSWER:
        read.text = <char *>need(strlen(reason) + 1)
        memcpy(read.text, reason, strlen(reason))
        read.answer = REFUSED
        store32(&read.opening.is_open, 0)
    conclude(r.link, read)


cdef bint is_revoked(Rail *r, Arriving *a, char *reason) noexcept nogil:
    """Whether no byte of the transfer may land any more. Inside the mark, before each call."""
    cdef Snapshot *s
    cdef u32 i
    if load32(&r.link.dropped):
        snprintf(reason, TEXT_MAX, b"the application fenced this peer")
        return True
    if a.opening != NULL and not load32(&a.opening.is_open):
        if a.flags & FLAG_REPLY:
            snprintf(reason, TEXT_MAX, b"the read was given up")
        else:
            snprintf(reason, TEXT_MAX, b"the tag 0x%llx was fenced", <unsigned long long>a.tag)
        return True
    if r.place != AT_PAYLOAD and r.place != AT_PULL:
        return False
    s = <Snapshot *>load_pointer(&r.plane.regions.now)
    if s.version == r.version:
        return False
    # Only what was registered at the frame's check and still is: the same range can have been
    # registered anew, for something else. What peers may do in a region never changes.
    for i in range(r.near_at, r.near_n):
        if not is_registered(
            s, <u64>r.near[i].iov_base, r.near[i].iov_len, r.newest, OWN_USE, NULL
        ):
            i = snprintf(reason, TEXT_MAX, b"deregistered meanwhile: ")
            say_outside(s, <u64>r.near[r.near_at].iov_base, r.near[r.near_at].iov_len, reason + i)
            return True
    r.version = s.version
    return False


# -- transfers under way

cdef Arriving *begin(Rail *r, Header *h) noexcept nogil:
    """The transfer a frame belongs to, made by its first frame; NULL after a violation."""
    cdef Link *link = r.link
    cdef Arriving *a = <Arriving *>map_get(&link.arriving, h.transfer)
    cdef Transfer *read
    cdef char text[TEXT_MAX]
    if a != NULL:
        if a.tag == h.tag and a.flags == h.flags and (
            h.kind == ABANDON or a.abandoned or a.total == h.total
        ):
            return a
        snprintf(
            text, TEXT_MAX, b"transfer %llu with tag %llu and %llu bytes began with tag %llu and"
            b" %llu bytes", <unsigned long long>h.transfer, <unsigned long long>h.tag,
            <unsigned long long>h.total, <unsigned long long>a.tag, <unsigned long long>a.total)
        violate_locked(r, text)
        return NULL
    if h.kind != ABANDON and h.transfer <= r.last_id:
        snprintf(text, TEXT_MAX, b"transfer %llu comes after %llu",
                 <unsigned long long>h.transfer, <unsigned long long>r.last_id)
        violate_locked(r, text)
        return NULL
    if link.arriving.count == ARRIVING_MAX:
        violate_locked(r, b"too many unfinished transfers")
        return NULL
    a = <Arriving *>need(sizeof(Arriving))
    a.id = h.transfer
    a.tag = h.tag
    a.total = h.total
    a.flags = h.flags
    map_put(&link.arriving, a.id, a)
    if h.flags & FLAG_REPLY:
        read = <Transfer *>map_get(&link.by_id, h.tag)
        if read != NULL and read.kind == READ:
            a.opening = read.opening
            add32(&a.opening.refs, 1)
        else:
            refuse(r, a, b"the read was given up")
    elif a.tag:
        a.opening = opening_find(&r.plane.tags, a.tag, &link.peer)
        if a.opening == NULL:
            say_not_open(text, TEXT_MAX, a.tag)
            refuse(r, a, text)
    return a


cdef void returned(Rail *r, Arriving *a, bint whole) noexcept nogil:
    """The reply to one frame of a read is complete. Under the link's lock."""
    cdef Link *link = r.link
    cdef Transfer *read = <Transfer *>map_get(&link.by_id, a.tag)
    if read == NULL or read.kind != READ:
        return
    if not whole:
        fail_read(r, a.tag, b"the source: its memory cannot be read")
        return
    if read.outstanding:
        read.outstanding -= 1
        link.reads_asked -= 1
    read.returned += a.arrived
    conclude(link, read)
    if link.issue != NULL:
        store32(&r.kick, 1)


cdef void finish(Rail *r, Arriving *a) noexcept nogil:
    """All of a transfer has come: counts it, answers, forgets it. Under the link's lock."""
    cdef char reason[TEXT_MAX]
    cdef bint revoked
    map_take(&r.link.arriving, a.id)
    ungrant(r.link, a)
    if not a.refused:
        if a.spoiled or a.abandoned:
            queue_answer(r, a.id, ABANDONED, b"")
            if a.flags & FLAG_REPLY:
                returned(r, a, False)
        else:
            # Inside the mark: no arrival is counted after a fence has returned.
            enter(&r.worker.section, r.link, a.opening)
            revoked = is_revoked(r, a, reason)
            if not revoked and a.opening != NULL:
                add64(&a.opening.nbytes, a.total)
                add64(&a.opening.count, 1)
            leave(&r.worker.section)
            if revoked:
                refuse(r, a, reason)
            else:
                queue_answer(r, a.id, LANDED, b"")
                if a.flags & FLAG_REPLY:
                    returned(r, a, True)
    opening_drop(a.opening)
    free(a)


cdef inline void read_moved(Rail *r) noexcept nogil:
    """Bytes have landed, perhaps of what a read here has asked for."""
    if r.arriving.flags & FLAG_REPLY:
        store64(&r.arriving.opening.progress_ns, load64(&r.link.progress_ns))


cdef void frame_landed(Rail *r, bint is_whole) noexcept nogil:
    """The payload of a frame has landed, or was thrown away."""
    cdef Arriving *a = r.arriving
    r.arriving = NULL
    r.place = AT_HEAD
    pthread_mutex_lock(&r.link.lock)
    a.arrived += r.head.nbytes
    if not is_whole:
        a.spoiled = True
    if a.flags & FLAG_REPLY:
        store64(&r.link.progress_ns, now_ns())
    if a.arrived == a.total:
        finish(r, a)
    elif r.head.kind == PULL and not a.refused:
        count_pull(r, a.id)
    pthread_mutex_unlock(&r.link.lock)


# -- frames

cdef bint check_head(Rail *r) noexcept nogil:
    """The body that a header announces; False after a violation. All that can be said of a header
    alone is checked here, by the table of te/core/wire.h. What follows rests on that."""
    cdef Link *link = r.link
    cdef int over = OVER_RDMA if link.is_direct else OVER_RINGS if link.is_pull else OVER_TCP
    cdef char text[TEXT_MAX]
    cdef int64_t nbytes = check_header(&r.head, over, link.is_incoming, text, TEXT_MAX)
    r.body_have = 0
    if nbytes < 0:
        violate(r, text)
        return False
    r.body_want = <u32>nbytes
    return True


cdef bint load_ranges(Rail *r) noexcept nogil:
    """The descriptors of a frame as iovecs; False after a violation."""
    cdef Header *h = &r.head
    cdef Landing *landings = <Landing *>r.body
    cdef Block *blocks = <Block *>r.body
    cdef u64 total = 0, nbytes
    cdef u32 i
    cdef char text[TEXT_MAX]
    for i in range(h.count):
        if h.kind == SEGMENT:
            nbytes = landings[i].nbytes
            r.near[i].iov_base = <void *>landings[i].dst
        else:
            nbytes = blocks[i].nbytes
            r.near[i].iov_base = <void *>blocks[i].dst
            r.far[i].iov_base = <void *>blocks[i].src
            r.far[i].iov_len = nbytes
        r.near[i].iov_len = nbytes
        if nbytes == 0 or nbytes > h.nbytes:
            snprintf(text, TEXT_MAX, b"a segment of %llu bytes with a block of %llu bytes",
                     <unsigned long long>h.nbytes, <unsigned long long>nbytes)
            violate(r, text)
            return False
        total += nbytes  # Cannot wrap: BLOCKS_MAX sizes of at most SEGMENT_BYTES_MAX.
    if total != h.nbytes:
        snprintf(text, TEXT_MAX, b"a segment of %llu bytes with blocks of %llu bytes in all",
                 <unsigned long long>h.nbytes, <unsigned long long>total)
        violate(r, text)
        return False
    r.near_at = 0
    r.near_n = h.count
    r.payload_left = h.nbytes
    return True


cdef bint check_ranges(Rail *r, Arriving *a, char *reason) noexcept nogil:
    """Whether a frame may be written to its ranges: all are registered now for what the transfer is,
    and are among those of its tag."""
    cdef u32 i, n
    cdef u32 right = OWN_USE if a.flags & FLAG_REPLY else right_to_write(a.tag)
    cdef u64 at, nbytes
    cdef bint good = True
    enter(&r.worker.section, r.link, NULL)
    cdef Snapshot *s = <Snapshot *>load_pointer(&r.plane.regions.now)
    r.version = s.version
    r.newest = s.newest
    for i in range(r.near_n):
        at, nbytes = <u64>r.near[i].iov_base, r.near[i].iov_len
        if not is_registered(s, at, nbytes, s.newest, right, NULL):
            n = snprintf(reason, TEXT_MAX, b"the destination: ")
            say_refused(s, at, nbytes, right, reason + n)
            good = False
            break
        if not opening_covers(a.opening, at, nbytes):
            n = snprintf(reason, TEXT_MAX, b"the destination: ")
            say_not_covered(reason + n, TEXT_MAX - n, a.opening, at, nbytes)
            good = False
            break
    leave(&r.worker.section)
    return good


cdef bint on_frame(Rail *r) noexcept nogil:
    """A header and its body are complete; False after a violation."""
    cdef Header *h = &r.head
    cdef Arriving *a
    cdef char text[TEXT_MAX]
    if h.kind == ACK:
        return on_answer(r)
    if h.kind >= ASK:
        return on_direct(r, h)
    if h.kind != END and h.kind != ABANDON and not load_ranges(r):
        return False
    if h.kind == READ:
        serve_read(r)
        return True
    if h.kind == ABANDON and r.link.is_direct:
        return on_stop(r, h)
    pthread_mutex_lock(&r.link.lock)
    if h.kind == END and map_get(&r.link.arriving, h.transfer) != NULL:
        violate_locked(r, b"a transfer without blocks that has begun with some")
        pthread_mutex_unlock(&r.link.lock)
        return False
    a = begin(r, h)
    if a != NULL and h.kind == ABANDON:
        if h.total < a.announced or h.total > a.total:
            violate_locked(r, b"a transfer is given up with fewer bytes than were sent")
            a = NULL
        else:
            a.total = h.total
            a.abandoned = True
    elif a != NULL:
        r.last_id = max(r.last_id, h.transfer)
        a.announced += h.nbytes
        if a.announced > a.total:
            snprintf(text, TEXT_MAX, b"transfer %llu of %llu bytes comes with %llu",
                     <unsigned long long>a.id, <unsigned long long>a.total,
                     <unsigned long long>a.announced)
            violate_locked(r, text)
            a = NULL
    if a != NULL and h.nbytes == 0 and a.arrived == a.total:
        finish(r, a)
    pthread_mutex_unlock(&r.link.lock)
    if a == NULL:
        return False
    if h.kind == PULL and h.nbytes >= SPREAD_BYTES and r.link.rails_n > 1:
        job_put(r, a)
    elif h.nbytes:
        r.arriving = a
        receive_payload(r, a)
    return True


cdef void receive_payload(Rail *r, Arriving *a) noexcept nogil:
    cdef char reason[TEXT_MAX]
    r.place = AT_PULL if r.head.kind == PULL else AT_PAYLOAD
    if not load32(&a.refused) and not check_ranges(r, a, reason):
        revoke(r, a, reason)
    elif load32(&a.refused):
        throw_away(r)


cdef void revoke(Rail *r, Arriving *a, const char *reason) noexcept nogil:
    """Refuses the transfer whose payload is under way."""
    pthread_mutex_lock(&r.link.lock)
    refuse(r, a, reason)
    pthread_mutex_unlock(&r.link.lock)
    throw_away(r)


cdef void throw_away(Rail *r) noexcept nogil:
    """The payload under way must not land."""
    if r.place == AT_PULL:
        frame_landed(r, True)
        return
    r.discard_left = r.payload_left
    r.payload_left = 0
    r.tail_have = 0
    r.place = AT_DISCARD


cdef bint on_answer(Rail *r) noexcept nogil:
    cdef u32 i
    cdef char text[TEXT_MAX]
    cdef const char *name = b"LANDED"
    for i in range(r.head.count):
        if not 32 <= r.body[i] < 127:
            violate(r, b"the reason of an acknowledgement is not printable ASCII")
            return False
    if answered(r, &r.head, r.body):
        return True
    if r.head.status == ABANDONED:
        name = b"ABANDONED"
    elif r.head.status == REFUSED:
        name = b"REFUSED"
    elif r.head.status == GRANTED:
        name = b"GRANTED"
    elif r.head.status == PROGRESS:
        name = b"PROGRESS"
    snprintf(text, TEXT_MAX, b"transfer %llu, acknowledged as %s, is not waiting for it",
             <unsigned long long>r.head.transfer, name)
    violate(r, text)
    return False


cdef void serve_read(Rail *r) noexcept nogil:
    """A piece of a peer's read: writes back what it asks for, under the number of its read."""
    cdef Link *link = r.link
    cdef Snapshot *s
    cdef Region **held = NULL
    cdef Block *blocks
    cdef Transfer *t = NULL
    cdef uint8_t *touched
    cdef u32 i, n = 0
    cdef bint good = True
    cdef char reason[TEXT_MAX]
    enter(&r.worker.section, r.link, NULL)
    s = <Snapshot *>load_pointer(&r.plane.regions.now)
    touched = <uint8_t *>need(s.count + 1)
    for i in range(r.near_n):
        if not is_registered(
            s, <u64>r.far[i].iov_base, r.far[i].iov_len, s.newest, RIGHT_READ, touched
        ):
            n = snprintf(reason, TEXT_MAX, b"the source: ")
            say_refused(s, <u64>r.far[i].iov_base, r.far[i].iov_len, RIGHT_READ, reason + n)
            good = False
            break
    n = 0
    if good:
        held = <Region **>need((s.count + 1) * sizeof(Region *))
        for i in range(s.count):
            if touched[i]:
                held[n] = s.regions[i]
                add32(&held[n].refs, 1)
                add32(&held[n].readers, 1)
                n += 1
    leave(&r.worker.section)
    free(touched)
    if good:
        blocks = <Block *>need(r.near_n * sizeof(Block))
        memcpy(blocks, r.body, r.near_n * sizeof(Block))
        t = transfer_new(
            link, PULL if link.is_pull else SEGMENT, r.head.transfer, blocks, r.near_n,
            r.head.nbytes, held, n)
        t.flags = FLAG_REPLY
    pthread_mutex_lock(&link.lock)
    if good and link.reads_served >= READS_SERVED_MAX:
        good = False
        snprintf(reason, TEXT_MAX, b"the source: too many reads at once")
        settle(t, FAILED, WAS_REFUSED)
    elif good:
        enlist(link, t)
    if good:
        for i in range(link.rails_n):
            kick(link.rails[i])
    else:
        queue_answer(r, r.head.transfer, REFUSED, reason)
    pthread_mutex_unlock(&link.lock)
    if t != NULL:
        transfer_drop(t)
