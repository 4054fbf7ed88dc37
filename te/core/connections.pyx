# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from te.core.channels cimport *
from te.core.frames cimport *
from te.core.heap cimport need
from te.core.inbound cimport arriving_forget_all
from te.core.link cimport *
from te.core.posix cimport *
from te.core.sync cimport *
from te.core.transfer cimport fail_all
from te.core.wire cimport RAILS_MAX, body_bytes_max
from te.core.worker cimport *

cdef enum:
    READS_PER_TURN = 32
    SENDS_PER_TURN = 8


# -- waiting

cdef bint is_held_back(Connection *c) noexcept nogil:
    """Whether it is not read from, as the peer does not take what it has asked for on the link.
    `transfer_made` gives all connections a turn once that is over. Of one that the peer has closed
    the end is behind what is to be read."""
    if not has_too_many_replies(c.link) or c.channel.hung_up:
        return False
    store32(&c.link.is_held_back, 1)
    return has_too_many_replies(c.link)  # Who has ended it meanwhile may not have seen the mark.


cdef void set_interest(Connection *c) noexcept nogil:
    cdef u32 wanted = 0
    cdef u32 lookers = load32(&c.lookers)
    if not lookers and not c.is_held_up and c.queued_n <= ACK_BACKLOG_BYTES and not is_held_back(c):
        wanted = EPOLLIN
    if c.out_left:
        wanted |= EPOLLOUT
    if wanted != c.interest:
        store32(&c.interest, wanted)
    if c.channel.ops.is_in_memory:
        # The wake-up is for who sleeps there.
        wanted = 0 if lookers == ASLEEP else EPOLLIN
    if wanted != c.watched:
        c.watched = wanted
        polled_watch(&c.polled, c.channel.fd, wanted)


cdef bint connection_arm(Connection *c) noexcept nogil:
    return channel_arm(c.channel, load32(&c.interest)) and not load32(&c.gone)


# -- its worker

cdef void link_close(Link *link) noexcept nogil:
    """Its last connection has gone. Without a lock."""
    pthread_mutex_lock(&link.lock)
    fail_all(link)
    link.ops.forget(link)
    arriving_forget_all(link)
    pthread_mutex_unlock(&link.lock)
    store32(&link.has_ended, 1)
    link_tell(link)


cdef void retire(Connection *c) noexcept nogil:
    """Closes the connection of a dying link; the last of them fails what is unfinished."""
    cdef Link *link = c.link
    if load32(&c.is_away):
        # The peer may have closed it, which epoll would tell again and again.
        polled_unwatch(&c.polled, c.channel.fd)
        return
    if c.protocol.leave != NULL and not c.protocol.leave(c):
        store32(&c.polled.kicked, 1)  # Again after a nap (`on_arm`): a device may hang for long.
        return
    store32(&c.gone, 1)
    polled_unwatch(&c.polled, c.channel.fd)
    channel_close(c.channel)
    if add32(&link.connections_alive, -1) == 0:
        link_close(link)
    add64(
        &link.plane.connections_in if link.is_incoming else &link.plane.connections_out, -1)
    polled_gone(&c.polled)


cdef Moved receive_some(Connection *c) noexcept nogil:
    """Within bounds, so that others get their turn."""
    cdef int i
    cdef Moved state = MOVED
    cdef bint hurried = False
    c.put_off = load32(&c.lookers) == ASLEEP
    if c.put_off:
        return WAITING
    for i in range(READS_PER_TURN):
        if load32(&c.link.dead) or c.queued_n > ACK_BACKLOG_BYTES:
            break
        if is_held_back(c):
            return WAITING
        worker_obey(c.polled.worker)  # What calling threads want comes before more bytes.
        state = c.protocol.receive(c, False)
        if state != MOVED:
            break
        if c.queued_n and c.out_left == 0 and not hurried:
            # Through a socket the first answer goes at once, those behind it together.
            hurried = not c.channel.ops.is_in_memory
            c.protocol.send(c, 1)
    return state


cdef bint connection_turn(Connection *c, bint rung, bint is_patient) noexcept nogil:
    """Whatever it can do now; whether bytes moved. `rung`: its descriptor is ready. `is_patient`: a
    wake-up of the other side may wait for the next turn."""
    cdef u64 before
    cdef u32 suspicion = load32(&c.link.suspicion)
    cdef bint busy = False, again
    cdef Moved state
    c.channel.is_patient = is_patient
    if not load32(&c.gone):
        if c.protocol.settle != NULL:
            c.protocol.settle(c)
        if rung and c.channel.ops.rung != NULL:
            c.channel.ops.rung(c.channel)
        before = load64(&c.link.progress_ns)
        state = receive_some(c)
        if state == TAKEN:
            return False
        again = state == MOVED
        if not load32(&c.link.dead):
            again |= c.protocol.send(c, SENDS_PER_TURN) == MOVED
        if not c.put_off:
            store32(&c.looked, suspicion)
        # It stopped for lack of turns: the kernel may have nothing to wake it with.
        if again and not load32(&c.link.dead):
            polled_again(&c.polled)
        if load32(&c.link.dead):
            retire(c)
            busy = load32(&c.gone) != 0
        else:
            set_interest(c)
            # The next word of how far copies are comes in a millisecond: too long to spin for.
            busy = load64(&c.link.progress_ns) != before and not c.is_bulk
    c.channel.is_patient = False
    return busy


cdef bint on_event(Polled *p, bint is_patient) noexcept nogil:
    return connection_turn(<Connection *>p, True, is_patient)


cdef bint on_turn(Polled *p, bint slept, bint is_patient) noexcept nogil:
    cdef Connection *c = <Connection *>p
    cdef Runner *me = p.worker.runner
    cdef bint busy = False
    if slept and load32(&c.lookers) != ASLEEP:
        channel_disarm(c.channel)
    if load32(&c.gone):
        return False
    if swap32(&p.kicked, 0) or channel_moved(c.channel, load32(&c.interest)):
        busy = connection_turn(c, False, is_patient)
        if has_left(me):
            return False
    p.worker.wakeup_due |= channel_send_wakeup(c.channel, False)
    if c.protocol.turn != NULL and not load32(&c.gone):
        c.protocol.turn(c)
    return busy


cdef bint on_look(Polled *p) noexcept nogil:
    cdef Connection *c = <Connection *>p
    return not load32(&c.gone) and channel_moved(c.channel, load32(&c.interest))


cdef bint on_arm(Polled *p) noexcept nogil:
    cdef Connection *c = <Connection *>p
    if load32(&c.link.dead) and not load32(&c.gone):
        if not load32(&c.is_away):
            p.worker.naps = True
        return False
    channel_send_wakeup(c.channel, True)
    return connection_arm(c)


cdef bint were_looked_at(Link *link) noexcept nogil:
    """All its connections, since it is suspected."""
    cdef Connection *c
    cdef u32 i
    for i in range(load32(&link.connections_n)):
        c = <Connection *>link.connections[i]
        if load32(&c.looked) != link.suspicion and not load32(&c.gone):
            return False
    return True


cdef bint has_stalled(Link *link, u64 moved_ns, u64 now) noexcept nogil:
    """By its owner. What moves its first transfer may have come while the worker of another connection did not run."""
    cdef bint was_suspect = link.is_suspect
    link.is_suspect = is_too_silent(link, &link.silence, moved_ns, now)
    if link.is_suspect and not was_suspect:
        add32(&link.suspicion, 1)
        link_kick(link)
        return False
    return link.is_suspect and were_looked_at(link)


cdef bint check_link(Link *link, u64 now, bint *stalled) noexcept nogil:
    """By its owner; whether it has a deadline. A transfer comes onto its list in the owner's turn, or kicks it."""
    cdef u64 moved_ns
    cdef u32 said
    pthread_mutex_lock(&link.lock)
    moved_ns = first_moved_ns(link)
    pthread_mutex_unlock(&link.lock)
    stalled[0] |= has_stalled(link, moved_ns, now)
    said = link.ops.check(link, stalled[0])
    if said & LET_PASS:
        stalled[0] = False
    return moved_ns != 0 or said & CHECK_AGAIN


cdef bint on_check(Polled *p, u64 now) noexcept nogil:
    """Ends a link of which nothing moved for too long, or nothing of what this connection sends: as suspected at the
    check before, as this process may have stood still until then."""
    cdef Connection *c = <Connection *>p
    cdef Link *link = c.link
    cdef bint was_suspect = c.is_suspect, again = c.out_left != 0, stalled
    c.is_suspect = is_too_silent(link, &c.silence, c.progress_ns if c.out_left else 0, now)
    stalled = c.is_suspect and was_suspect
    if p == link.connections[0]:
        again |= check_link(link, now, &stalled)
    if stalled:
        link_die(link, STALLED, 0, NULL)
    # Nobody tells one that is held up if it could go on since the engine has less to wait for.
    if c.is_held_up or c.is_suspect:
        polled_again(p)
    return again or c.is_held_up


cdef void on_stop(Polled *p) noexcept nogil:
    cdef Connection *c = <Connection *>p
    link_die(c.link, ENGINE_CLOSED, 0, NULL)
    if not load32(&c.is_away):
        polled_again(p)


cdef void on_release(Polled *p) noexcept nogil:
    link_drop((<Connection *>p).link)


cdef PolledOps POLLED_OPS = plain_polled_ops()
POLLED_OPS.event = on_event
POLLED_OPS.turn = on_turn
POLLED_OPS.look = on_look
POLLED_OPS.arm = on_arm
POLLED_OPS.check = on_check
POLLED_OPS.stop = on_stop
POLLED_OPS.release = on_release


# -- making and freeing

cdef void connection_free(Connection *c) noexcept nogil:
    c.channel.ops.free(c.channel)
    free(c.own)
    free(c.body)
    free(c.queued)
    free(c.sending)
    free(c)


cdef void connections_free(Link *link) noexcept nogil:
    cdef u32 i
    for i in range(load32(&link.connections_n)):
        connection_free(<Connection *>link.connections[i])
    store32(&link.connections_n, 0)


cdef bint count_in(Link *link, u32 n) noexcept nogil:
    """One connection more is alive; False if all that there were have gone."""
    cdef u32 alive = load32(&link.connections_alive)
    while alive or n == 0:
        if swap_if(&link.connections_alive, alive, alive + 1) == alive:
            return True
        alive = load32(&link.connections_alive)
    return False


cdef void count_out(Link *link, u32 n) noexcept nogil:
    """One that was counted could not be used."""
    if add32(&link.connections_alive, -1) == 0 and n:
        link_close(link)
    add32(&link.refs, -1)


cdef int connection_add(
    Link *link, const Protocol *protocol, Worker *w, Channel *channel, size_t own_nbytes
) noexcept:
    cdef Connection *c
    cdef u32 n
    cdef int errnum
    lock_as_caller(&w.lock)  # Others may have added one until it has that.
    n = load32(&link.connections_n)
    if n == RAILS_MAX or load32(&link.dead) or load32(&w.all.stop) or not count_in(link, n):
        pthread_mutex_unlock(&w.lock)
        channel.ops.free(channel)
        return EPIPE
    c = <Connection *>need(sizeof(Connection))
    c.polled.ops = &POLLED_OPS
    c.polled.is_in_memory = channel.ops.is_in_memory
    c.protocol = protocol
    c.link = link
    c.own = need(own_nbytes + 1)
    c.body = <uint8_t *>need(body_bytes_max(protocol.over, link.is_incoming) + 1)
    c.interest = c.watched = EPOLLIN
    c.channel = channel
    channel.is_taken = True
    # What the worker's first event finds must be there before. The others of the link find it behind that.
    add32(&link.refs, 1)
    c.flow = &link.flows[n]
    link.connections[n] = &c.polled
    add64(
        &link.plane.connections_in if link.is_incoming else &link.plane.connections_out, 1)
    errnum = worker_add(w, &c.polled, channel.fd, EPOLLIN)
    pthread_mutex_unlock(&w.lock)
    if errnum:
        add64(
            &link.plane.connections_in if link.is_incoming else &link.plane.connections_out, -1)
        channel.is_taken = False
        link.connections[n] = NULL
        connection_free(c)
        count_out(link, n)
        return errnum
    store32(&link.connections_n, n + 1)
    if n == 0:
        store_pointer(&link.owner, w)
    if load32(&link.dead):
        polled_kick(&c.polled)  # Those who have ended the link may not have seen it.
    return 0
