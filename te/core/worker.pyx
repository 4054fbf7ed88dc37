# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.string cimport memset
from posix.unistd cimport getpid
from te.core.posix cimport *
from te.core.sync cimport *

cdef enum:
    EVENTS_MAX = 64
    YIELD_NS = 8000  # one that takes longer has let somebody do real work; alone it takes 0.5 us
    SHARED_TURNS = 4
    MOVE_NS = 100000000
    BACKOFF_LEAST_NS = 4000000
    BACKOFF_MOST_NS = 250000000
    LONG_NS = 1000000000  # of a wait that somebody ends
    LONG_MS = 1000000000  # the same, of which epoll_wait(2) takes milliseconds
    WATCH_NS = 50000000  # between two looks at who waits; who does at both has waited for too long
    # A device tells nobody that a copy is over. With the kernel's own slack, 50 us (prctl(2),
    # PR_SET_TIMERSLACK), this is 80 us.
    NAP_NS = 30000
    SOON_NS = 500000


# -- what something may have nothing to do for

cdef void nothing(Polled *p) noexcept nogil:
    pass


cdef bint no_deadline(Polled *p, u64 now) noexcept nogil:
    return False


cdef bint never(Polled *p) noexcept nogil:
    return False


cdef PolledOps plain_polled_ops() noexcept:
    cdef PolledOps ops
    memset(&ops, 0, sizeof(ops))
    ops.adopted = ops.stop = ops.release = nothing
    ops.check = no_deadline
    ops.look = never
    return ops


# -- time without movement

cdef u64 silence_lasts(Silence *s, u64 moved_ns, u64 now, u64 most_ns) noexcept nogil:
    if moved_ns == 0 or moved_ns != s.moved_ns:
        s.lasted_ns = 0
    else:
        s.lasted_ns += min(now - s.checked_ns, most_ns)
    s.moved_ns = moved_ns
    s.checked_ns = now
    return s.lasted_ns


cdef bint silence_ends_soon(const Silence *s, u64 limit_ns, u64 most_ns) noexcept nogil:
    return s.lasted_ns > 0 and s.lasted_ns + most_ns > limit_ns


cdef u64 counts_most_ns(u64 check_ns, u64 stall_ns) noexcept nogil:
    return max(2 * check_ns, stall_ns / 4)


# -- setting up

cdef int workers_open(Workers *all, u32 n, u64 spin_ns) noexcept nogil:
    cdef u32 i
    cdef int errnum
    cdef Worker *w
    cdef epoll_event e
    all.n = n
    all.watch_timer = -1
    all.pid = getpid()
    pthread_mutex_init(&all.lock, NULL)
    for i in range(n):
        w = &all.of[i]
        w.all = all
        w.index = i
        w.epoll = w.eventfd = w.timer = -1
        w.spin.most_ns = spin_ns
        w.spin.may_move = True
        pthread_mutex_init(&w.lock, NULL)
        pthread_mutex_init(&w.turn, NULL)
    for i in range(n):
        w = &all.of[i]
        w.epoll = epoll_create1(EPOLL_CLOEXEC)
        if w.epoll >= 0:
            w.eventfd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if w.eventfd >= 0:
            w.timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)
        if w.timer < 0:
            return last_errno()
        e.events = EPOLLIN
        e.data.ptr = NULL
        if epoll_ctl(w.epoll, EPOLL_CTL_ADD, w.eventfd, &e) < 0:
            return last_errno()
        errnum = worker_checks_at(w, w.timer)
        if errnum:
            return errnum
    all.watch_timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)
    return 0 if all.watch_timer >= 0 else last_errno()


cdef void workers_close(Workers *all) noexcept nogil:
    cdef u32 i
    store32(&all.stop, 1)
    await_threads(all)
    for i in range(all.n):
        if all.of[i].epoll >= 0:
            close(all.of[i].epoll)
        if all.of[i].eventfd >= 0:
            close(all.of[i].eventfd)
        if all.of[i].timer >= 0:
            close(all.of[i].timer)
        pthread_mutex_destroy(&all.of[i].lock)
        pthread_mutex_destroy(&all.of[i].turn)
    if all.watch_timer >= 0:
        close(all.watch_timer)
    pthread_mutex_destroy(&all.lock)


cdef void workers_stop(Workers *all) noexcept nogil:
    cdef u32 i
    store32(&all.stop, 1)
    futex_wake_all(&all.stop)
    ring_in(all.watch_timer, 1)
    for i in range(all.n):
        store32(&all.of[i].kicked, 1)
        eventfd_write(all.of[i].eventfd, 1)


cdef int worker_add(Worker *w, Polled *p, int fd, u32 events) noexcept nogil:
    cdef int errnum
    p.worker = w
    errnum = ESHUTDOWN if w.has_ended else 0
    if errnum == 0 and fd >= 0:
        errnum = polled_attach(p, fd, events)
    if errnum == 0:
        p.next = w.adopted
        w.adopted = p
    return errnum


cdef int worker_checks_at(Worker *w, int fd) noexcept nogil:
    cdef epoll_event e
    e.events = EPOLLIN | EPOLLET
    e.data.ptr = w
    return last_errno() if epoll_ctl(w.epoll, EPOLL_CTL_ADD, fd, &e) < 0 else 0


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


cdef void polled_unwatch(Polled *p, int fd) noexcept nogil:
    epoll_ctl(p.worker.epoll, EPOLL_CTL_DEL, fd, NULL)


cdef void worker_wake(Worker *w) noexcept nogil:
    store32(&w.kicked, 1)
    if load32(&w.sleeping) and swap32(&w.sleeping, 0):
        eventfd_write(w.eventfd, 1)


# -- its turn, and what it is told to do in it

cdef Command ENDED


cdef void worker_take(Worker *w) noexcept nogil:
    if pthread_mutex_trylock(&w.turn) == 0:
        return
    add32(&w.wanted, 1)
    pthread_mutex_lock(&w.turn)
    add32(&w.wanted, -1)


cdef void worker_give(Worker *w) noexcept nogil:
    pthread_mutex_unlock(&w.turn)


cdef bint worker_borrow(Worker *w) noexcept nogil:
    if load32(&w.wanted) or pthread_mutex_trylock(&w.turn):
        return False
    w.is_lent = True
    worker_obey(w)
    return True


cdef void worker_return(Worker *w) noexcept nogil:
    cdef bint has_more = w.next_command != NULL
    if not w.will_check:
        w.will_check = True
        ring_in(w.timer, w.all.check_ns)
    w.is_lent = False
    pthread_mutex_unlock(&w.turn)
    if has_more:
        worker_wake(w)


cdef bint worker_put(Worker *w, Command *c) noexcept nogil:
    cdef Command *newest
    while True:
        newest = <Command *>load_pointer(&w.commands)
        if newest == &ENDED:
            return False
        c.next = newest
        if swap_pointer_if(&w.commands, newest, c):
            return True


cdef void take_commands(Worker *w, Command *left) noexcept nogil:
    """Moves what has come behind what was not run yet, in its order, and leaves something in its place."""
    cdef Command *c = <Command *>swap_pointer(&w.commands, left)
    cdef Command *oldest = NULL
    cdef Command *newest = c
    cdef Command *next
    while c != NULL:
        next = c.next
        c.next = oldest
        oldest = c
        c = next
    if oldest == NULL:
        return
    if w.next_command == NULL:
        w.next_command = oldest
    else:
        w.last_command.next = oldest
    w.last_command = newest


cdef void worker_obey(Worker *w) noexcept nogil:
    cdef Command *c = <Command *>load_pointer(&w.commands)
    if c != NULL and c != &ENDED:
        take_commands(w, NULL)
    while w.next_command != NULL:
        c = w.next_command
        w.next_command = c.next  # It may be gone once it has run.
        if not c.run(c):
            w.next_command = c
            return


cdef void end_commands(Worker *w) noexcept nogil:
    """Runs what has come until now. Nothing can be ordered after that (`worker_put`)."""
    take_commands(w, &ENDED)
    worker_obey(w)


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
    poll_one(w.epoll, POLLIN, NAP_NS)


cdef bint armed(Worker *w) noexcept nogil:
    """Before sleep; False if something is to be done already."""
    cdef Polled *p = w.polled
    cdef bint busy = False
    w.naps = False
    while p != NULL:
        busy |= p.ops.arm(p)
        p = p.next
    return not busy and not load32(&w.kicked) and not has_commands(w)


cdef void worker_by(Worker *w, u64 at_ns) noexcept nogil:
    w.due_ns = min(w.due_ns, at_ns)


cdef void worker_soon(Worker *w) noexcept nogil:
    worker_by(w, now_ns() + SOON_NS)


cdef bint turns(Worker *w, Runner *me, bint slept, bint is_patient) noexcept nogil:
    cdef Polled *p = w.polled
    cdef bint busy = False
    w.wakeup_due = False
    w.due_ns = NEVER_NS
    worker_obey(w)
    while p != NULL:
        # Of small transfers: they are not to wait for all that moves many bytes.
        worker_obey(w)
        busy |= p.ops.turn(p, slept, is_patient)
        if has_left(me):
            return False
        p = p.next
    return busy


cdef void stop_all(Worker *w) noexcept nogil:
    cdef Polled *p = w.polled
    while p != NULL:
        if not p.has_gone:
            p.ops.stop(p)
        p = p.next


cdef bint check_all(Worker *w, u64 now) noexcept nogil:
    """Whether anything has a deadline."""
    cdef Polled *p = w.polled
    cdef bint found = False
    while p != NULL:
        if not p.has_gone:
            found |= p.ops.check(p, now)
        p = p.next
    return found


cdef u64 next_check(Worker *w, u64 check_at, u64 now) noexcept nogil:
    """Looks at deadlines if that is due; when it is due again. Behind a look that has found none it is not, until
    there is another turn, by the worker or in its place (`worker_return`): that may begin something."""
    if check_at == NEVER_NS:
        check_at = now + w.all.check_ns
    elif now >= check_at:
        check_at = now + w.all.check_ns if check_all(w, now) or load32(&w.all.stop) else NEVER_NS
    w.will_check = check_at != NEVER_NS
    return check_at


cdef bint has_nothing_more(Worker *w) noexcept nogil:
    """Whether it has been given nothing since it last looked; then it ends."""
    pthread_mutex_lock(&w.lock)
    w.has_ended = w.adopted == NULL
    pthread_mutex_unlock(&w.lock)
    return w.has_ended


cdef void run(Worker *w, Runner *me) noexcept nogil:
    """Until all that it polls has gone, or the runner has left."""
    cdef epoll_event events[EVENTS_MAX]
    cdef Polled *p
    cdef u64 now = now_ns(), active = 0, check_at = 0, until, value
    cdef int i, n, timeout_ms
    cdef bint busy, slept, stopping, is_patient, naps, wakeup_due, waiting = False
    worker_take(w)
    while True:
        timeout_ms = 0
        naps = False
        slept = not may_spin(&w.spin, active, now)
        if slept:
            store32(&w.processor, 0)
            store32(&w.sleeping, 1)
            until = min(check_at, w.due_ns)
            if armed(w) and now < until:
                naps = w.naps
                if not naps:
                    timeout_ms = -1 if until == NEVER_NS else <int>min(
                        (until - now) / 1000000 + 1, <u64>LONG_MS)
        wakeup_due = w.wakeup_due
        worker_give(w)
        if naps:
            nap(w)
        elif not slept and waiting and not looked(w) and not wakeup_due:
            spin_turn(&w.spin, now)
        n = epoll_wait(w.epoll, events, EVENTS_MAX, timeout_ms)
        store32(&w.sleeping, 0)
        worker_take(w)
        busy = False
        is_patient = now >= w.spin.resume_ns
        for i in range(n):
            p = <Polled *>events[i].data.ptr
            if p == NULL:
                eventfd_read(w.eventfd, &value)
            elif <Worker *>p == w:
                check_at = 0 if check_at == NEVER_NS else check_at  # Else it is due soon.
            else:
                busy |= p.ops.event(p, is_patient)
                if has_left(me):
                    return
        stopping = load32(&w.all.stop)
        if swap32(&w.kicked, 0) or stopping:
            worker_adopt(w)
            if stopping:
                stop_all(w)
        busy |= turns(w, me, slept, is_patient)
        if has_left(me):
            return
        if w.has_gone:
            worker_adopt(w)  # An event may have ended something before it was taken over.
            sweep(w)
        if stopping and w.polled == NULL and has_nothing_more(w):
            end_commands(w)
            worker_give(w)
            return
        now = now_ns()
        if busy:
            active = now
            spin_paid(&w.spin)
        waiting = not busy
        check_at = next_check(w, check_at, now)


# -- its threads

cdef Runner *runner_take(Workers *all) noexcept nogil:
    """One that is free; NULL if there is none."""
    cdef u32 i, free = RUNNER_FREE, runs = RUNNER_RUNS
    for i in range(RUNNERS_MAX):
        if swap_if(&all.runners[i].state, free, runs) == free:
            add32(&all.runners_n, 1)
            return &all.runners[i]
    return NULL


cdef void runner_give(Workers *all, Runner *r) noexcept nogil:
    store32(&r.state, RUNNER_FREE)
    add32(&all.runners_n, -1)


cdef void worker_work(Worker *w) noexcept nogil:
    cdef Workers *all = w.all
    cdef Runner *me = runner_take(all)  # There are more of them than workers and those who watch.
    cdef bint is_lost
    store_pointer(&w.runner, me)
    run(w, me)
    is_lost = has_left(me)
    runner_give(all, me)
    if is_lost:
        # Who has called this keeps the engine, which the others need.
        while not load32(&all.stop):
            futex_wait(&all.stop, 0, LONG_NS)
        await_threads(all)


cdef void await_threads(Workers *all) noexcept nogil:
    """Until those have ended that were started here; they have been told to stop."""
    cdef u32 n = load32(&all.threads)
    futex_wake_all(&all.stop)
    while n and getpid() == all.pid:
        ring_in(all.watch_timer, 1)
        futex_wait(&all.threads, n, LONG_NS)
        n = load32(&all.threads)


# -- who takes over

cdef Worker *waiting_worker(Workers *all, u64 *seen) noexcept nogil:
    """One whose thread still waits for what it waited for at the last look; NULL if there is none.
    By two looks, as all threads of the process may have stood still."""
    cdef Runner *r
    cdef Worker *found = NULL
    cdef u64 since
    cdef u32 i
    for i in range(all.n):
        r = <Runner *>load_pointer(&all.of[i].runner)
        since = 0
        if r != NULL and load32(&r.state) == RUNNER_WAITS:
            since = load64(&r.since_ns)
        if since and since == seen[i]:
            found = &all.of[i]
        seen[i] = since
    return found


cdef bint any_waits(const Workers *all, const u64 *seen) noexcept nogil:
    """At the last look."""
    cdef u32 i
    for i in range(all.n):
        if seen[i]:
            return True
    return False


cdef bint take_over(Worker *w, Runner *me) noexcept nogil:
    """False if its thread has come back. What it polls is given a turn each: the one that was being
    looked after when its thread left, and those whose turn was next."""
    cdef Runner *other
    cdef u32 waits = RUNNER_WAITS, left = RUNNER_LEFT
    cdef Polled *p
    cdef bint is_taken
    pthread_mutex_lock(&w.all.lock)  # Until it is taken over, this runner is no other worker's.
    other = <Runner *>load_pointer(&w.runner)
    is_taken = swap_if(&other.state, waits, left) == waits
    if is_taken:
        store_pointer(&w.runner, me)
    pthread_mutex_unlock(&w.all.lock)
    if not is_taken:
        return False
    p = w.polled
    while p != NULL:
        store32(&p.kicked, 1)
        p = p.next
    store32(&w.kicked, 1)
    return True


cdef void run_instead(Workers *all, Worker *w) noexcept nogil:
    """Somebody else watches by now."""
    cdef Runner *me = runner_take(all)
    cdef char name[16]
    if me == NULL:
        return
    if take_over(w, me):
        snprintf(name, sizeof(name), b"te-worker-%u", w.index)
        name_thread(name)
        run(w, me)
    runner_give(all, me)


cdef void watch_soon(Workers *all) noexcept nogil:
    if load32(&all.will_watch) == 0 and swap32(&all.will_watch, 1) == 0:
        ring_in(all.watch_timer, WATCH_NS)


cdef void *watch(void *of) noexcept nogil:
    """One thread looks which workers wait for too long, as long as any waits. It takes such a one over, and another
    thread looks from then on."""
    cdef Workers *all = <Workers *>of
    cdef u64 seen[WORKERS_MAX]
    cdef u64 rings
    cdef Worker *w = NULL
    memset(seen, 0, sizeof(seen))
    name_thread(b"te-watch")
    while not load32(&all.stop):
        store32(&all.will_watch, 0)  # Who waits from here on says so again (`runner_wait`).
        w = waiting_worker(all, seen)
        if w != NULL and load32(&all.runners_n) < RUNNERS_MAX and start_watch(all):
            run_instead(all, w)
            break
        if any_waits(all, seen):
            watch_soon(all)
        eventfd_read(all.watch_timer, &rings)  # A timer is read like an eventfd.
    add32(&all.threads, -1)
    futex_wake_all(&all.threads)  # Its address alone is used: the engine may be gone.
    return NULL


cdef bint start_watch(Workers *all) noexcept nogil:
    """False if there is no thread for it."""
    add32(&all.threads, 1)
    if start_thread(watch, all) == 0:
        return True
    add32(&all.threads, -1)
    return False


cdef void workers_watch(Workers *all) noexcept nogil:
    if swap32(&all.is_watched, 1) == 0 and not start_watch(all):
        store32(&all.is_watched, 0)  # The next one who asks tries again.
