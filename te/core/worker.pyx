# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.string cimport memset
from te.core.posix cimport *
from te.core.sync cimport *

cdef enum:
    EVENTS_MAX = 64
    YIELD_NS = 8000  # one that takes longer has let somebody do real work; alone it takes 0.5 us
    SHARED_TURNS = 4
    MOVE_NS = 100000000
    BACKOFF_LEAST_NS = 4000000
    BACKOFF_MOST_NS = 250000000
    # A device tells nobody that a copy is over. With the kernel's own slack, 50 us (prctl(2),
    # PR_SET_TIMERSLACK), this is 80 us.
    NAP_NS = 30000


# -- what something may have nothing to do for

cdef void nothing(Polled *p) noexcept nogil:
    pass


cdef bint never(Polled *p) noexcept nogil:
    return False


cdef PolledOps plain_polled_ops() noexcept:
    cdef PolledOps ops
    memset(&ops, 0, sizeof(ops))
    ops.adopted = ops.stop = nothing
    ops.look = never
    return ops


# -- setting up

cdef int workers_open(Workers *all, u32 n, u64 spin_ns) noexcept nogil:
    cdef u32 i
    cdef Worker *w
    cdef epoll_event e
    all.n = n
    for i in range(n):
        w = &all.of[i]
        w.all = all
        w.index = i
        w.epoll = w.eventfd = -1
        w.spin.most_ns = spin_ns
        w.spin.may_move = True
        pthread_mutex_init(&w.lock, NULL)
    for i in range(n):
        w = &all.of[i]
        w.epoll = epoll_create1(EPOLL_CLOEXEC)
        if w.epoll >= 0:
            w.eventfd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if w.eventfd < 0:
            return last_errno()
        e.events = EPOLLIN
        e.data.ptr = NULL
        if epoll_ctl(w.epoll, EPOLL_CTL_ADD, w.eventfd, &e) < 0:
            return last_errno()
    return 0


cdef void workers_close(Workers *all) noexcept nogil:
    cdef u32 i
    for i in range(all.n):
        if all.of[i].epoll >= 0:
            close(all.of[i].epoll)
        if all.of[i].eventfd >= 0:
            close(all.of[i].eventfd)
        pthread_mutex_destroy(&all.of[i].lock)


cdef void workers_stop(Workers *all) noexcept nogil:
    cdef u32 i
    store32(&all.stop, 1)
    for i in range(all.n):
        store32(&all.of[i].kicked, 1)
        eventfd_write(all.of[i].eventfd, 1)


cdef int worker_add(Worker *w, Polled *p, int fd, u32 events) noexcept nogil:
    cdef int errnum = 0
    p.worker = w
    pthread_mutex_lock(&w.lock)
    if fd >= 0:
        errnum = polled_attach(p, fd, events)
    if errnum == 0:
        p.next = w.adopted
        w.adopted = p
    pthread_mutex_unlock(&w.lock)
    return errnum


cdef int polled_attach(Polled *p, int fd, u32 events) noexcept nogil:
    cdef epoll_event e
    e.events = events
    e.data.ptr = p
    return last_errno() if epoll_ctl(p.worker.epoll, EPOLL_CTL_ADD, fd, &e) < 0 else 0


cdef void polled_watch(Polled *p, int fd, u32 events) noexcept nogil:
    cdef epoll_event e
    e.events = events
    e.data.ptr = p
    epoll_ctl(p.worker.epoll, EPOLL_CTL_MOD, fd, &e)


cdef void worker_wake(Worker *w) noexcept nogil:
    store32(&w.kicked, 1)
    if load32(&w.sleeping) and swap32(&w.sleeping, 0):
        eventfd_write(w.eventfd, 1)


# -- spinning

cdef void spin_turn(Spin *s, u64 now) noexcept nogil:
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


cdef void worker_spread(Worker *w) noexcept nogil:
    cdef u32 here = <u32>(sched_getcpu() + 1), i
    cdef u64 now = now_ns()
    store32(&w.processor, here)
    if now < w.spin.moved_ns + MOVE_NS:
        return
    for i in range(w.index):
        if load32(&w.all.of[i].processor) == here:
            w.spin.moved_ns = now
            change_processor()
            store32(&w.processor, <u32>(sched_getcpu() + 1))
            return


cdef bint looked(Worker *w) noexcept nogil:
    """A short look at what other processes do in memory, which needs no call to the kernel; whether
    something was seen."""
    cdef Polled *p
    cdef bint has_some = True
    cdef int i
    for i in range(LOOKS):
        if not has_some or load32(&w.kicked):
            return False
        has_some = False
        p = w.polled
        while p != NULL:
            if p.is_in_memory:
                has_some = True
                if p.ops.look(p):
                    return True
            p = p.next
        relax()
    return False


# -- one turn

cdef void worker_adopt(Worker *w) noexcept nogil:
    cdef Polled *p
    cdef Polled *next
    pthread_mutex_lock(&w.lock)
    p = w.adopted
    w.adopted = NULL
    pthread_mutex_unlock(&w.lock)
    while p != NULL:
        next = p.next
        p.next = w.polled
        w.polled = p
        p.ops.adopted(p)
        p = next


cdef void sweep(Worker *w) noexcept nogil:
    """Lets go of what has gone; behind everything that may still point to it."""
    cdef Polled *p = w.polled
    cdef Polled *next
    w.has_gone = False
    w.polled = NULL
    while p != NULL:
        next = p.next
        if p.has_gone:
            p.ops.release(p)
        else:
            p.next = w.polled
            w.polled = p
        p = next


cdef void nap(Worker *w) noexcept nogil:
    """Sleeps until a descriptor is ready, a short while at most."""
    cdef timespec most
    cdef pollfd p
    most.tv_sec = 0
    most.tv_nsec = NAP_NS
    p.fd = w.epoll
    p.events = POLLIN
    ppoll(&p, 1, &most, NULL)


cdef bint armed(Worker *w) noexcept nogil:
    """Before sleep; False if something is to be done already."""
    cdef Polled *p = w.polled
    cdef bint busy = False
    w.naps = False
    while p != NULL:
        busy |= p.ops.arm(p)
        p = p.next
    return not busy and not load32(&w.kicked)


cdef bint turns(Worker *w, bint slept, bint is_patient) noexcept nogil:
    cdef Polled *p = w.polled
    cdef bint busy = False
    w.owes = False
    while p != NULL:
        busy |= p.ops.turn(p, slept, is_patient)
        p = p.next
    return busy


cdef void stop_all(Worker *w) noexcept nogil:
    cdef Polled *p = w.polled
    while p != NULL:
        if not p.has_gone:
            p.ops.stop(p)
        p = p.next


cdef bint checked(Worker *w, u64 now) noexcept nogil:
    """Deadlines; False if one seems to be over."""
    cdef Polled *p = w.polled
    cdef bint again = False
    while p != NULL:
        if not p.has_gone:
            again |= p.ops.check(p, now)
        p = p.next
    return not again


cdef void worker_run(Worker *w) noexcept nogil:
    cdef epoll_event events[EVENTS_MAX]
    cdef Polled *p
    cdef u64 now = now_ns(), active = 0, check_at = 0, value
    cdef int i, n, timeout_ms
    cdef bint busy, slept, stopping, is_patient, waiting = False
    while True:
        timeout_ms = 0
        slept = not may_spin(&w.spin, active, now)
        if slept:
            store32(&w.processor, 0)
            store32(&w.sleeping, 1)
            if armed(w) and now < check_at:
                if w.naps:
                    nap(w)
                else:
                    timeout_ms = 1 if w.restless else <int>((check_at - now) / 1000000) + 1
        elif waiting and not looked(w) and not w.owes:
            spin_turn(&w.spin, now)
        n = epoll_wait(w.epoll, events, EVENTS_MAX, timeout_ms)
        store32(&w.sleeping, 0)
        busy = False
        is_patient = now >= w.spin.resume_ns
        for i in range(n):
            p = <Polled *>events[i].data.ptr
            if p == NULL:
                eventfd_read(w.eventfd, &value)
            else:
                busy |= p.ops.event(p, is_patient)
        stopping = load32(&w.all.stop)
        if swap32(&w.kicked, 0) or stopping:
            worker_adopt(w)
            if stopping:
                stop_all(w)
        busy |= turns(w, slept, is_patient)
        if w.has_gone:
            sweep(w)
        if stopping and w.polled == NULL:
            return
        now = now_ns()
        if busy:
            active = now
            spin_paid(&w.spin)
        waiting = not busy
        if now >= check_at:
            check_at = now + w.all.check_ns if checked(w, now) else now
