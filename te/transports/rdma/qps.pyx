# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.heap cimport need
from te.core.inbound cimport Arriving, arriving_of
from te.core.landing cimport Landings
from te.core.link cimport *
from te.core.plane cimport plane_private
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.wire cimport *
from te.core.worker cimport polled_again, polled_gone, polled_unwatch, worker_add, worker_wake
from te.transports.rdma.control cimport *
from te.transports.rdma.outgoing cimport go_on, requeue
from te.transports.rdma.state cimport *
from te.verbs.abi cimport VRecvWr

cdef enum:
    DRAIN_NS = 200000000


# -- making and freeing

cdef int qp_new(
    Link *link, const PolledOps *ops, Endpoint *e, u32 index, u32 epoch, u32 local_nic,
    u32 remote_nic, u64 fences
) noexcept nogil:
    cdef Worker *w = direct_of(link).worker
    cdef Qp *q = <Qp *>need(sizeof(Qp))
    cdef u32 i
    cdef int errnum
    q.polled.ops = ops
    q.link = link
    q.devices = <Devices *>plane_private(link.plane, link.ops, sizeof(Devices))
    q.e = e
    q.index, q.epoch, q.fences = index, epoch, fences
    q.local_nic, q.remote_nic = local_nic, remote_nic
    q.faults_seen = load32(&q.devices.faults[local_nic])
    q.progress_ns = now_ns()
    q.credit = RECEIVES
    q.confirmed = 0 if e.is_iwarp else <u64>-1
    if link.is_incoming:
        q.state = QP_UP
        errnum = post_receives(q, RECEIVES)
        if errnum:
            free(q)
            return errnum
    else:
        q.state = QP_PROBE
        q.wrs = <VSendWr *>need(e.send_depth * sizeof(VSendWr))
        q.sges = <VSge *>need(e.send_depth * sizeof(VSge))
        for i in range(e.send_depth):
            q.wrs[i].next = &q.wrs[i + 1]
            q.wrs[i].sg_list = &q.sges[i]
    add32(&link.refs, 1)
    worker_add(w, &q.polled, -1, 0)
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


cdef void let_go(Qp *q) noexcept nogil:
    """Of its device's queue pair, if it has it still."""
    if q.e != NULL:
        polled_unwatch(&q.polled, q.e.fd)
        q.e.release(q.e)
        q.e = NULL


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
    if q.state == QP_DRAIN:
        d.worker.restless -= 1
    q.state = QP_GONE
    polled_gone(&q.polled)
    if d.qps[q.index] == q:
        d.qps[q.index] = NULL


cdef void qps_end(Link *link) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef u32 i
    for i in range(RAILS_MAX):
        if d.qps[i] != NULL:
            qp_end(d.qps[i])
    if d.is_breaking:
        d.is_breaking = False
        d.worker.restless -= 1
    store32(&link.has_ended, 1)
    futex_wake_all(&d.breaks_done)


cdef void qp_moved(Qp *q, u64 now) noexcept nogil:
    q.progress_ns = now
    direct_of(q.link).has_outlasted = False
    if q.suspect:
        q.suspect = False
        link_tell(q.link, q.index, q.epoch, RAIL_MOVED, 0)


# -- the source's end

cdef void qp_fail(Qp *q, int code, int errnum) noexcept nogil:
    cdef PieceId items[POSTED_MAX]
    cdef Posted *one
    cdef Connection *c
    cdef u32 i, n = 0
    if q.state != QP_UP and q.state != QP_PROBE:
        return
    let_go(q)
    q.state = QP_LOST
    q.progress_ns = now_ns()  # The time of the destination's answer begins now.
    q.code = code
    q.errnum = errnum
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
    if q == NULL or q.epoch != c.head.tag or q.state != QP_LOST:
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
    link_tell(link, q.index, q.epoch, q.code, q.errnum)
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
    d.fences = max(d.fences, h.total)
    pthread_mutex_unlock(&link.lock)
    for i in range(RAILS_MAX):
        q = d.qps[i]
        if q == NULL or q.e == NULL:
            continue
        if (h.transfer == ANY_RAIL and q.fences < h.total) or (
            h.transfer == i and h.tag == q.epoch
        ):
            # The connection's lock is held here: `qp_fail` takes it.
            store32(&q.doomed, <u32>h.status << 8 | PEER_BROKE)
            polled_again(&q.polled)
    kick_qps(link)


# -- the destination's end

cdef void qp_drain(Qp *q) noexcept nogil:
    if q.state != QP_UP:
        return
    q.e.to_error(q.e)
    q.state = QP_DRAIN
    q.drain_until = now_ns() + DRAIN_NS
    q.polled.worker.restless += 1
    polled_again(&q.polled)


cdef void qp_drained(Qp *q) noexcept nogil:
    cdef Connection *c
    q.polled.worker.restless -= 1
    let_go(q)
    q.state = QP_LOST
    if q.lost_asked:
        c = control_lock(q.link)
        answer_lost(c, q.index, q.epoch, q.lost, q.lost_n)
        control_unlock(c)
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
    return item.transfer <= (<Landings *>c.own).last_id and item.piece < pieces


cdef bint on_lost(Connection *c) noexcept nogil:
    """The source has given up its end of a rail."""
    cdef Link *link = c.link
    cdef Header *h = &c.head
    cdef PieceId *items = <PieceId *>c.body
    cdef Qp *q = direct_of(link).qps[h.transfer]
    cdef u32 i
    cdef bint good = q == NULL or q.epoch != h.tag or not q.lost_asked
    pthread_mutex_lock(&link.lock)
    for i in range(h.count):
        good &= has_asked(c, &items[i])
    if good and q != NULL and q.epoch == h.tag and (q.state == QP_UP or q.state == QP_DRAIN):
        q.lost = <PieceId *>need((h.count + 1) * sizeof(PieceId))
        memcpy(q.lost, items, h.count * sizeof(PieceId))
        q.lost_n = h.count
        q.lost_asked = True
        qp_drain(q)
    elif good:
        answer_lost(c, h.transfer, h.tag, items, h.count)
        if q != NULL and q.epoch == h.tag:
            qp_end(q)
    pthread_mutex_unlock(&link.lock)
    if not good:
        violate(link, b"it lost a rail or a piece that it cannot have")
    return good
