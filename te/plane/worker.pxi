# SPDX-License-Identifier: Apache-2.0
# The threads that move bytes, and what callers may do for them.

cdef void adopt(Worker *w) noexcept nogil:
    """Takes over rails that Python has added."""
    cdef Rail *r
    pthread_mutex_lock(&w.lock)
    while w.adopted != NULL:
        r = w.adopted
        w.adopted = r.next
        r.next = w.rails
        w.rails = r
    pthread_mutex_unlock(&w.lock)


cdef void sweep(Worker *w) noexcept nogil:
    """Lets go of rails that have gone."""
    cdef Rail *r = w.rails
    cdef Rail *next
    w.rails = NULL
    while r != NULL:
        next = r.next
        if r.gone:
            link_drop(r.link)
        else:
            r.next = w.rails
            w.rails = r
        r = next


cdef bint check_stalls(Worker *w, u64 now) noexcept nogil:
    """Ends links on which nothing moved for too long; whether one is suspected.

    This process itself may have been frozen: only silence after one more look at every socket
    counts.
    """
    cdef Rail *r = w.rails
    cdef Link *link
    cdef bint stalled, suspected = False
    cdef u64 limit = w.plane.stall_ns
    while r != NULL:
        link = r.link
        pthread_mutex_lock(&r.lock)
        pthread_mutex_lock(&link.lock)
        stalled = link.unfinished != 0 and now > load64(&link.progress_ns) + limit
        pthread_mutex_unlock(&link.lock)
        stalled |= r.out_left != 0 and now > r.progress_ns + limit
        if stalled and r.suspect:
            link_die(link, STALLED, 0, NULL)
        r.suspect = stalled
        suspected |= stalled
        pthread_mutex_unlock(&r.lock)
        r = r.next
    return suspected


cdef inline bint may_spin(Spin *s, u64 since, u64 now) noexcept nogil:
    return now < since + s.most_ns and now >= s.resume_ns


cdef void give_way(Spin *s, u64 now) noexcept nogil:
    """One turn of spinning."""
    sched_yield()
    cdef u64 after = now_ns()
    if after > now + YIELD_NS:
        s.backoff_ns = min(max(2 * s.backoff_ns, <u64>BACKOFF_LEAST_NS), <u64>BACKOFF_MOST_NS)
        s.resume_ns = after + s.backoff_ns


cdef void worker_run(Worker *w) noexcept nogil:
    """The whole life of a worker. It takes the interpreter lock never."""
    cdef Plane *p = w.plane
    cdef epoll_event events[64]
    cdef Rail *r
    cdef u64 now = now_ns(), active = 0, check_at = 0, value
    cdef u64 check_ns = min(max(p.stall_ns / 4, <u64>5000000), <u64>250000000)
    cdef int i, n, timeout_ms
    cdef bint busy, stopping, waiting = False
    while True:
        timeout_ms = 0
        if may_spin(&w.spin, active, now):
            if waiting:
                give_way(&w.spin, now)
        else:
            store32(&w.sleeping, 1)
            if not load32(&w.kicked) and now < check_at:
                timeout_ms = <int>((check_at - now) / 1000000) + 1
        n = epoll_wait(w.epoll, events, 64, timeout_ms)
        store32(&w.sleeping, 0)
        busy = False
        for i in range(n):
            if events[i].data.ptr == NULL:
                eventfd_read(w.eventfd, &value)
            else:
                busy |= rail_turn(<Rail *>events[i].data.ptr)
        stopping = load32(&p.stop)
        if swap32(&w.kicked, 0) or stopping:
            adopt(w)
            r = w.rails
            while r != NULL:
                if stopping and not r.gone:
                    link_die(r.link, ENGINE_CLOSED, 0, NULL)
                if swap32(&r.kick, 0) or stopping:
                    busy |= rail_turn(r)
                r = r.next
            sweep(w)
        if stopping and w.rails == NULL:
            return
        now = now_ns()
        if busy:
            active = now
            w.spin.backoff_ns -= w.spin.backoff_ns / 16
        waiting = not busy
        if now >= check_at:
            check_at = now if check_stalls(w, now) else now + check_ns


# -- what a caller does itself, to save waking a worker up: that costs more than a small write

cdef bint send_from_here(Rail *r) noexcept nogil:
    """Sends on a rail that has nothing else to do; False if it has."""
    if pthread_mutex_trylock(&r.lock):
        return False
    cdef bint is_free = not r.gone and not r.out_left and not load32(&r.link.dead)
    if is_free:
        rail_send(r, 1)
        set_interest(r)
    pthread_mutex_unlock(&r.lock)
    if load32(&r.kick):
        wake(r.worker)
    return is_free


cdef void send_inline(Link *link) noexcept nogil:
    """Sends a small transfer from the calling thread."""
    cdef u32 i
    for i in range(link.rails_n):
        if send_from_here(link.rails[i]):
            return
    kick(link.rails[0])


cdef void kick_rails(Link *link, u64 nbytes) noexcept nogil:
    """Wakes as many rails as the transfer has work for."""
    cdef u32 i, n = <u32>min(<u64>link.rails_n, 1 + nbytes / (512 << 10))
    cdef u32 first = link.turn
    link.turn += n
    for i in range(n):
        kick(link.rails[(first + i) % link.rails_n])


cdef Moved take_answer(Transfer *t, Rail *r) noexcept nogil:
    """Looks at the rail for the transfer's answer. WAITING: it will come to this thread; MOVED:
    somebody else has the rail just now; NOT_MINE: it is for the rail's worker alone."""
    cdef Moved state = NOT_MINE
    if pthread_mutex_trylock(&r.lock):
        return MOVED
    if not r.gone and not load32(&r.link.dead):
        if not r.driven:
            r.driven = 1
            set_interest(r)
        state = receive(r, True)
        while state == MOVED and load32(&t.status) == PENDING:
            state = receive(r, True)
        if r.queued_n:
            rail_send(r, 1)
    pthread_mutex_unlock(&r.lock)
    return state


cdef void drive(Transfer *t, u64 until_ns) noexcept nogil:
    """Waits for the answer in the calling thread, which is awake already: waking up the rail's
    worker, and that one the caller, costs more than a small write."""
    cdef Rail *r = <Rail *>load_pointer(&t.rail)
    cdef Spin *spin = &t.link.spin
    cdef pollfd p
    cdef timespec nap
    cdef u64 begun = now_ns(), now = begun
    cdef Moved state = MOVED
    nap.tv_sec = 0
    if r == NULL:
        return
    while load32(&t.status) == PENDING and now < until_ns:
        state = take_answer(t, r)
        if state == NOT_MINE or state == LOST or load32(&t.status) != PENDING:
            break
        if state == MOVED:
            sched_yield()
        elif may_spin(spin, begun, now):
            give_way(spin, now)
        else:
            # If the descriptor is gone or another's by now, the answer only comes a little later.
            p.fd = r.fd
            p.events = POLLIN
            nap.tv_nsec = min(until_ns - now, <u64>1000000)
            ppoll(&p, 1, &nap, NULL)
        now = now_ns()
    if now < begun + spin.most_ns:
        spin.backoff_ns -= spin.backoff_ns / 16
    pthread_mutex_lock(&r.lock)
    if r.driven and not r.gone:
        r.driven = 0
        set_interest(r)
    pthread_mutex_unlock(&r.lock)
    if load32(&r.kick) or state == NOT_MINE or state == LOST:
        kick(r)
