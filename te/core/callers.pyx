# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.channels cimport channel_arm, channel_moved
from te.core.connections cimport connection_arm, hush, set_interest, watch
from te.core.frames cimport *
from te.core.link cimport *
from te.core.plane cimport DONE, FAILED, PENDING
from te.core.posix cimport EPOLLIN, EPOLLOUT, POLLIN, pollfd, ppoll
from te.core.sync cimport *
from te.core.transfer cimport transfer_drop, transfer_list, transfer_settle
from te.core.worker cimport (
    LOOKS, Command, may_spin, polled_kick, spin_paid, spin_turn, worker_borrow, worker_put,
    worker_return, worker_wake,
)

cdef enum:
    NAP_MOST_NS = 1000000
    KICK_BYTES = 512 << 10


# -- commands

cdef bint enter(Link *link, bint may_wait) noexcept nogil:
    """Takes the link's lock; False if the worker of another connection has it, and that is not to be waited
    for."""
    if may_wait:
        return pthread_mutex_lock(&link.lock) == 0
    return pthread_mutex_trylock(&link.lock) == 0


cdef void order(Link *link, Command *c) noexcept nogil:
    if link.owner == NULL or not worker_put(link.owner, c):
        c.run(c, True)  # There is nobody else: the link has no connection, or its engine is closed.
    elif worker_borrow(link.owner):
        worker_return(link.owner)
    else:
        worker_wake(link.owner)


cdef bint on_submit(Command *c, bint may_wait) noexcept nogil:
    cdef Transfer *t = <Transfer *>c.of
    cdef Link *link = t.link
    if not enter(link, may_wait):
        return False
    if load32(&link.dead) or not load32(&link.connections_alive):
        transfer_settle(t, FAILED, LINK_DIED)
    elif t.is_read and t.n == 0:
        transfer_settle(t, DONE, NO_REASON)  # There is nothing to ask the other side for.
    else:
        transfer_list(t)
        link.ops.submit(t)
    pthread_mutex_unlock(&link.lock)
    transfer_drop(t)
    return True


cdef bint on_cancel(Command *c, bint may_wait) noexcept nogil:
    cdef Transfer *t = <Transfer *>c.of
    cdef Link *link = t.link
    if not enter(link, may_wait):
        return False
    if t.is_listed:
        link.ops.cancel(t)
    pthread_mutex_unlock(&link.lock)
    transfer_drop(t)
    return True


cdef void submit(Transfer *t) noexcept nogil:
    add32(&t.refs, 1)
    t.submitting.run = on_submit
    t.submitting.of = t
    order(t.link, &t.submitting)


cdef void call_off(Transfer *t) noexcept nogil:
    if swap32(&t.is_called_off, 1):
        return
    add32(&t.refs, 1)
    t.cancelling.run = on_cancel
    t.cancelling.of = t
    order(t.link, &t.cancelling)


# -- sending

cdef bint send_by(Connection *c, int turns) noexcept nogil:
    """Sends on a connection that has nothing else to send; False if it has."""
    if load32(&c.gone) or c.out_left or load32(&c.link.dead):
        return False
    c.protocol.send(c, turns)
    set_interest(c)
    # What is left of a transfer of many small blocks is for the connection's worker.
    if load32(&c.polled.kicked) or load_pointer(&c.link.issue) != NULL:
        polled_kick(&c.polled)
    elif c.channel.ops.is_in_memory and load32(&c.interest) & EPOLLOUT:
        worker_wake(c.polled.worker)
    return True


cdef void send_now(Link *link, int turns, u64 nbytes) noexcept nogil:
    cdef u32 i
    for i in range(load32(&link.connections_n)):
        if link.connections[i].worker == link.owner and (
            send_by(<Connection *>link.connections[i], turns)
        ):
            return
    kick_some(link, nbytes)


cdef void kick_some(Link *link, u64 nbytes) noexcept nogil:
    cdef u32 i, all = load32(&link.connections_n), n = <u32>min(<u64>all, 1 + nbytes / KICK_BYTES)
    cdef u32 first = link.turn
    link.turn += n
    for i in range(n):
        polled_kick(link.connections[(first + i) % all])


# -- waiting for an answer

cdef struct Look:
    Transfer *t
    bint has_rung  # the descriptor of the first connection
    bint sleeps  # the thread is about to wait for that descriptor, `fd`
    int fd


cdef bint borrow(Link *link) noexcept nogil:
    """The owner's turn, and the link's lock, for a moment; False if somebody has one of them."""
    if not worker_borrow(link.owner):
        return False
    if enter(link, False):
        return True
    worker_return(link.owner)
    return False


cdef void give_back(Link *link) noexcept nogil:
    pthread_mutex_unlock(&link.lock)
    worker_return(link.owner)


cdef Moved take_answers(Look *look, Connection *c) noexcept nogil:
    """WAITING: nothing is there, and what comes does not wake its worker. LOST: its worker is to look."""
    cdef Moved state
    if load32(&c.gone) or load32(&c.link.dead):
        return LOST
    hush(c)
    if look.has_rung and c.channel.ops.rung != NULL:
        c.channel.ops.rung(c.channel)
    if look.sleeps and c.channel.ops.is_in_memory:
        watch(c, 0)  # The wake-up is for this thread.
    state = c.protocol.receive(c, True)
    while state == MOVED and load32(&look.t.status) == PENDING:
        state = c.protocol.receive(c, True)
    if c.queued_n:
        c.protocol.send(c, 1)
    look.fd = c.channel.fd
    if load32(&c.polled.kicked):
        return LOST
    if state == WAITING and look.sleeps and channel_arm(c.channel, EPOLLIN):
        return MOVED
    return state


cdef Moved look_once(Look *look) noexcept nogil:
    """At the connections that the owner has. MOVED: somebody has the turn, or more is there already."""
    cdef Link *link = look.t.link
    cdef Moved state = WAITING, one
    cdef u32 i
    look.fd = -1
    if not borrow(link):
        return MOVED
    for i in range(load32(&link.connections_n)):
        if link.connections[i].worker != link.owner:
            continue
        one = take_answers(look, <Connection *>link.connections[i])
        if one == LOST or load32(&look.t.status) != PENDING:
            state = LOST
            break
        if one == MOVED:
            state = MOVED
    give_back(link)
    return state


cdef bint await_ring(Link *link) noexcept nogil:
    """A short look at whether the other side has put something in; always False on TCP."""
    cdef Connection *c = <Connection *>link.connections[0]
    cdef int i
    for i in range(LOOKS if c.channel.ops.is_in_memory else 0):
        if channel_moved(c.channel, EPOLLIN):
            return True
        relax()
    return False


cdef void nap(Look *look, u64 nap_ns) noexcept nogil:
    """Sleeps until the first connection has something to read, or for a while."""
    cdef pollfd p
    cdef timespec most
    cdef Moved state
    look.sleeps = True
    state = look_once(look)
    look.sleeps = look.has_rung = False
    if state != WAITING or look.fd < 0:
        return
    most.tv_sec = 0
    most.tv_nsec = min(nap_ns, <u64>NAP_MOST_NS)
    # If the descriptor is gone or another's by now, the answer only comes a little later.
    p.fd = look.fd
    p.events = POLLIN
    look.has_rung = ppoll(&p, 1, &most, NULL) == 1


cdef void leave_to_worker_all(Link *link, bint is_kicked) noexcept nogil:
    """The owner's connections are looked at by nobody else any more."""
    cdef Connection *c
    cdef u32 i
    cdef bint has_turn = borrow(link)
    for i in range(load32(&link.connections_n)):
        c = <Connection *>link.connections[i]
        if c.polled.worker != link.owner:
            continue
        if has_turn and not load32(&c.gone) and not load32(&link.dead):
            set_interest(c)
        # The worker may be asleep, and has not asked to be woken up for what this thread waited for.
        if is_kicked or not has_turn or load32(&c.polled.kicked) or connection_arm(c) or (
            c.protocol.has_work != NULL and c.protocol.has_work(c)
        ):
            polled_kick(&c.polled)
    if has_turn:
        give_back(link)


cdef void await_answer(Transfer *t, Spin *spin, u64 until_ns) noexcept nogil:
    cdef Link *link = t.link
    cdef Look look
    cdef u64 begun = now_ns(), now = begun
    cdef Moved state = WAITING
    if link.owner == NULL or load32(&link.dead):
        return
    look.t = t
    look.has_rung = look.sleeps = False
    while load32(&t.status) == PENDING and now < until_ns:
        state = look_once(&look)
        look.has_rung = False
        if state == LOST or load32(&t.status) != PENDING:
            break
        if state == MOVED:
            sched_yield()
        elif may_spin(spin, begun, now):
            if not await_ring(link):
                spin_turn(spin, now)
        else:
            nap(&look, until_ns - now)
        now = now_ns()
    if now < begun + spin.most_ns:
        spin_paid(spin)
    leave_to_worker_all(link, state == LOST and load32(&t.status) == PENDING)
