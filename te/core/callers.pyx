# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.channels cimport channel_arm, channel_disarm, channel_moved
from te.core.connections cimport connection_arm, set_interest, watch
from te.core.frames cimport *
from te.core.plane cimport PENDING
from te.core.posix cimport EPOLLIN, EPOLLOUT, POLLIN, pollfd, ppoll
from te.core.sync cimport *
from te.core.worker cimport LOOKS, may_spin, polled_kick, spin_paid, spin_turn, worker_wake

cdef enum:
    NAP_MOST_NS = 1000000
    KICK_BYTES = 512 << 10


cdef bint send_from_here(Connection *c, int turns) noexcept nogil:
    """Sends on a connection that has nothing else to do; False if it has."""
    if pthread_mutex_trylock(&c.lock):
        return False
    cdef bint is_free = not c.gone and not c.out_left and not load32(&c.link.dead)
    if is_free:
        c.protocol.send(c, turns)
        set_interest(c)
        # What is left of a transfer of many small blocks is for the connection's worker.
        if load_pointer(&c.link.issue) != NULL:
            store32(&c.polled.kicked, 1)
    pthread_mutex_unlock(&c.lock)
    if load32(&c.polled.kicked) or (
        is_free and c.channel.ops.is_in_memory and load32(&c.interest) & EPOLLOUT
    ):
        worker_wake(c.polled.worker)
    return is_free


cdef void send_inline(Link *link, int turns) noexcept nogil:
    cdef u32 i
    for i in range(link.connections_n):
        if send_from_here(<Connection *>link.connections[i], turns):
            return
    polled_kick(link.connections[0])


cdef void kick_some(Link *link, u64 nbytes) noexcept nogil:
    cdef u32 i, n = <u32>min(<u64>link.connections_n, 1 + nbytes / KICK_BYTES)
    cdef u32 first = link.turn
    link.turn += n
    for i in range(n):
        polled_kick(link.connections[(first + i) % link.connections_n])


cdef Moved take_answer(Transfer *t, Connection *c) noexcept nogil:
    """Looks at the connection for the transfer's answer. WAITING: it will come to this thread; MOVED:
    somebody else has the connection just now; NOT_MINE: it is for its worker alone."""
    cdef Moved state = NOT_MINE
    if pthread_mutex_trylock(&c.lock):
        return MOVED
    if not c.gone and not load32(&c.link.dead):
        if not c.driven:
            c.driven = 1
            set_interest(c)
            channel_disarm(c.channel)
        state = c.protocol.receive(c, True)
        while state == MOVED and load32(&t.status) == PENDING:
            state = c.protocol.receive(c, True)
        if c.queued_n:
            c.protocol.send(c, 1)
    pthread_mutex_unlock(&c.lock)
    return state


cdef bint await_ring(Connection *c) noexcept nogil:
    """A short look at whether the other side has put something in; always False on TCP."""
    cdef int i
    if not c.channel.ops.is_in_memory:
        return False
    for i in range(LOOKS):
        if channel_moved(c.channel, EPOLLIN):
            return True
        relax()
    return False


cdef inline bint locked(Connection *c, bint may_wait) noexcept nogil:
    """Takes its lock; False if somebody has it, and that is not to be waited for."""
    if may_wait:
        return pthread_mutex_lock(&c.lock) == 0
    return pthread_mutex_trylock(&c.lock) == 0


cdef void nap(Connection *c, u64 nap_ns, bint may_wait) noexcept nogil:
    """Sleeps until the connection has something to read, or for a while; not at all while somebody
    else has the connection."""
    cdef pollfd p
    cdef timespec most
    cdef bint is_in_memory = c.channel.ops.is_in_memory
    most.tv_sec = 0
    most.tv_nsec = min(nap_ns, <u64>NAP_MOST_NS)
    # If the descriptor is gone or another's by now, the answer only comes a little later.
    p.fd = c.channel.fd
    p.events = POLLIN
    if is_in_memory and not c.napping:
        if not locked(c, may_wait):
            return
        c.napping = True
        if not c.gone:
            watch(c, 0)  # The wake-up is for this thread.
        pthread_mutex_unlock(&c.lock)
    if is_in_memory:
        if channel_arm(c.channel, EPOLLIN):
            return
    if ppoll(&p, 1, &most, NULL) == 1 and is_in_memory and locked(c, may_wait):
        if not c.gone:
            c.channel.ops.rung(c.channel)
        pthread_mutex_unlock(&c.lock)


cdef bint give_back(Connection *c, bint may_wait) noexcept nogil:
    """To its worker; False if it has not been."""
    if not locked(c, may_wait):
        return False
    if c.driven and not c.gone:
        c.driven = 0
        set_interest(c)
        if c.napping:
            watch(c, EPOLLIN)
        c.napping = False
    pthread_mutex_unlock(&c.lock)
    # The worker may be asleep, and has not asked to be woken up for what this thread waited for.
    if connection_arm(c) or (c.protocol.has_work != NULL and c.protocol.has_work(c)):
        polled_kick(&c.polled)
    return True


cdef Polled *drive(Transfer *t, Spin *spin, u64 until_ns, bint may_wait) noexcept nogil:
    cdef Connection *c = <Connection *>load_pointer(&t.via)
    cdef u64 begun = now_ns(), now = begun
    cdef Moved state = MOVED
    if c == NULL:
        return NULL
    while load32(&t.status) == PENDING and now < until_ns:
        state = take_answer(t, c)
        if state == NOT_MINE or state == LOST or load32(&t.status) != PENDING:
            break
        if state == MOVED:
            sched_yield()
        elif may_spin(spin, begun, now):
            if not await_ring(c):
                spin_turn(spin, now)
        else:
            nap(c, until_ns - now, may_wait)
        now = now_ns()
    if now < begun + spin.most_ns:
        spin_paid(spin)
    if not give_back(c, may_wait):
        return &c.polled
    if load32(&c.polled.kicked) or state == NOT_MINE or state == LOST:
        polled_kick(&c.polled)
    return NULL


cdef void drive_end(Polled *via) noexcept nogil:
    give_back(<Connection *>via, True)
    polled_kick(via)
