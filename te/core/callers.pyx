# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.channels cimport channel_arm, channel_disarm, channel_moved
from te.core.connections cimport connection_arm, set_interest
from te.core.frames cimport *
from te.core.link cimport *
from te.core.plane cimport DONE, FAILED, PENDING
from te.core.posix cimport EPOLLIN, EPOLLOUT, POLLIN, poll_one
from te.core.sync cimport *
from te.core.transfer cimport transfer_drop, transfer_list, transfer_settle
from te.core.worker cimport (
    LOOKS, Command, Worker, may_spin, polled_kick, spin_paid, spin_turn, worker_borrow, worker_put,
    worker_return, worker_wake,
)

cdef enum:
    NAP_MOST_NS = 1000000
    BUSY_NS = 50000  # a caller tries for so long to get a worker's turn
    ANSWERS_PER_LOOK = 32
    KICK_BYTES = 512 << 10


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


cdef void kick_some(Link *link, u64 nbytes) noexcept nogil:
    """Gives as many connections a turn as there is work for."""
    cdef u32 i, all = rails_of(link), n = <u32>min(<u64>all, 1 + nbytes / KICK_BYTES)
    cdef u32 first = link.turn
    link.turn += n
    for i in range(n):
        polled_kick(link.connections[(first + i) % all])


cdef void send_now(Link *link, int turns, u64 nbytes) noexcept nogil:
    """By a connection that the owner has, in so many calls at most; if they are all busy, their workers do it."""
    cdef u32 i
    for i in range(load32(&link.connections_n)):
        if link.connections[i].worker == link.owner and (
            send_by(<Connection *>link.connections[i], turns)
        ):
            return
    kick_some(link, nbytes)


# -- commands

cdef bint order(Link *link, Command *c) noexcept nogil:
    """False if nobody will carry it out: the link has no connection, or its engine is closed."""
    cdef Worker *owner = <Worker *>load_pointer(&link.owner)
    if owner == NULL or not worker_put(owner, c):
        return False
    if worker_borrow(owner):
        worker_return(owner)
    else:
        worker_wake(owner)
    return True


cdef bint link_take(Link *link) noexcept nogil:
    """Its lock, for a command. One that has ended may go with its command's reference, which is not for who waits for
    no lock."""
    return not (link.owner.is_lent and load32(&link.has_ended)) and link_lock(link, link.owner)


cdef bint on_submit(Command *c) noexcept nogil:
    cdef Transfer *t = <Transfer *>c.of
    cdef Link *link = t.link
    cdef bint begins = False
    if not link_take(link):
        return False
    if t.is_late or not load32(&link.connections_alive):
        transfer_settle(t, FAILED, LINK_DIED)
    elif load32(&link.dead):
        transfer_list(t)  # It fails behind those that were submitted before it.
    elif t.is_read and t.n == 0:
        transfer_settle(t, DONE, NO_REASON)  # There is nothing to ask the other side for.
    else:
        transfer_list(t)
        begins = True
    pthread_mutex_unlock(&link.lock)
    if begins and t.sends_at_once:
        send_now(link, t.sends_at_once, t.total)
    elif begins:
        kick_some(link, t.total)
    transfer_drop(t)
    return True


cdef bint on_cancel(Command *c) noexcept nogil:
    cdef Transfer *t = <Transfer *>c.of
    cdef Link *link = t.link
    if not link_take(link):
        return False
    if t.is_listed:
        link.ops.cancel(t)
    pthread_mutex_unlock(&link.lock)
    transfer_drop(t)
    return True


cdef void submit(Transfer *t) noexcept:
    cdef bint is_ordered
    add32(&t.refs, 1)
    t.is_late = load32(&t.link.dead) != 0
    t.submitting.run = on_submit
    t.submitting.of = t
    if t.is_awaited and not t.is_read and t.total > INLINE_BYTES:
        with nogil:  # Sending it takes long, and behind it this thread waits without the lock anyway.
            is_ordered = order(t.link, &t.submitting)
    else:
        is_ordered = order(t.link, &t.submitting)
    if is_ordered:
        return
    lock_as_caller(&t.link.lock)
    transfer_settle(t, FAILED, LINK_DIED)
    pthread_mutex_unlock(&t.link.lock)
    transfer_drop(t)


cdef void call_off(Transfer *t) noexcept nogil:
    if swap32(&t.is_called_off, 1):
        return
    add32(&t.refs, 1)
    t.cancelling.run = on_cancel
    t.cancelling.of = t
    if not order(t.link, &t.cancelling):
        transfer_drop(t)  # It has its outcome, or gets it with its link, which is dead.


# -- waiting for an answer

cdef enum Seen:
    NOTHING  # and this thread is told of what comes
    MORE
    IS_BUSY  # somebody has the worker's turn
    OTHERS  # look, who take this one's answer, too: it need not sleep here
    FOR_WORKER  # what comes, or the link's end

# What a calling thread does while it waits.
cdef struct Look:
    Connection *c
    Transfer *t
    int fd
    bint is_asleep  # `Connection.lookers` says so
    bint is_armed  # the other side is to ring
    bint has_rung  # it has
    u64 busy_ns  # since when the worker's turn was not free; 0: it was


cdef bint join(Connection *c) noexcept nogil:
    """False if another thread sleeps until something comes: it takes this one's answer, too."""
    cdef u32 n = load32(&c.lookers), before
    while n != ASLEEP:
        before = swap_if(&c.lookers, n, n + 1)
        if before == n:
            return True
        n = before
    return False


cdef inline bint has_room(Connection *c) noexcept nogil:
    """Whether its worker can go on sending, of which memory tells."""
    return c.out_left != 0 and channel_moved(c.channel, EPOLLOUT)


cdef Seen fall_asleep(Look *look) noexcept nogil:
    """Nothing is there. From here on the worker reads nothing: who sleeps must not find the answer taken. Only in
    this turn, so that the worker is never in the middle of reading."""
    cdef Connection *c = look.c
    look.is_asleep = swap_if(&c.lookers, 1, ASLEEP) == 1
    if not look.is_asleep:
        return OTHERS
    set_interest(c)
    look.is_armed = True
    return MORE if channel_arm(c.channel, EPOLLIN) else NOTHING


cdef Seen take_answers(Look *look, bint sleeps) noexcept nogil:
    cdef Connection *c = look.c
    cdef Moved state = MOVED
    cdef bint may_send = False
    cdef u32 suspicion
    cdef int i
    if load32(&c.gone) or load32(&c.link.dead):
        return FOR_WORKER
    if look.has_rung and c.channel.ops.rung != NULL:
        c.channel.ops.rung(c.channel)
        may_send = has_room(c)
    if look.is_armed:
        channel_disarm(c.channel)
    look.has_rung = look.is_armed = False
    look.fd = c.channel.fd
    set_interest(c)
    suspicion = load32(&c.link.suspicion)
    for i in range(ANSWERS_PER_LOOK):  # A peer may send for ever.
        state = c.protocol.receive(c, True)
        if state != MOVED or load32(&look.t.status) != PENDING:
            break
    if state != LEFT_TO_WORKER:  # What the first transfer waits for may be what was left.
        store32(&c.looked, suspicion)
    if c.queued_n:
        send_by(c, 1)  # Such as that the reply to a read has landed.
    if may_send or load32(&c.polled.kicked):
        polled_kick(&c.polled)  # There is something to send, or to begin.
    if state == WAITING and sleeps and load32(&look.t.status) == PENDING:
        return fall_asleep(look)
    return NOTHING if state == WAITING else MORE if state == MOVED else FOR_WORKER


cdef Seen look_once(Look *look, bint sleeps) noexcept nogil:
    cdef Worker *w = look.c.polled.worker
    cdef Seen seen
    if not worker_borrow(w):
        return IS_BUSY
    seen = take_answers(look, sleeps)
    worker_return(w)
    return seen


cdef bint await_ring(Connection *c) noexcept nogil:
    """A short look at whether the other side has put something in; always False on TCP."""
    cdef int i
    for i in range(LOOKS if c.channel.ops.is_in_memory else 0):
        if channel_moved(c.channel, EPOLLIN):
            return True
        relax()
    return False


cdef void doze(Look *look, u64 nap_ns) noexcept nogil:
    """Sleeps until the connection has something to read, or for a while."""
    # If the descriptor is gone or another's by now, the answer only comes a little later.
    look.has_rung = poll_one(look.fd, POLLIN, min(nap_ns, <u64>NAP_MOST_NS)) == 1


cdef void leave(Look *look, bint is_for_worker) noexcept nogil:
    """The worker is told again of what comes, unless others look."""
    cdef Connection *c = look.c
    cdef Worker *w = c.polled.worker
    cdef bint is_last = add32(&c.lookers, -1) == 0
    if not worker_borrow(w):
        polled_kick(&c.polled)
        return
    if not load32(&c.gone) and not load32(&c.link.dead):
        if look.has_rung and c.channel.ops.rung != NULL:
            c.channel.ops.rung(c.channel)
        set_interest(c)
        is_for_worker |= c.put_off or has_room(c)
        c.put_off = False
    worker_return(w)
    # The worker may be asleep, and has not asked to be woken up for what this thread waited for.
    if is_for_worker or load32(&c.polled.kicked) or is_last and (
        connection_arm(c) or (c.protocol.has_work != NULL and c.protocol.has_work(c))
    ):
        polled_kick(&c.polled)


cdef bint is_busy_for_long(Look *look, Seen seen, u64 now) noexcept nogil:
    """The worker itself sees the answer then."""
    if seen != IS_BUSY:
        look.busy_ns = 0
    elif look.busy_ns == 0:
        look.busy_ns = now
    return seen == IS_BUSY and now > look.busy_ns + BUSY_NS


cdef void await_answer(Transfer *t, Spin *spin, u64 until_ns) noexcept nogil:
    cdef Look look
    cdef u64 begun = now_ns(), now = begun
    cdef Seen seen = NOTHING
    cdef bint sleeps, has_answer
    look.c = <Connection *>load_pointer(&t.answered_by)
    if look.c == NULL or not join(look.c):
        return
    look.t = t
    look.is_armed = True  # By its worker, perhaps.
    look.is_asleep = look.has_rung = False
    look.busy_ns = 0
    while load32(&t.status) == PENDING and now < until_ns:
        sleeps = not may_spin(spin, begun, now)
        seen = look_once(&look, sleeps)
        has_answer = load32(&t.status) != PENDING
        if look.is_asleep:
            if seen == NOTHING and not has_answer:
                doze(&look, until_ns - now)
            look.is_asleep = False
            store32(&look.c.lookers, 1)
        elif seen == NOTHING and not has_answer and not await_ring(look.c):
            spin_turn(spin, now)
        if has_answer or seen == OTHERS or seen == FOR_WORKER or is_busy_for_long(&look, seen, now):
            break
        if seen == IS_BUSY:
            sched_yield()
        now = now_ns()
    if now < begun + spin.most_ns:
        spin_paid(spin)
    leave(&look, seen == FOR_WORKER)  # Also if it has its outcome: what waits there need not be its answer.
