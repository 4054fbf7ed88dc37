# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# The destination's worker does everything: it takes the next transfer off the source's list, checks
# what it asks for, copies, and tells the source. Either end holds a reference to the other until the
# first of the two closes. Of the two links' locks one at most is held.

from libc.stdint cimport uint8_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memmove, strlen
from te.core.callers cimport call_off
from te.core.channels cimport Channel, ChannelOps, channel_new, socket_ops
from te.core.connections cimport connections_free
from te.core.engine cimport Engine
from te.core.frames cimport Connection, LOST, Moved, Protocol, WAITING, frame_read
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.inbound cimport *
from te.core.link cimport *
from te.core.notes cimport lane_came, lane_take
from te.core.posix cimport iovec
from te.core.regions cimport Snapshot, is_registered, say_refused
from te.core.sections cimport enter, leave
from te.core.tally cimport count
from te.core.sync cimport *
from te.core.transfer cimport *
from te.core.wire cimport (
    ABANDONED, Block, Header, LANDED, NOTE_PART_MAX, OVER_TCP, REFUSED, RIGHT_READ,
)
from te.core.worker cimport polled_again

cdef enum:
    COPY_BYTES = 4 << 20  # of a section: a fence waits for one
    BLOCKS_AT_ONCE = 64


# `Link.own`.
cdef struct Loop:
    Link *other  # under the lock; NULL before both ends are there, and after one has closed
    u32 copying  # atomic, of a source: somebody reads blocks of its transfers
    # The destination's worker's: what it is copying, and how far it is.
    Transfer *transfer
    Arriving *arriving  # of a write
    u64 index, offset


cdef inline Loop *loop_of(Link *link) noexcept nogil:
    return <Loop *>link.own


cdef Link *other_of(Link *link) noexcept nogil:
    """With a reference; NULL if it is gone."""
    pthread_mutex_lock(&link.lock)
    cdef Link *other = loop_of(link).other
    if other != NULL:
        add32(&other.refs, 1)
    pthread_mutex_unlock(&link.lock)
    return other


# -- the source's side

cdef void prepare(Transfer *t, bint is_shared) noexcept nogil:
    pass


cdef void submit(Transfer *t) noexcept nogil:
    # Under the lock: behind `part` the other end's engine may be gone, with its workers.
    if not link_lock(t.link, t.link.owner):
        link_kick(t.link)  # Its worker tells the other end (`tell_other`).
        return
    if loop_of(t.link).other != NULL:
        link_kick(loop_of(t.link).other)
    pthread_mutex_unlock(&t.link.lock)


cdef void cancel(Transfer *t) noexcept nogil:
    end_queued(t)


cdef bint unread(Transfer *t, u64 until_ns) noexcept nogil:
    call_off(t)
    return transfer_await(t, until_ns)


# -- the destination's side

cdef bint is_allowed(
    Connection *c, Transfer *t, iovec *dst, iovec *src, u32 n, char *reason
) noexcept nogil:
    """Whether the copy may be made now. Inside the section."""
    cdef Link *link = c.link
    cdef Arriving *a = loop_of(link).arriving
    cdef Snapshot *s = <Snapshot *>load_pointer(&link.plane.regions.now)
    cdef Place place
    cdef u32 i
    cdef int k
    if not t.is_read:
        return may_land(link, a, NULL, NULL, 0, reason) and is_placed(
            link, a, &place, dst, n, reason)
    k = snprintf(reason, TEXT_MAX, b"the source: ")
    for i in range(n):
        if not is_registered(
            s, <u64>src[i].iov_base, src[i].iov_len, s.newest, RIGHT_READ, NULL
        ):
            say_refused(s, <u64>src[i].iov_base, src[i].iov_len, RIGHT_READ, reason + k)
            return False
    return True


cdef bint copy_some(Connection *c, Transfer *t, char *reason) noexcept nogil:
    """The next blocks; False if they may not be copied."""
    cdef Link *dst_link = t.link if t.is_read else c.link
    cdef Link *src_link = c.link if t.is_read else t.link
    cdef Loop *own = loop_of(c.link)
    cdef iovec dst[BLOCKS_AT_ONCE]
    cdef iovec src[BLOCKS_AT_ONCE]
    cdef Block *b
    cdef u64 left = COPY_BYTES
    cdef u32 n = 0, i
    cdef bint good
    while own.index < t.n and n < BLOCKS_AT_ONCE and left:
        b = &t.blocks[own.index]
        dst[n].iov_base = <void *>(b.dst + own.offset)
        src[n].iov_base = <void *>(b.src + own.offset)
        dst[n].iov_len = src[n].iov_len = min(b.nbytes - own.offset, left)
        left -= dst[n].iov_len
        own.offset += dst[n].iov_len
        if own.offset == b.nbytes:
            own.index += 1
            own.offset = 0
        n += 1
    enter(&c.polled.worker.section, c.link, NULL if own.arriving == NULL else own.arriving.opening)
    good = is_allowed(c, t, dst, src, n, reason)
    for i in range(n if good else 0):
        # An engine that is its own peer may name ranges that overlap.
        memmove(dst[i].iov_base, src[i].iov_base, dst[i].iov_len)
    leave(&c.polled.worker.section)
    if good:
        count(&src_link.flows[0].sent_nbytes, COPY_BYTES - left)
        count(&dst_link.flows[0].received_nbytes, COPY_BYTES - left)
    return good


cdef Transfer *take_next(Link *source) noexcept nogil:
    """Begins the source's next transfer, with a reference; NULL if there is none."""
    cdef Transfer *t
    pthread_mutex_lock(&source.lock)
    t = next_to_issue(source)
    if t != NULL:
        source.issue = t.after
        advance(t, BEGINS)
        t.in_flight = 1
        add32(&t.refs, 1)
    pthread_mutex_unlock(&source.lock)
    return t


cdef void put_down(Connection *c) noexcept nogil:
    """Forgets the transfer, whatever became of it."""
    cdef Loop *own = loop_of(c.link)
    if own.arriving != NULL:
        pthread_mutex_lock(&c.link.lock)
        arriving_forget(c.link, own.arriving)
        pthread_mutex_unlock(&c.link.lock)
    transfer_drop(own.transfer)
    own.transfer = NULL
    own.arriving = NULL


cdef void finish(Connection *c, Link *source, uint8_t outcome, const char *reason) noexcept nogil:
    """Tells the source, if it still waits."""
    cdef Transfer *t = loop_of(c.link).transfer
    pthread_mutex_lock(&source.lock)
    if t.is_listed:
        t.in_flight = 0
        advance(t, ALL_SENT if outcome == LANDED else GIVEN_UP)
        advance(t, SAID)  # There is nobody to be told.
        answer(t, outcome, <const uint8_t *>reason, <u32>strlen(reason))
        conclude(t)
    pthread_mutex_unlock(&source.lock)
    put_down(c)


cdef bint begin(Connection *c, Link *source, char *reason) noexcept nogil:
    """Takes up a transfer; False if there is none."""
    cdef Loop *own = loop_of(c.link)
    cdef Transfer *t = take_next(source)
    if t == NULL:
        return False
    own.transfer = t
    own.index = own.offset = 0
    if not t.is_read:
        pthread_mutex_lock(&c.link.lock)
        own.arriving = arriving_begin(c.link, t.id, t.tag, t.total, False, reason)
        pthread_mutex_unlock(&c.link.lock)
    return True


cdef bint may_copy(Link *source, Transfer *t, bint begins) noexcept nogil:
    """Keeps its blocks where they are, or lets them go again; False if they have gone."""
    cdef bint good
    pthread_mutex_lock(&source.lock)
    good = t.is_listed and loop_of(source).other != NULL
    if good:
        store64(&source.progress_ns, now_ns())
        store64(&t.progress_ns, source.progress_ns)
    store32(&loop_of(source).copying, begins and good)
    pthread_mutex_unlock(&source.lock)
    return good


cdef void serve(Connection *c, Link *source) noexcept nogil:
    """A turn: begins a transfer, or goes on with one."""
    cdef Loop *own = loop_of(c.link)
    cdef char reason[TEXT_MAX]
    cdef bint good = True
    reason[0] = 0
    if own.transfer == NULL and not begin(c, source, reason):
        return
    polled_again(&c.polled)
    if load32(&own.transfer.cancel):
        finish(c, source, ABANDONED, b"")
        return
    if not may_copy(source, own.transfer, True):
        put_down(c)  # The source has closed: that is the transfer's outcome.
        return
    if own.arriving != NULL and own.arriving.refused:
        good = False
    elif own.index < own.transfer.n:
        good = copy_some(c, own.transfer, reason)
    if good and own.index == own.transfer.n:
        if own.arriving != NULL:
            good = arriving_count(c.link, &c.polled.worker.section, own.arriving, reason)
    may_copy(source, own.transfer, False)
    if not good:
        finish(c, source, REFUSED, reason)
    elif own.index == own.transfer.n:
        finish(c, source, LANDED, b"")


# -- both sides

cdef void tell_other(Link *link) noexcept nogil:
    """Hands notes over to the other end, by the worker of this one, and tells it of transfers. Under the lock, as
    in `submit`."""
    cdef Header h
    cdef uint8_t part[NOTE_PART_MAX]
    cdef Link *other
    pthread_mutex_lock(&link.lock)
    other = loop_of(link).other
    while other != NULL and lane_take(link.notes, &h, part):
        lane_came(other.notes, &other.plane.notes, &other.peer, &h, part)
    if other != NULL and link.issue != NULL:
        link_kick(other)
    pthread_mutex_unlock(&link.lock)


cdef void turn(Connection *c) noexcept nogil:
    cdef Link *source
    if load32(&c.link.dead):
        return
    if not c.link.is_incoming:
        tell_other(c.link)
        return
    source = other_of(c.link)
    if source != NULL:
        serve(c, source)
        link_drop(source)


cdef Moved send(Connection *c, int turns) noexcept nogil:
    return WAITING


cdef Moved receive(Connection *c, bint answers_only) noexcept nogil:
    cdef bint is_whole
    cdef Moved state = frame_read(c, answers_only, &is_whole)
    if not is_whole:
        return state
    violate(c.link, b"a frame where there are none")
    return LOST


cdef Link *forgotten_by(Link *link, Link *other) noexcept nogil:
    """The other end, with the reference that this one had; NULL if it had none to that one."""
    cdef Loop *own = loop_of(link)
    cdef Link *known
    pthread_mutex_lock(&link.lock)
    known = own.other
    if other == NULL or known == other:
        own.other = NULL
    else:
        known = NULL
    pthread_mutex_unlock(&link.lock)
    return known


cdef void part(Link *link) noexcept nogil:
    """The ends know each other no more, and nothing of this one is being copied."""
    cdef Loop *own = loop_of(link)
    cdef Link *other = forgotten_by(link, NULL)
    while load32(&own.copying):  # For one turn's copies.
        relax()
    if own.transfer != NULL:
        put_down(<Connection *>link.connections[0])
    if other == NULL:
        return
    if forgotten_by(other, link) != NULL:
        link_drop(link)
    link_drop(other)


cdef void release(Link *link) noexcept nogil:
    cdef Link *other = loop_of(link).other
    if other != NULL:
        link_drop(other)
    connections_free(link)
    free(link.own)


cdef Ops OPS = plain_ops()
OPS.name = b"loopback"
OPS.lands_by_device = True  # The other side's worker is one.
OPS.prepare = prepare
OPS.submit = submit
OPS.cancel = cancel
OPS.unread = unread
OPS.close = part
OPS.release = release

cdef ChannelOps SOCKET = socket_ops()
cdef Protocol PROTOCOL
PROTOCOL.over = OVER_TCP
PROTOCOL.send = send
PROTOCOL.receive = receive
PROTOCOL.turn = turn


cdef void meet(Link *link, Link *other) noexcept nogil:
    pthread_mutex_lock(&link.lock)
    add32(&other.refs, 1)
    loop_of(link).other = other
    pthread_mutex_unlock(&link.lock)


cdef class LoopbackLink(LinkHandle):
    def __cinit__(self, Engine engine, bint is_incoming):
        self.make(engine, &OPS, is_incoming, need(sizeof(Loop)))

    def add_connection(self, int fd, LoopbackLink other=None):
        cdef bint added = self.add(&PROTOCOL, channel_new(&SOCKET, fd, sizeof(Channel)), 0)
        if added and other is not None:
            meet(other.k, self.k)
            meet(self.k, other.k)
            link_kick(self.k)  # The source may have submitted since it was welcomed.
        return added
