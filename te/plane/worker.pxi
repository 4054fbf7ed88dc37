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


cdef bint outlasts_stall(Link *link) noexcept nogil:
    """Over RDMA, with every rail known to be dead: only what is unfinished fails. The destination
    may be well, and a rail come back. Once: it has to answer that it forgets the transfers."""
    cdef u32 i
    if not link.is_direct or link.has_outlasted:
        return False
    for i in range(RAILS_MAX):
        if link.pairs[i] != NULL and link.pairs[i].state != PAIR_PROBE:
            return False
    link.has_outlasted = True
    pthread_mutex_lock(&link.lock)
    if link.first != NULL:
        store64(&link.first.progress_ns, now_ns())
    pthread_mutex_unlock(&link.lock)
    store32(&link.hopeless, 1)  # The rail's lock is held here: `give_up_all` takes it.
    return True


cdef void check_hope(Worker *w) noexcept nogil:
    cdef Rail *r = w.rails
    while r != NULL:
        if swap32(&r.link.hopeless, 0):
            give_up_all(r.link, NO_RAIL)
        r = r.next


cdef bint is_stalled(Link *link, u64 since_ns) noexcept nogil:
    """Whether its first transfer has not moved since then. Those behind it wait their turn, so what
    moves of them says nothing of it; and each is the first in the end. Under the link's lock."""
    cdef Transfer *t = link.first
    return t != NULL and load64(&t.progress_ns) < since_ns and (
        t.kind != READ or load64(&t.opening.progress_ns) < since_ns)


cdef bint check_stalls(Worker *w, u64 now) noexcept nogil:
    """Ends links with a transfer, or a connection, on which nothing moved for too long; whether one
    is suspected.

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
        stalled = now > limit and is_stalled(link, now - limit)
        pthread_mutex_unlock(&link.lock)
        if link.is_pull and process_gone(link):
            link_die(link, PROCESS_GONE, 0, NULL)
        stalled |= r.out_left != 0 and now > r.progress_ns + limit
        if stalled and r.suspect and not outlasts_stall(link):
            link_die(link, STALLED, 0, NULL)
        r.suspect = stalled
        suspected |= stalled
        pthread_mutex_unlock(&r.lock)
        r = r.next
    return suspected


cdef inline bint may_spin(Spin *s, u64 since, u64 now) noexcept nogil:
    return now < since + s.most_ns and now >= s.resume_ns


cdef bint look_at_rings(Worker *w) noexcept nogil:
    """A short look at what the other sides do in memory, which needs no call to the kernel."""
    cdef Rail *r
    cdef bint has_rings = True
    cdef int i
    for i in range(LOOKS):
        if not has_rings or load32(&w.kicked):
            return False
        has_rings = False
        r = w.rails
        while r != NULL:
            if rail_moved(r):
                return True
            has_rings |= r.channel.rings != NULL
            r = r.next
        relax()
    return False


cdef bint arm_rings(Worker *w) noexcept nogil:
    """Before sleep; True if a rail has something to do already."""
    cdef Rail *r = w.rails
    cdef bint moved = False
    while r != NULL:
        channel_owes(&r.channel, True)
        moved |= rail_arm(r)
        r = r.next
    return moved


cdef bint serve_rings(Worker *w, bint disarm, bint is_patient) noexcept nogil:
    """Turns of the rails that can use one; whether bytes moved."""
    cdef Rail *r = w.rails
    cdef bint busy = False
    w.owes = False
    while r != NULL:
        if disarm:
            channel_disarm(&r.channel)
        if rail_moved(r):
            busy |= rail_turn(r, False, is_patient)
        w.owes |= channel_owes(&r.channel, False)
        r = r.next
    return busy


cdef void give_way(Spin *s, u64 now) noexcept nogil:
    """One turn of spinning."""
    sched_yield()
    cdef u64 after = now_ns()
    cdef u32 displaced = times_displaced()
    if displaced == s.displaced:
        s.shared = 0
        return
    s.displaced = displaced
    s.shared += 1
    cdef bint is_slow = after > now + YIELD_NS
    if s.may_move and (is_slow or s.shared >= SHARED_TURNS) and now >= s.moved_ns + MOVE_NS:
        s.moved_ns = now
        change_processor()
    elif is_slow:
        s.backoff_ns = min(max(2 * s.backoff_ns, <u64>BACKOFF_LEAST_NS), <u64>BACKOFF_MOST_NS)
        s.resume_ns = after + s.backoff_ns


cdef void worker_run(Worker *w) noexcept nogil:
    """The whole life of a worker. It takes the interpreter lock never."""
    cdef Plane *p = w.plane
    cdef epoll_event events[64]
    cdef Rail *r
    cdef u64 now = now_ns(), active = 0, check_at = 0, value
    cdef u64 check_ns = min(max(min(p.stall_ns / 4, p.suspect_ns / 2), <u64>5000000), <u64>250000000)
    cdef int i, n, timeout_ms
    cdef bint busy, slept, stopping, is_patient, waiting = False
    while True:
        timeout_ms = 0
        slept = not may_spin(&w.spin, active, now) and not pairs_arm(w)
        if slept:
            store32(&w.processor, 0)
            store32(&w.sleeping, 1)
            if not arm_rings(w) and not load32(&w.kicked) and now < check_at:
                timeout_ms = 1 if w.draining else <int>((check_at - now) / 1000000) + 1
        elif waiting and not look_at_rings(w) and not w.owes:
            give_way(&w.spin, now)
        n = epoll_wait(w.epoll, events, 64, timeout_ms)
        store32(&w.sleeping, 0)
        busy = False
        is_patient = now >= w.spin.resume_ns
        for i in range(n):
            if events[i].data.ptr == NULL:
                eventfd_read(w.eventfd, &value)
            elif <u64>events[i].data.ptr & 1:
                pair_event(<Pair *>(<u64>events[i].data.ptr - 1))
            else:
                busy |= rail_turn(<Rail *>events[i].data.ptr, True, is_patient)
        busy |= serve_rings(w, slept, is_patient)
        stopping = load32(&p.stop)
        if swap32(&w.kicked, 0) or stopping:
            adopt(w)
            pairs_adopt(w)
            r = w.rails
            while r != NULL:
                if stopping and not r.gone:
                    link_die(r.link, ENGINE_CLOSED, 0, NULL)
                if swap32(&r.kick, 0) or stopping:
                    busy |= rail_turn(r, False, is_patient)
                r = r.next
            sweep(w)
            breaks_turn(w)
        if w.pairs != NULL:
            busy |= pairs_turn(w)
            pairs_sweep(w)
        if w.draining:
            breaks_turn(w)
        if stopping and w.rails == NULL:
            return
        now = now_ns()
        if busy:
            active = now
            w.spin.backoff_ns -= w.spin.backoff_ns / 16
        waiting = not busy
        if now >= check_at:
            pairs_check(w, now)
            check_at = now if check_stalls(w, now) else now + check_ns
            check_hope(w)


# -- what a caller does itself, to save waking a worker up: that costs more than a small write

cdef bint send_from_here(Rail *r, int turns) noexcept nogil:
    """Sends on a rail that has nothing else to do; False if it has."""
    if pthread_mutex_trylock(&r.lock):
        return False
    cdef bint is_free = not r.gone and not r.out_left and not load32(&r.link.dead)
    if is_free:
        rail_send(r, turns)
        set_interest(r)
        # What is left of a transfer of many small blocks is for the rail's worker.
        if load_pointer(&r.link.issue) != NULL:
            store32(&r.kick, 1)
    pthread_mutex_unlock(&r.lock)
    if load32(&r.kick) or (is_free and r.channel.rings != NULL and load32(&r.interest) & EPOLLOUT):
        wake(r.worker)
    return is_free


cdef void send_inline(Link *link, int turns) noexcept nogil:
    """Sends a small transfer, or the first frames of a PULL, from the calling thread."""
    cdef u32 i
    for i in range(link.rails_n):
        if send_from_here(link.rails[i], turns):
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
            channel_disarm(&r.channel)
        state = receive(r, True)
        while state == MOVED and load32(&t.status) == PENDING:
            state = receive(r, True)
        if r.queued_n:
            rail_send(r, 1)
    pthread_mutex_unlock(&r.lock)
    return state


cdef bint await_ring(Rail *r) noexcept nogil:
    """A short look at whether the other side has put something in; always False on TCP."""
    cdef int i
    if r.channel.rings == NULL:
        return False
    for i in range(LOOKS):
        if has_input(&r.channel):
            return True
        relax()
    return False


cdef void nap(Rail *r, u64 nap_ns) noexcept nogil:
    """Sleeps until the rail has something to read, or for a while."""
    cdef pollfd p
    cdef timespec most
    cdef bint has_rings = r.channel.rings != NULL
    most.tv_sec = 0
    most.tv_nsec = min(nap_ns, <u64>1000000)
    # If the descriptor is gone or another's by now, the answer only comes a little later.
    p.fd = r.channel.fd
    p.events = POLLIN
    if has_rings and not r.napping:
        pthread_mutex_lock(&r.lock)
        r.napping = True
        if not r.gone:
            watch(r, 0)  # The bell is for this thread.
        pthread_mutex_unlock(&r.lock)
    if has_rings:
        if channel_arm(&r.channel, EPOLLIN):
            return
    if ppoll(&p, 1, &most, NULL) == 1 and has_rings:
        pthread_mutex_lock(&r.lock)
        if not r.gone:
            answer_bell(&r.channel)
        pthread_mutex_unlock(&r.lock)


cdef void let_go(Rail *r) noexcept nogil:
    """Gives the rail back to its worker."""
    pthread_mutex_lock(&r.lock)
    if r.driven and not r.gone:
        r.driven = 0
        set_interest(r)
        if r.napping:
            watch(r, EPOLLIN)
        r.napping = False
    pthread_mutex_unlock(&r.lock)
    # The worker may be asleep, and has not asked to be woken up for what this thread waited for.
    if rail_arm(r) or load32(&r.link.jobs_n):
        kick(r)


cdef void drive(Transfer *t, u64 until_ns) noexcept nogil:
    """Waits for the answer in the calling thread, which is awake already: waking up the rail's
    worker, and that one the caller, costs more than a small write."""
    cdef Rail *r = <Rail *>load_pointer(&t.rail)
    cdef Spin *spin = &t.link.spin
    cdef u64 begun = now_ns(), now = begun
    cdef Moved state = MOVED
    if r == NULL:
        return
    while load32(&t.status) == PENDING and now < until_ns:
        state = take_answer(t, r)
        if state == NOT_MINE or state == LOST or load32(&t.status) != PENDING:
            break
        if state == MOVED:
            sched_yield()
        elif may_spin(spin, begun, now):
            if not await_ring(r):
                give_way(spin, now)
        else:
            nap(r, until_ns - now)
        now = now_ns()
    if now < begun + spin.most_ns:
        spin.backoff_ns -= spin.backoff_ns / 16
    let_go(r)
    if load32(&r.kick) or state == NOT_MINE or state == LOST:
        kick(r)
