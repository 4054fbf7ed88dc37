# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.heap cimport need
from te.core.inbound cimport Arriving, arriving_of
from te.core.link cimport *
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.wire cimport *
from te.core.worker cimport (
    polled_again, polled_gone, polled_unwatch, worker_add, worker_adopt, worker_by, worker_wake,
)
from te.transports.rdma.control cimport *
from te.transports.rdma.outgoing cimport go_on, requeue
from te.transports.rdma.rails cimport *
from te.transports.rdma.state cimport *
from te.verbs.abi cimport VRecvWr

cdef enum:
    DRAIN_NS = 200000000


# -- making and freeing

cdef int qp_new(
    Link *link, const PolledOps *ops, Endpoint *e, u32 index, u32 epoch, u32 local_nic,
    u32 remote_nic, u64 fences, u64 hello
) noexcept:
    cdef Worker *w = worker_of(link)
    cdef Qp *q = <Qp *>need(sizeof(Qp))
    cdef u32 i
    cdef int errnum
    q.polled.ops = ops
    q.link = link
    q.e = e
    q.index, q.epoch, q.fences, q.hello = index, epoch, fences, hello
    q.local_nic, q.remote_nic = local_nic, remote_nic
    q.faults_seen = load32(&direct_of(link).devices.faults[local_nic])
    q.progress_ns = now_ns()
    q.credit = RECEIVES
    q.confirmed = 0 if e.is_iwarp else <u64>-1
    if link.is_incoming:
        errnum = post_receives(q, RECEIVES)
        if errnum:
            free(q)
            return errnum
    else:
        q.wrs = <VSendWr *>need(e.send_depth * sizeof(VSendWr))
        q.sges = <VSge *>need(e.send_depth * sizeof(VSge))
        for i in range(e.send_depth):
            q.wrs[i].next = &q.wrs[i + 1]
            q.wrs[i].sg_list = &q.sges[i]
    add32(&link.refs, 1)
    lock_as_caller(&w.lock)
    errnum = worker_add(w, &q.polled, -1, 0)
    pthread_mutex_unlock(&w.lock)
    if errnum:
        q.e = NULL
        qp_free(q)
        return errnum
    worker_wake(w)
    return 0


cdef int post_receives(Qp *q, u32 n) noexcept nogil:
    cdef VRecvWr wrs[RECEIVES]
    cdef VSge sges[RECEIVES]
    cdef VRecvWr *bad = NULL
    cdef u32 i, slot
    cdef int errnum
    if n == 0:
        return 0
    for i in range(n):
        slot = (q.receives_turn + i) % RECEIVES
        wrs[i].wr_id = slot
        wrs[i].next = &wrs[i + 1] if i + 1 < n else NULL
        wrs[i].num_sge = 0
        wrs[i].sg_list = &sges[i]
        if q.e.is_iwarp:
            sges[i].addr = <u64>(q.e.scratch + 8 * slot)
            sges[i].length = 8
            sges[i].lkey = q.e.scratch_lkey
            wrs[i].num_sge = 1
    errnum = q.e.post_recv(q.e.qp, wrs, &bad)
    if errnum == 0:
        q.receives += n
        q.receives_turn += n
    return errnum


cdef bint is_destroyed(Qp *q) noexcept nogil:
    """Its device's queue pair, if it has it still. False if the device has not done it."""
    if q.e != NULL:
        polled_unwatch(&q.polled, q.e.fd)
        if q.e.release(q.e):
            return False
        q.e = NULL
    return True


cdef void let_go(Qp *q) noexcept nogil:
    """Of its device's queue pair, if it has it still."""
    cdef Undead *one
    if is_destroyed(q):
        return
    one = <Undead *>need(sizeof(Undead))
    one.e, one.next = q.e, direct_of(q.link).undead
    direct_of(q.link).undead = one
    q.e = NULL


cdef bint qps_have_gone(Link *link) noexcept nogil:
    cdef Undead **at = &direct_of(link).undead
    cdef Undead *one
    while at[0] != NULL:
        one = at[0]
        if one.e.release(one.e):
            at = &one.next
        else:
            at[0] = one.next
            free(one)
    return direct_of(link).undead == NULL


cdef void qp_free(Qp *q) noexcept nogil:
    cdef Link *link = q.link
    let_go(q)
    free(q.wrs)
    free(q.sges)
    free(q.lost)
    free(q)
    link_drop(link)


cdef void qp_end(Qp *q) noexcept nogil:
    cdef Direct *d = direct_of(q.link)
    let_go(q)
    polled_gone(&q.polled)
    if is_current(q):
        d.qps[q.index] = NULL


cdef bint qps_end(Link *link) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef u32 i
    for i in range(RAILS_MAX):
        if d.qps[i] != NULL:
            qp_end(d.qps[i])
    pthread_mutex_lock(&d.rails_lock)
    for i in range(RAILS_MAX):
        rail_rest(&d.rails[i])
    pthread_mutex_unlock(&d.rails_lock)
    return qps_have_gone(link)


cdef void qp_moved(Qp *q, u64 now) noexcept nogil:
    q.progress_ns = now
    direct_of(q.link).has_given_up = False
    if rail_of(q).state == RAIL_SUSPECT:
        rail_step(q.link, q.index, MOVES)


# -- the life of a rail

cdef bint rail_step(Link *link, u32 index, int happening) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef Rail *r = &d.rails[index]
    cdef bint has_carried = carries(r), has_changed
    pthread_mutex_lock(&d.rails_lock)
    has_changed = rail_happens(r, &d.timing, happening, now_ns())
    pthread_mutex_unlock(&d.rails_lock)
    if not has_changed or link.is_incoming:
        return has_changed
    if happening == FAILS and has_carried:
        add32(&d.devices.lost, 1)
    elif happening == ANSWERS and r.ups > 1:
        add32(&d.devices.remade, 1)
    link_tell(link)
    return True


cdef void blame(Direct *d, u32 index, int code, int errnum, const char *text) noexcept nogil:
    pthread_mutex_lock(&d.rails_lock)
    rail_blame(&d.rails[index], code, errnum, text)
    pthread_mutex_unlock(&d.rails_lock)


cdef void rail_not_made(Link *link, u32 index, const char *text) noexcept nogil:
    blame(direct_of(link), index, ATTEMPT_FAILED, 0, text)
    rail_step(link, index, NOT_MADE)


cdef void take_refusals(Link *link) noexcept nogil:
    """Attempts that made nothing. Those that are too late say nothing of the one under way."""
    cdef Direct *d = direct_of(link)
    cdef Refusal one
    cdef u32 i
    for i in range(d.rails_n):
        pthread_mutex_lock(&d.rails_lock)
        one = d.refusals[i]
        d.refusals[i].is_new = False
        pthread_mutex_unlock(&d.rails_lock)
        if one.is_new and one.epoch == d.rails[i].epoch and d.rails[i].state == RAIL_BUILDING:
            rail_not_made(link, i, one.text)


cdef void take_returns(Link *link) noexcept nogil:
    """Ports that have their link again: what waits for one of them waits no longer."""
    cdef Direct *d = direct_of(link)
    cdef u32 i, count
    for i in range(d.rails_n):
        count = load32(&d.devices.returns[d.nics[i]])
        if count != d.returns_seen[i]:
            d.returns_seen[i] = count
            pthread_mutex_lock(&d.rails_lock)
            rail_hurry(&d.rails[i], &d.timing, now_ns())
            pthread_mutex_unlock(&d.rails_lock)


cdef void rail_tick(Link *link, u32 index, u64 now) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef Rail *r = &d.rails[index]
    if now < rail_due(r, &d.timing):
        return
    if rail_late(r) == FAILS:
        qp_fail(d.qps[index], NO_ANSWER, 0)
        return
    if r.state == RAIL_BUILDING:
        blame(d, index, NOT_BUILT, 0, NULL)
    rail_step(link, index, rail_late(r))


cdef void rails_turn(Link *link) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef u32 i, returned = load32(&d.devices.returned), n = load32(&d.rails_n)
    cdef u64 now, due = NEVER_NS
    if n == 0 or load32(&link.dead):
        return
    if load32(&d.is_refused) and swap32(&d.is_refused, 0):
        take_refusals(link)
    if returned != d.returned_seen:
        d.returned_seen = returned
        take_returns(link)
    for i in range(n):
        if d.broken[i]:
            if d.qps[i] != NULL:
                qp_fail(d.qps[i], PEER_BROKE, d.broken[i] - 1)
            d.broken[i] = 0
        if rail_due(&d.rails[i], &d.timing) != NEVER_NS:
            now = now_ns()
            rail_tick(link, i, now)
            due = min(due, rail_due(&d.rails[i], &d.timing))
    if due != NEVER_NS:
        worker_by(worker_of(link), due)


# -- the source's end

cdef void qp_fail(Qp *q, int code, int errnum) noexcept nogil:
    cdef PieceId items[POSTED_MAX]
    cdef Posted *one
    cdef Connection *c
    cdef u32 i, n = 0
    if not is_current(q) or q.e == NULL:
        return
    let_go(q)
    blame(direct_of(q.link), q.index, code, errnum, NULL)
    rail_step(q.link, q.index, FAILS)
    q.unbuilt = q.unbuilt_blocks = 0
    q.is_building = False
    for i in range(q.ring_n):
        one = &q.ring[(q.ring_first + i) % POSTED_MAX]
        if not one.transfer.is_read:
            items[n].transfer = one.transfer.id
            items[n].piece = one.piece
            n += 1
    c = control_lock(q.link)
    queue_pieces(c, RAIL_LOST, q.index, q.epoch, items, n)
    control_unlock(c)


cdef void qp_give_up(Qp *q, int code, int errnum) noexcept nogil:
    cdef Connection *c
    if not q.link.is_incoming:
        qp_fail(q, code, errnum)
    elif is_current(q) and rail_of(q).state == RAIL_UP:
        c = control_lock(q.link)
        queue_broken(c, q.index, q.epoch, code)
        qp_drain(q)
        control_unlock(c)


cdef bint is_listed_in(PieceId *items, u32 n, u64 number, u64 piece) noexcept nogil:
    cdef u32 i
    for i in range(n):
        if items[i].transfer == number and items[i].piece == piece:
            return True
    return False


cdef void on_closed(Connection *c) noexcept nogil:
    """The destination has closed its end of a lost rail: the body says what had landed through it.
    The rest is written again."""
    cdef Link *link = c.link
    cdef Direct *d = direct_of(link)
    cdef Qp *q = d.qps[c.head.transfer]
    cdef Posted *one
    cdef Transfer *t
    if q == NULL or q.epoch != c.head.tag or rail_of(q).state != RAIL_UNSETTLED:
        return
    pthread_mutex_lock(&link.lock)
    while q.ring_n:
        one = take_posted(q)
        t = one.transfer
        if t.is_read or not is_listed_in(
            <PieceId *>c.body, c.head.count, t.id, one.piece
        ):
            requeue(link, one)
        else:
            count(&link.flows[q.index].sent_nbytes, one.nbytes)
        go_on(c, t)
    pthread_mutex_unlock(&link.lock)
    rail_step(link, q.index, IS_CLOSED)
    qp_end(q)
    kick_qps(link)


cdef void on_broken(Connection *c) noexcept nogil:
    """The destination has broken one rail, or by a fence all it had until then."""
    cdef Link *link = c.link
    cdef Header *h = &c.head
    cdef Direct *d = direct_of(link)
    cdef Qp *q
    cdef u32 i
    pthread_mutex_lock(&link.lock)
    store64(&d.fences, max(d.fences, h.total))
    pthread_mutex_unlock(&link.lock)
    for i in range(RAILS_MAX):
        q = d.qps[i]
        if q == NULL or q.e == NULL:
            continue
        if (h.transfer == ANY_RAIL and q.fences < h.total) or (
            h.transfer == i and h.tag == q.epoch
        ):
            d.broken[i] = 1 + <u32>h.status  # for `rails_turn`
    kick_qps(link)


# -- the destination's end

cdef void qp_drain(Qp *q) noexcept nogil:
    if not is_current(q) or rail_of(q).state != RAIL_UP:
        return
    q.e.to_error(q.e)
    rail_step(q.link, q.index, DRAINS)
    q.drain_until = now_ns() + DRAIN_NS
    polled_again(&q.polled)


cdef void qp_drained(Qp *q) noexcept nogil:
    cdef Connection *c
    if not is_destroyed(q):
        return
    rail_step(q.link, q.index, IS_DRAINED)
    if q.lost_asked:
        c = control_lock(q.link)
        answer_lost(c, q.index, q.epoch, q.lost, q.lost_n)
        control_unlock(c)
        rail_step(q.link, q.index, IS_CLOSED)
        qp_end(q)


cdef bint has_landed(Link *link, PieceId *item) noexcept nogil:
    """Of a piece that was checked by `has_asked`: the number of a transfer is never used again, so it
    has ended since, or is still the same one."""
    cdef Arriving *a = arriving_of(link, item.transfer)
    cdef Granted *g = NULL if a == NULL else granted_of(a)
    return g == NULL or g.bits[item.piece >> 6] >> (item.piece & 63) & 1


cdef void answer_lost(
    Connection *c, u64 rail, u64 epoch, PieceId *items, u32 n
) noexcept nogil:
    """Says which of the pieces have landed. Under the link's lock."""
    cdef PieceId landed[POSTED_MAX]
    cdef u32 i, k = 0
    for i in range(n):
        if has_landed(c.link, &items[i]):
            landed[k] = items[i]
            k += 1
    tell_table(c, 0)
    queue_pieces(c, RAIL_CLOSED, rail, epoch, landed, k)


cdef bint has_asked(Connection *c, PieceId *item) noexcept nogil:
    """Whether the source can have posted such a piece: of a transfer that it has asked for, and
    that has so many pieces if it is unfinished. Under the link's lock."""
    cdef Arriving *a = arriving_of(c.link, item.transfer)
    cdef u64 pieces = PIECES_MAX
    if a != NULL:
        pieces = 0 if granted_of(a) == NULL else granted_of(a).pieces
    return item.transfer <= control_of(c).last_id and item.piece < pieces


cdef bint on_lost(Connection *c) noexcept nogil:
    """The source has given up its end of a rail."""
    cdef Link *link = c.link
    cdef Header *h = &c.head
    cdef PieceId *items = <PieceId *>c.body
    cdef Qp *q
    cdef u32 i
    cdef bint good
    # The source may have used this end before the worker has it: its device answers a probe by itself.
    worker_adopt(worker_of(link))
    q = direct_of(link).qps[h.transfer]
    good = q == NULL or q.epoch != h.tag or not q.lost_asked
    pthread_mutex_lock(&link.lock)
    for i in range(h.count):
        good &= has_asked(c, &items[i])
    if good and q != NULL and q.epoch == h.tag and q.e != NULL:
        q.lost = <PieceId *>need((h.count + 1) * sizeof(PieceId))
        memcpy(q.lost, items, h.count * sizeof(PieceId))
        q.lost_n = h.count
        q.lost_asked = True
        qp_drain(q)
    elif good:
        answer_lost(c, h.transfer, h.tag, items, h.count)
        if q != NULL and q.epoch == h.tag:
            rail_step(link, q.index, IS_CLOSED)
            qp_end(q)
    pthread_mutex_unlock(&link.lock)
    if not good:
        violate(link, b"it lost a rail or a piece that it cannot have")
    return good
