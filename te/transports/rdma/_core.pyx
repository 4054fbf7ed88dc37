# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# RDMA, for Python and for the workers; _core.pyi is the contract with Python.

from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memcpy, strerror
from te.core.callers cimport call_off
from te.core.channels cimport Channel, ChannelOps, channel_new, socket_ops
from te.core.engine cimport Engine
from te.core.connections cimport connections_free
from te.core.frames cimport Connection, LOST, MOVED, Moved, Protocol, frame_read
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.link cimport *
from te.core.plane cimport Plane, plane_private
from te.core.posix cimport EPOLLIN, ESHUTDOWN
from te.core.receiving cimport receiving_empty
from te.core.sync cimport *
from te.core.transfer cimport transfer_await
from te.core.wire cimport *
from te.core.worker cimport *
from te.transports.rdma.balance cimport pace_begin
from te.transports.rdma.control cimport *
from te.transports.rdma.fencing cimport *
from te.transports.rdma.incoming cimport marks_arrived, on_abandon, on_ask
from te.transports.rdma.outgoing cimport *
from te.transports.rdma.posting cimport *
from te.transports.rdma.qps cimport *
from te.transports.rdma.rails cimport *
from te.transports.rdma.state cimport *
from te.verbs.abi cimport Endpoint, VWc


import os

cdef enum:
    POLLED_MAX = 32  # completions of one look
    # Of a rail's time-out, 2 s: 0.1 s without completions is long for a rail that is fast. RoCE sends
    # a lost packet again after 67 ms.
    MOMENTS = 20
    # As many times the bytes that a rail holds: one that is slow has moved some of them by then.
    LEFT_BEHIND = 4
    LEFT_BEHIND_BYTES = 1 << 20  # at least, as a probe holds none
    ROUNDS_MAX = 8  # looks of one turn
    CANCEL_READ_NS = 300000000


# -- a turn of a queue pair

cdef bint qp_poll(Qp *q) noexcept nogil:
    """Takes completions; whether there were any."""
    cdef VWc wc[POLLED_MAX]
    cdef int n = q.e.poll_cq(q.e.cq, POLLED_MAX, wc)
    if n < 0:
        if q.link.is_incoming:
            qp_drain(q)
        else:
            qp_fail(q, POLL_FAILED, -n)
        return True
    if n and q.link.is_incoming:
        marks_arrived(q, wc, n)
    elif n:
        sends_completed(q, wc, n)
    return n > 0


cdef bint qp_turn(Qp *q) noexcept nogil:
    """Whatever it can do now; whether something moved."""
    cdef bint busy = False
    cdef int rounds = 0
    cdef Rail *r = rail_of(q)
    if q.e == NULL:
        return False
    while rounds < ROUNDS_MAX and q.e != NULL and qp_poll(q):
        busy = True
        rounds += 1
    if rounds == ROUNDS_MAX:
        polled_again(&q.polled)
    if q.e == NULL:
        return busy
    if not q.link.is_incoming:
        busy |= pieces_done(q)
    if load32(&q.e.fault):
        qp_give_up(q, QP_EVENT, load32(&q.e.fault))
    if r.state == RAIL_DRAINING:
        if q.receives == 0 or now_ns() > q.drain_until:
            qp_drained(q)
    elif carries(r) and not q.link.is_incoming:
        busy |= post_pieces(q)
    return busy


cdef bint is_awaited(Qp *q) noexcept nogil:
    """Whether its rail has a place for it: at a source for the attempt under way, at a destination for
    the newest one. An attempt may take longer than the next one; and a source whose connection broke before it had the
    answer asks again for the same one."""
    cdef Rail *r = rail_of(q)
    if q.link.is_incoming:
        return q.epoch > r.epoch or (
            q.epoch == r.epoch and q.hello >= direct_of(q.link).hellos[q.index])
    return r.state == RAIL_BUILDING and q.epoch == r.epoch


cdef void not_watched(Qp *q, int errnum) noexcept nogil:
    """Its worker cannot wait for its completions."""
    cdef char text[TEXT_MAX]
    snprintf(text, TEXT_MAX, b"epoll_ctl of its completion channel: %s", strerror(errnum))
    qp_end(q)
    if not q.link.is_incoming:
        rail_not_made(q.link, q.index, text)


cdef void on_adopted(Polled *p) noexcept nogil:
    cdef Qp *q = <Qp *>p
    cdef Direct *d = direct_of(q.link)
    cdef int errnum
    if load32(&q.link.dead) or not is_awaited(q):
        qp_end(q)
        return
    errnum = polled_attach(p, q.e.fd, EPOLLIN)
    if errnum:
        not_watched(q, errnum)
        return
    if d.qps[q.index] != NULL:  # At a destination: the source has given that one up.
        qp_end(d.qps[q.index])
    d.qps[q.index] = q
    if q.link.is_incoming:
        d.rails[q.index].epoch = q.epoch
        d.hellos[q.index] = q.hello
    rail_step(q.link, q.index, IS_TAKEN if q.link.is_incoming else IS_BUILT)
    # Only now: a fence that comes from here on finds it, and those before are told.
    if q.e.accept != NULL and q.e.accept(q.e, d.fences):
        rail_step(q.link, q.index, FAILS)
        rail_step(q.link, q.index, IS_CLOSED)
        qp_end(q)
        return
    if not q.link.is_incoming:
        post_probe(q)
    store32(&p.kicked, 1)


cdef bint on_event(Polled *p, bint is_patient) noexcept nogil:
    """Its channel is readable."""
    cdef Qp *q = <Qp *>p
    if q.e != NULL:
        q.e.take_events(q.e)
        q.armed = False
    return False


cdef bint on_turn(Polled *p, bint slept, bint is_patient) noexcept nogil:
    """If it was kicked, or its completions are not told of by an event."""
    cdef Qp *q = <Qp *>p
    cdef Devices *devices = direct_of(q.link).devices
    cdef u32 faults = load32(&devices.faults[q.local_nic])
    cdef bint is_draining
    if not is_current(q):
        return False
    cdef u32 kicks = load32(&direct_of(q.link).kicks) + load32(&devices.kicks)
    if faults != q.faults_seen:
        q.faults_seen = faults
        qp_give_up(q, load32(&devices.reasons[q.local_nic]), 0)
    if kicks != q.kicks_seen:
        q.kicks_seen = kicks
        store32(&p.kicked, 1)
    is_draining = rail_of(q).state == RAIL_DRAINING
    if is_draining:
        worker_soon(p.worker)
    if swap32(&p.kicked, 0) or not q.armed or is_draining:
        return qp_turn(q)
    return False


cdef bint on_arm(Polled *p) noexcept nogil:
    """Asks for events, then looks once more."""
    cdef Qp *q = <Qp *>p
    if not q.armed and q.e != NULL:
        q.armed = True
        if q.e.req_notify_cq(q.e.cq, 0) == 0:
            return qp_turn(q)
    return False


cdef bint has_work(Qp *q) noexcept nogil:
    """Whether something should come back."""
    return q.sequence != q.completed or q.marks > q.confirmed


cdef u64 expected_ns(Qp *q) noexcept nogil:
    """How long the rail is expected to need for what it has under way."""
    cdef double speed = direct_of(q.link).speeds[q.index]
    return <u64>(q.ring_bytes / speed * 1e9) if speed > 0 else 0


cdef u64 moved_by_others(Qp *q) noexcept nogil:
    """Bytes that the other rails of its link have carried so far."""
    cdef u64 total = 0
    cdef u32 i
    for i in range(direct_of(q.link).rails_n):
        if i != q.index:
            total += load64(&q.link.flows[i].sent_nbytes) + load64(&q.link.flows[i].received_nbytes)
    return total


cdef bint is_left_behind(Qp *q) noexcept nogil:
    """Whether other rails have moved so much since this one did that it is not slow but dead: both
    processes are at work."""
    return q.silence.lasted_ns > q.link.plane.rail_ns / MOMENTS and (
        moved_by_others(q)
        > q.others_moved + max(LEFT_BEHIND * q.ring_bytes, <u64>LEFT_BEHIND_BYTES)
    )


cdef bint on_check(Polled *p, u64 now) noexcept nogil:
    """Suspects a rail on which nothing came back for a while, and gives it up where others go on, or
    after too long: a device may try for ever. As with stalls, only silence after one more look
    counts."""
    cdef Qp *q = <Qp *>p
    cdef u64 lasted_ns, moment_ns
    cdef bint is_quiet, is_overdue, is_busy
    if q.e == NULL or q.link.is_incoming:
        return False
    is_busy = has_work(q)
    lasted_ns = silent_ns(
        q.link, &q.silence, q.progress_ns if is_busy else 0, now, q.link.plane.rail_ns)
    if lasted_ns == 0:
        q.others_moved = moved_by_others(q)
    moment_ns = max(q.link.plane.rail_ns / MOMENTS, 2 * expected_ns(q))
    is_overdue = lasted_ns > q.link.plane.rail_ns
    is_quiet = lasted_ns > min(q.link.plane.suspect_ns, moment_ns)
    if is_overdue and q.is_overdue:
        qp_fail(q, NO_COMPLETION, 0)
    elif is_quiet and q.is_quiet and is_left_behind(q):
        qp_fail(q, NO_COMPLETION, <int>(lasted_ns / 1000000))
    elif is_quiet and q.is_quiet and rail_step(q.link, q.index, IS_QUIET):
        kick_qps(q.link)
    q.is_quiet = is_quiet
    q.is_overdue = is_overdue
    return is_busy


cdef void on_release(Polled *p) noexcept nogil:
    qp_free(<Qp *>p)


# Its link is stopped by its connection.
cdef PolledOps POLLED_OPS = plain_polled_ops()
POLLED_OPS.adopted = on_adopted
POLLED_OPS.event = on_event
POLLED_OPS.turn = on_turn
POLLED_OPS.arm = on_arm
POLLED_OPS.check = on_check
POLLED_OPS.release = on_release


# -- the contract

cdef bint cancel_read(Transfer *t, u64 until_ns) noexcept nogil:
    """It ends with its last request; after a while by breaking its rails."""
    call_off(t)
    return transfer_await(t, min(until_ns, now_ns() + CANCEL_READ_NS)) or (
        fencing_drain(t.link, until_ns))


cdef bint gives_up_transfers(Link *link) noexcept nogil:
    """In place of the link, where every rail is known to be dead: the destination may be well, and a
    rail come back. Once: it has to answer that it forgets the transfers."""
    cdef Direct *d = direct_of(link)
    cdef u32 i
    if d.has_given_up:
        return False
    for i in range(RAILS_MAX):
        if not is_dead(&d.rails[i]):
            return False
    d.has_given_up = True
    pthread_mutex_lock(&link.lock)
    if link.first != NULL:
        store64(&link.first.progress_ns, now_ns())
    pthread_mutex_unlock(&link.lock)
    d.verdict = NO_RAIL  # for `outgoing_turn`
    return True


cdef bint is_losing_a_rail(Link *link) noexcept nogil:
    """A rail and its link may be silent for too long at the same check, or a check apart: where a worker did not run
    for a while, and where both have the same time-out. The rail goes first, since what it moves or gives up is not
    stalled; and its destination has a moment to answer."""
    cdef Direct *d = direct_of(link)
    cdef u64 now = now_ns(), most_ns = counts_most_ns(link.plane.workers.check_ns, link.plane.rail_ns)
    cdef u64 moment_ns = min(link.plane.rail_ns, link.plane.stall_ns)
    cdef u32 i
    for i in range(d.rails_n):
        if carries(&d.rails[i]) and silence_ends_soon(&d.qps[i].silence, link.plane.rail_ns, most_ns):
            return True
        if d.rails[i].state == RAIL_UNSETTLED and now < d.rails[i].since_ns + moment_ns:
            return True
    return False


cdef u32 check(Link *link, bint stalled) noexcept nogil:
    return LET_PASS if stalled and (is_losing_a_rail(link) or gives_up_transfers(link)) else 0


cdef void release(Link *link) noexcept nogil:
    connections_free(link)
    pthread_mutex_destroy(&direct_of(link).rails_lock)
    free(direct_of(link).table)
    free(link.own)


cdef Ops OPS = plain_ops()
OPS.name = b"rdma"
OPS.transfer_bytes = sizeof(Posting)
OPS.lands_by_device = True
OPS.prepare = outgoing_prepare
OPS.cancel = outgoing_cancel
OPS.cancel_read = cancel_read
OPS.settled = outgoing_settled
OPS.revoke = fencing_revoke
OPS.check = check
OPS.forget = fencing_forget
OPS.release = release


cdef bint received(Connection *c) noexcept nogil:
    if c.head.kind == ACK:
        return outgoing_acknowledged(c)
    if c.head.kind == ASK:
        return on_ask(c)
    if c.head.kind == END:
        return receiving_empty(c, &control_of(c).last_id)
    if c.head.kind == ABANDON:
        return on_abandon(c)
    if c.head.kind == TABLE:
        return on_table(c)
    if c.head.kind == RAIL_LOST:
        return on_lost(c)
    if c.head.kind == RAIL_CLOSED:
        on_closed(c)
    elif c.head.kind == RAIL_BROKEN:
        on_broken(c)
    else:
        on_credit(c)
    return True


cdef Moved receive(Connection *c, bint answers_only) noexcept nogil:
    cdef bint is_whole
    cdef Moved state = frame_read(c, answers_only, &is_whole)
    return state if not is_whole or received(c) else LOST


cdef Moved send(Connection *c, int turns) noexcept nogil:
    cdef Moved state = MOVED
    while turns and state == MOVED:
        turns -= 1
        if c.out_left == 0:
            outgoing_ask(c)
        state = control_send(c)
    return state


cdef void turn(Connection *c) noexcept nogil:
    if has_to_break(c.link):
        break_link(c.link)
        worker_soon(c.polled.worker)
    rails_turn(c.link)
    outgoing_turn(c.link)


cdef bint leave(Connection *c) noexcept nogil:
    return qps_end(c.link)


cdef ChannelOps SOCKET = socket_ops()
cdef Protocol PROTOCOL
PROTOCOL.over = OVER_RDMA
PROTOCOL.answers = 1 << ACK | 1 << TABLE | 1 << CREDIT  # Words of rails take the lock of those who ask for their state.
PROTOCOL.send = send
PROTOCOL.receive = receive
PROTOCOL.turn = turn
PROTOCOL.leave = leave


# -- Python

cdef Devices *devices_of(Plane *p) noexcept nogil:
    return <Devices *>plane_private(p, &OPS, sizeof(Devices))


def nic_failed(Engine engine, u32 nic, u32 code):
    cdef Devices *devices = devices_of(engine.p)
    store32(&devices.reasons[nic], code)
    add32(&devices.faults[nic], 1)
    look_at_qps(engine)


def nic_returned(Engine engine, u32 nic):
    cdef Devices *devices = devices_of(engine.p)
    add32(&devices.returns[nic], 1)
    add32(&devices.returned, 1)
    look_at_qps(engine)


def rail_changes(Engine engine):
    cdef Devices *devices = devices_of(engine.p)
    return load32(&devices.lost), load32(&devices.remade)


def look_at_qps(Engine engine):
    cdef u32 i
    add32(&devices_of(engine.p).kicks, 1)
    for i in range(engine.p.workers.n):
        worker_wake(&engine.p.workers.of[i])


cdef class RdmaLink(LinkHandle):
    def __cinit__(self, Engine engine, bint is_incoming):
        cdef Direct *own = <Direct *>need(sizeof(Direct))
        cdef u32 i
        pthread_mutex_init(&own.rails_lock, NULL)
        own.devices = devices_of(engine.p)
        for i in range(RAILS_MAX):
            rail_rest(&own.rails[i])
        self.make(engine, &OPS, is_incoming, own)

    def add_connection(self, int fd):
        return self.add(
            &PROTOCOL, channel_new(&SOCKET, fd, sizeof(Channel)), sizeof(Control),
            worker_of(self.k).index)

    def add_qp(
        self, u64 endpoint, u32 index, u32 epoch, u32 local_nic, u32 remote_nic, u64 fences, u64 hello=0
    ):
        cdef int errnum
        if index >= RAILS_MAX or local_nic >= NICS_MAX or remote_nic >= NICS_MAX:
            raise ValueError(f"no rail {index} between the devices {local_nic} and {remote_nic}")
        errnum = qp_new(
            self.k, &POLLED_OPS, <Endpoint *>endpoint, index, epoch, local_nic, remote_nic, fences,
            hello)
        if errnum:
            raise OSError(
                errnum, "the engine is closed" if errnum == ESHUTDOWN else
                f"ibv_post_recv: {os.strerror(errnum)}")

    @property
    def fences(self):
        return load64(&direct_of(self.k).fences)

    def plan_rails(
        self, list rails, double build_timeout_s, double probe_timeout_s, double backoff_s,
        double backoff_max_s, double steady_s
    ):
        cdef Direct *d = direct_of(self.k)
        cdef u64 now = now_ns()
        cdef u32 i
        if not 0 < len(rails) <= RAILS_MAX:
            raise ValueError(f"{len(rails)} rails; a link has 1 to {RAILS_MAX}")
        d.timing.build_ns = ns_of(build_timeout_s)
        d.timing.probe_ns = ns_of(probe_timeout_s)
        d.timing.backoff_ns = ns_of(backoff_s)
        d.timing.backoff_max_ns = ns_of(backoff_max_s)
        d.timing.steady_ns = ns_of(steady_s)
        d.returned_seen = load32(&d.devices.returned)
        for i, (nic, bytes_per_s, ways) in enumerate(rails):
            if not 0 <= nic < NICS_MAX or not bytes_per_s > 0 or ways < 1:
                raise ValueError(
                    f"no rail by the device {nic} with {bytes_per_s} bytes a second and {ways} ways")
            d.nics[i] = nic
            d.returns_seen[i] = load32(&d.devices.returns[nic])
            pace_begin(&d.paces[i], bytes_per_s)
            rail_begin(&d.rails[i], ways, now + self.k.number * RAILS_MAX + i, now)
        d.rails_n = len(rails)
        with nogil:
            level_speeds(d, now)

    def refuse_rail(self, u32 index, u32 epoch, str reason):
        cdef Direct *d = direct_of(self.k)
        cdef bytes text = reason.encode("utf-8", "replace")
        cdef const char *words = text
        cdef Refusal *one
        if index >= RAILS_MAX:
            raise ValueError(f"no rail {index}")
        one = &d.refusals[index]
        with nogil:  # The link's worker is not to wait for who waits for the interpreter.
            pthread_mutex_lock(&d.rails_lock)
            if not one.is_new or one.epoch <= epoch:
                one.is_new = True
                one.epoch = epoch
                snprintf(one.text, TEXT_MAX, b"%s", words)
            pthread_mutex_unlock(&d.rails_lock)
        store32(&d.is_refused, 1)
        worker_wake(worker_of(self.k))

    def rails_now(self):
        cdef Direct *d = direct_of(self.k)
        cdef Rail rails[RAILS_MAX]
        cdef double rates[RAILS_MAX]
        cdef u32 i, n = d.rails_n
        with nogil:
            pthread_mutex_lock(&d.rails_lock)
            memcpy(rails, d.rails, n * sizeof(Rail))
            memcpy(rates, d.rates, n * sizeof(double))
            pthread_mutex_unlock(&d.rails_lock)
        return [
            (rails[i].state, rails[i].epoch, rails[i].way, rails[i].failures, rails[i].downs,
             rails[i].ups, bool(rails[i].has_carried), rails[i].code, rails[i].errnum,
             (<bytes>rails[i].text).decode("utf-8", "replace"),
             load64(&d.rail_flying[i]), rates[i])
            for i in range(n)]
