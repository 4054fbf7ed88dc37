# SPDX-License-Identifier: Apache-2.0
# One connection: sending, receiving, and the loop of the threads that do it.

cdef enum Moved:
    MOVED  # and there may be more
    WAITING  # the kernel has nothing now, or takes nothing
    LOST  # the link dies
    NOT_MINE  # only the rail's worker may go on

# -- small things to send

cdef void queue_bytes(Rail *r, const void *data, u64 n) noexcept nogil:
    """Sends bytes behind the frame under way. The rail's lock is held."""
    if r.queued_n + n > r.queued_room:
        r.queued_room = 2 * (r.queued_n + n) + 4096
        r.queued = <uint8_t *>need_more(r.queued, r.queued_room)
    memcpy(r.queued + r.queued_n, data, n)
    r.queued_n += n


cdef void queue_frame(Rail *r, Header *h, const void *items, u64 nbytes) noexcept nogil:
    queue_bytes(r, h, sizeof(Header))
    if nbytes:
        queue_bytes(r, items, nbytes)


cdef void queue_answer(Rail *r, u64 number, uint8_t status, const char *reason) noexcept nogil:
    cdef Header h = header_of(ACK, number, 0, 0)
    h.status = status
    h.count = <u32>strlen(reason)
    queue_frame(r, &h, reason, h.count)


cdef void queue_progress(Rail *r, u64 number, u64 nbytes) noexcept nogil:
    cdef Header h = header_of(ACK, number, 0, 0)
    h.status = PROGRESS
    h.nbytes = nbytes
    queue_frame(r, &h, NULL, 0)


# -- what became of the channel

cdef void channel_broke(Rail *r, int errnum) noexcept nogil:
    if errnum == EPROTO:
        link_die(r.link, VIOLATED, 0, b"a position in a ring that cannot be")
    else:
        link_die(r.link, BROKE, errnum, NULL)


cdef inline bint rail_moved(Rail *r) noexcept nogil:
    """Whether the rings show what the rail waits for."""
    return not r.gone and channel_moved(&r.channel, load32(&r.interest))


cdef inline bint rail_arm(Rail *r) noexcept nogil:
    """Asks to be woken up; True if there is something already."""
    return channel_arm(&r.channel, load32(&r.interest)) and not r.gone


# -- sending

cdef bint load_next(Rail *r) noexcept nogil:
    """Prepares what is sent next; False when there is nothing."""
    cdef uint8_t *sending
    cdef u64 room
    cdef bint has_frame = take(r)
    if not has_frame:
        r.out_n = 1
        r.out_left = r.out_tail = r.out_payload = 0
    r.out_at = 1
    if r.queued_n:
        sending, room = r.sending, r.sending_room
        r.sending, r.sending_room = r.queued, r.queued_room
        r.out[0].iov_base = r.sending
        r.out[0].iov_len = r.queued_n
        r.out_at = 0
        r.out_left += r.queued_n
        r.queued, r.queued_room, r.queued_n = sending, room, 0
    if r.out_left:
        r.progress_ns = now_ns()
    return r.out_left != 0


cdef inline u64 payload_of(Rail *r, u64 left) noexcept nogil:
    """Bytes of payload that are sent when `left` bytes of the load are not."""
    if left >= r.out_tail:
        return 0
    return min(r.out_tail - left, r.out_payload)


cdef void pad(Rail *r, int fault) noexcept nogil:
    """Source memory vanished in the middle of a frame: sends something else in its place, so that
    the rail stays in step, and says so in the trailer."""
    cdef u64 left = min(r.out_left - TRAILER_BYTES, r.out_payload), n
    cdef u32 k = r.out_at
    pthread_mutex_lock(&r.link.lock)
    r.out_transfer.fault = fault
    pthread_mutex_unlock(&r.link.lock)
    r.trailer = <u64>fault
    if r.out_left > r.out_tail:  # The kernel takes nothing of a call that has bad memory in it.
        k = 2
    r.out_payload = 0
    while left:
        n = min(left, <u64>SCRATCH_BYTES)
        r.out[k].iov_base = r.plane.zeros
        r.out[k].iov_len = n
        left -= n
        k += 1
    r.out[k].iov_base = &r.trailer
    r.out[k].iov_len = TRAILER_BYTES
    r.out_n = k + 1


cdef Moved rail_send(Rail *r, int turns) noexcept nogil:
    """Sends what there is, in at most so many calls."""
    cdef ssize_t moved
    cdef u64 before
    while turns:
        if r.out_left == 0 and not load_next(r):
            return WAITING
        moved = channel_send(
            &r.channel, r.out + r.out_at, r.out_n - r.out_at, r.out_tail == 0)
        if moved < 0:
            if moved == -EAGAIN:
                return WAITING
            if moved == -EFAULT and r.out_payload:
                pad(r, EFAULT)
                continue
            if moved == -EINTR:
                continue
            channel_broke(r, -moved)
            return LOST
        turns -= 1
        r.progress_ns = now_ns()
        if not r.link.is_direct:  # There it carries words about rails alone, also dead ones.
            store64(&r.link.progress_ns, r.progress_ns)
        if r.out_transfer != NULL:
            store64(&r.out_transfer.progress_ns, r.progress_ns)
        before = payload_of(r, r.out_left)
        r.out_left -= moved
        add64(&r.plane.bytes_sent, payload_of(r, r.out_left) - before)
        if r.out_left == 0:
            if r.out_transfer != NULL and r.out_transfer.kind == PULL:
                add64(&r.plane.bytes_sent, (<Header *>r.frame).nbytes)
            frame_sent(r)
            continue
        r.out_at = advance(r.out, r.out_at, moved)
        return WAITING
    return MOVED


# -- receiving

cdef Moved on_received(Rail *r, ssize_t n, size_t wanted) noexcept nogil:
    """What follows from what a channel returned."""
    if n > 0:
        if not r.link.is_direct:
            store64(&r.link.progress_ns, now_ns())
        # Less than asked for: the kernel has no more just now, which saves a call that says so.
        return MOVED if <size_t>n == wanted else WAITING
    if n == 0:
        pthread_mutex_lock(&r.link.lock)
        link_die_locked(
            r.link, ENDED, 0, b"" if r.lead_have == 0 and r.link.arriving.count == 0
            else b" in the middle of a transfer")
        pthread_mutex_unlock(&r.link.lock)
        return LOST
    if n == -EAGAIN:
        return WAITING
    if n == -EINTR:
        return MOVED
    channel_broke(r, -n)
    return LOST


cdef Moved land(Rail *r) noexcept nogil:
    """One call that writes registered memory, inside the mark, if that is still allowed. It also
    takes the trailer and the next header, which saves two calls a frame."""
    cdef char reason[TEXT_MAX]
    cdef ssize_t n = 0
    cdef u64 landed, wanted = r.payload_left + sizeof(r.tail)
    cdef Moved state
    cdef bint revoked
    r.near[r.near_n].iov_base = r.tail
    r.near[r.near_n].iov_len = sizeof(r.tail)
    enter(&r.worker.section, r.link, r.arriving.opening)
    revoked = is_revoked(r, r.arriving, reason)
    if not revoked:
        n = channel_land(&r.channel, r.near + r.near_at, r.near_n + 1 - r.near_at)
    leave(&r.worker.section)
    if n == -EFAULT:
        revoked = True
        snprintf(reason, TEXT_MAX, b"registered memory cannot be written: Bad address")
    if revoked:
        revoke(r, r.arriving, reason)
        return MOVED
    if n <= 0:
        return on_received(r, n, wanted)
    landed = min(<u64>n, r.payload_left)
    add64(&r.plane.bytes_received, landed)
    r.payload_left -= landed
    state = on_received(r, n, wanted)
    read_moved(r)
    if r.payload_left:
        r.near_at = advance(r.near, r.near_at, landed)
        return state
    r.place = AT_TRAILER
    r.tail_have = <u32>(n - landed)
    r.drained = state == WAITING
    return MOVED


cdef Moved read_trailer(Rail *r) noexcept nogil:
    """Takes the trailer of a frame, and the next header if that has come with it."""
    cdef ssize_t n
    cdef Moved state = WAITING if r.drained else MOVED
    cdef u64 fault
    if r.tail_have < TRAILER_BYTES:
        n = channel_receive(&r.channel, r.tail + r.tail_have, sizeof(r.tail) - r.tail_have)
        state = on_received(r, n, sizeof(r.tail) - r.tail_have)
        if n <= 0:
            return state
        r.tail_have += <u32>n
        if r.tail_have < TRAILER_BYTES:
            return state
    memcpy(&fault, r.tail, TRAILER_BYTES)
    frame_landed(r, fault == 0)
    r.lead_have = r.tail_have - TRAILER_BYTES
    memcpy(r.lead, r.tail + TRAILER_BYTES, r.lead_have)
    return MOVED if r.lead_have >= sizeof(Header) else state


cdef Moved discard(Rail *r) noexcept nogil:
    cdef u64 wanted = min(r.discard_left, <u64>SCRATCH_BYTES)
    cdef ssize_t n = channel_receive(&r.channel, r.worker.scratch, wanted)
    if n > 0:
        r.discard_left -= n
        if r.discard_left == 0:
            r.place = AT_TRAILER
            r.drained = False
    return on_received(r, n, wanted)


cdef Moved receive(Rail *r, bint answers_only) noexcept nogil:
    """One step: a call to the kernel, or what follows from a complete item."""
    cdef ssize_t n
    cdef size_t wanted
    cdef Moved state = MOVED
    if answers_only and r.place != AT_HEAD and (r.place != AT_BODY or r.head.kind != ACK):
        return NOT_MINE
    if r.place == AT_PAYLOAD:
        return land(r)
    if r.place == AT_PULL:
        return pull(r)
    if r.place == AT_TRAILER:
        return read_trailer(r)
    if r.place == AT_DISCARD:
        return discard(r)
    if r.place == AT_HEAD:
        if not answers_only and load32(&r.link.jobs_n) >= JOBS_MAX and job_take(r):
            return MOVED
        if r.lead_have < sizeof(Header):
            wanted = sizeof(r.lead) - r.lead_have
            n = channel_receive(&r.channel, r.lead + r.lead_have, wanted)
            state = on_received(r, n, wanted)
            if n > 0:
                r.lead_have += <u32>n
        if r.lead_have < sizeof(Header):
            if state == WAITING and not answers_only and job_take(r):
                return MOVED
            return state
        memcpy(&r.head, r.lead, sizeof(Header))
        if answers_only and r.head.kind != ACK:
            return NOT_MINE
        if not check_head(r):
            return LOST
        take_lead(r)
        r.place = AT_BODY
    if r.body_have < r.body_want:
        wanted = r.body_want - r.body_have
        n = channel_receive(&r.channel, r.body + r.body_have, wanted)
        state = on_received(r, n, wanted)
        if n > 0:
            r.body_have += <u32>n
    if r.body_have < r.body_want:
        return state
    r.place = AT_HEAD
    if not on_frame(r):
        return LOST
    # With a payload to come it is worth looking; behind the last frame it is not.
    return MOVED if r.place != AT_HEAD else state


cdef void take_lead(Rail *r) noexcept nogil:
    """Gives what came behind the header to the body, and the rest to the next header."""
    cdef u32 extra = r.lead_have - <u32>sizeof(Header)
    cdef u32 used = min(extra, r.body_want)
    memcpy(r.body, r.lead + sizeof(Header), used)
    r.body_have = used
    r.lead_have = extra - used
    memmove(r.lead, r.lead + sizeof(Header) + used, r.lead_have)


# -- a rail's life

cdef void set_interest(Rail *r) noexcept nogil:
    """Waits for what the rail can use. A caller that drives it is not disturbed by its worker."""
    cdef u32 wanted = 0
    if not r.driven and r.queued_n <= ACK_BACKLOG_BYTES:
        wanted = EPOLLIN
    if r.out_left:
        wanted |= EPOLLOUT
    if wanted == r.interest:
        return
    store32(&r.interest, wanted)
    if r.channel.rings == NULL:
        watch(r, wanted)


cdef void watch(Rail *r, u32 wanted) noexcept nogil:
    cdef epoll_event e
    e.events = wanted
    e.data.ptr = r
    epoll_ctl(r.worker.epoll, EPOLL_CTL_MOD, r.channel.fd, &e)


cdef void rail_retire(Rail *r) noexcept nogil:
    """Closes the connection of a dying link; the last of its rails fails what is unfinished."""
    cdef Link *link = r.link
    cdef u32 left
    r.gone = True
    channel_close(&r.channel)  # Which also ends the watch.
    frame_sent(r)
    pthread_mutex_lock(&link.lock)
    link.rails_alive -= 1
    left = link.rails_alive
    pthread_mutex_unlock(&link.lock)
    if left == 0 and link.is_direct:
        pairs_end(link)
    if left == 0:
        link_ended(link)
    add64(&r.plane.rails_in if link.is_incoming else &r.plane.rails_out, -1)


cdef bint rail_turn(Rail *r, bint rung, bint is_patient) noexcept nogil:
    """Whatever the rail can do now, within bounds so that others get their turn; whether bytes
    moved. `rung`: its descriptor is ready. `is_patient`: a bell may wait for the next turn."""
    cdef int i
    cdef Moved state = MOVED
    cdef u64 before
    cdef bint busy = False, again, hurried = False
    pthread_mutex_lock(&r.lock)
    r.channel.is_patient = is_patient
    if not r.gone:
        if rung and r.channel.rings != NULL:
            answer_bell(&r.channel)
        before = load64(&r.link.progress_ns)
        for i in range(READS_PER_TURN):
            if load32(&r.link.dead) or r.queued_n > ACK_BACKLOG_BYTES:
                break
            if r.driven:  # A caller sleeps until the answer comes: it must not find it taken.
                break
            state = receive(r, False)
            if state == WAITING and r.place == AT_HEAD and load32(&r.link.jobs_n):
                # A frame behind that of a copy has ended it: without one more look nobody would
                # take the copy up.
                state = MOVED
            if state != MOVED:
                break
            if r.queued_n and r.out_left == 0 and not hurried:
                # Through a socket the first answer goes at once, those behind it together.
                hurried = r.channel.rings == NULL
                rail_send(r, 1)
        again = state == MOVED
        if not load32(&r.link.dead):
            again |= rail_send(r, SENDS_PER_TURN) == MOVED
        if again:  # It stopped for lack of turns: the kernel may have nothing to wake it with.
            store32(&r.kick, 1)
            store32(&r.worker.kicked, 1)
        if load32(&r.link.dead):
            rail_retire(r)
            busy = True
        else:
            set_interest(r)
            # The next word of how far copies are comes in a millisecond: too long to spin for.
            busy = load64(&r.link.progress_ns) != before and not r.is_bulk
    r.channel.is_patient = False
    pthread_mutex_unlock(&r.lock)
    return busy


cdef void rail_free(Rail *r) noexcept nogil:
    channel_free(&r.channel)
    pthread_mutex_destroy(&r.lock)
    free(r.body)
    free(r.near)
    free(r.far)
    free(r.queued)
    free(r.sending)
    free(r.frame)
    free(r.out)
    free(r)


cdef int rail_new(Plane *p, Link *link, int fd, int rings_fd) noexcept nogil:
    """Adds a connection to a link and hands it to a worker; 0, or an errno (then the descriptors
    are not taken). The link's lock is held."""
    cdef Rail *r = <Rail *>need(sizeof(Rail))
    cdef epoll_event e
    cdef int errnum = 0
    cdef Worker *w = &p.workers[(link.number + link.rails_n) % p.workers_n]
    if link.is_direct:
        w = link.worker
    pthread_mutex_init(&r.lock, NULL)
    r.plane = p
    r.link = link
    r.worker = w
    if link.is_pull and rings_fd < 0:
        errnum = EINVAL
    else:
        errnum = channel_open(
            &r.channel, fd, rings_fd if link.is_pull else -1, not link.is_incoming)
    r.body = <uint8_t *>need(body_bytes_max())
    r.frame = <uint8_t *>need(sizeof(Header) + BLOCKS_MAX * sizeof(Block))
    r.near = <iovec *>need(IOV_MAX * sizeof(iovec))
    r.far = <iovec *>need(IOV_MAX * sizeof(iovec))
    r.out = <iovec *>need(IOV_MAX * sizeof(iovec))
    r.interest = EPOLLIN
    e.events = EPOLLIN
    e.data.ptr = r
    pthread_mutex_lock(&w.lock)
    if errnum == 0 and epoll_ctl(w.epoll, EPOLL_CTL_ADD, fd, &e) < 0:
        errnum = last_errno()
    if errnum:
        pthread_mutex_unlock(&w.lock)
        r.channel.rings_fd = -1  # It stays the caller's.
        rail_free(r)
        return errnum
    add32(&link.refs, 1)
    link.rails[link.rails_n] = r
    link.rails_n += 1
    link.rails_alive += 1
    add64(&p.rails_in if link.is_incoming else &p.rails_out, 1)
    r.next = w.adopted
    w.adopted = r
    pthread_mutex_unlock(&w.lock)
    return 0
