# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy
from te.core.frames cimport queue_frame
from te.core.heap cimport need
from te.core.link cimport *
from te.core.maps cimport map_get
from te.core.plane cimport FAILED, plane_flush
from te.core.posix cimport ENOMEM
from te.core.regions cimport *
from te.core.sending cimport check_reason, say_unexpected
from te.core.sync cimport *
from te.core.transfer cimport *
from te.core.wire cimport *
from te.core.worker cimport polled_kick
from te.transports.rdma.control cimport *
from te.transports.rdma.pieces cimport Piece, cut, pieces_for
from te.transports.rdma.state cimport *


# -- the other side's memory, as it has told

cdef bint on_table(Connection *c) noexcept nogil:
    cdef Link *link = c.link
    cdef Direct *d = direct_of(link)
    cdef Header *h = &c.head
    cdef RemoteRange *items = <RemoteRange *>c.body
    cdef RemoteRange *table
    cdef u32 i, first = 0 if h.flags & TABLE_FIRST else d.table_n
    cdef u64 end = d.table[first - 1].end if first else 0
    if first + h.count > TABLE_RANGES_MAX:
        violate(link, b"more ranges of registered memory than an engine can have")
        return False
    for i in range(h.count):
        if items[i].start < end or items[i].end <= items[i].start:
            violate(link, b"ranges of registered memory that are empty, or not in their order")
            return False
        if not 0 < items[i].rights <= REMOTE_RIGHTS:
            violate(link, b"registered memory with rights that there are not")
            return False
        end = items[i].end
    if first + h.count > d.table_room:
        table = <RemoteRange *>realloc(d.table, 2 * (first + h.count) * sizeof(RemoteRange))
        if table == NULL:
            link_die(link, BROKE, ENOMEM, NULL)
            return False
        d.table = table
        d.table_room = 2 * (first + h.count)
    if h.count:
        memcpy(d.table + first, items, h.count * sizeof(RemoteRange))
    d.table_n = first + h.count
    return True


cdef bint is_registered_there(Direct *d, u64 address, u64 nbytes) noexcept nogil:
    """Whether every byte lies in the other side's ranges, which may touch, whatever they allow."""
    cdef u32 above = remote_above(d, address)
    cdef u64 end = address
    if above:
        end = d.table[above - 1].end
        while above < d.table_n and d.table[above].start == end:
            end = d.table[above].end
            above += 1
    return address + nbytes <= end


cdef char *text_outside(Link *link, Transfer *t, u64 address, u64 nbytes) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef char *text = <char *>need(TEXT_MAX)
    cdef u32 i, near = 0
    cdef int n = snprintf(text, TEXT_MAX, b"the %s: ", b"source" if t.is_read else b"destination")
    for i in range(d.table_n):
        if gap(d.table[i].start, d.table[i].end, address) < gap(
            d.table[near].start, d.table[near].end, address
        ):
            near = i
    if is_registered_there(d, address, nbytes):
        say_not_allowed(text + n, address, nbytes, remote_right(t))
    elif d.table_n:
        say_nearest(
            text + n, address, nbytes, d.table_n, d.table[near].start, d.table[near].end)
    else:
        say_nearest(text + n, address, nbytes, 0, 0, 0)
    return text


cdef void check_remote(Link *link, Transfer *t) noexcept nogil:
    """Gives a transfer up before a byte of it moves, if one of its blocks has no place at the other side: 1 to 4 ns a
    block, 25 where each lies in another of 61 ranges."""
    cdef Direct *d = direct_of(link)
    cdef RemoteRange *table = d.table
    cdef Block *b
    cdef u64 i, address, start = 0, end = 0  # of ranges that touch, as far as was looked
    cdef u32 above = 0, right = remote_right(t)
    for i in range(t.n):
        b = &t.blocks[i]
        address = b.src if t.is_read else b.dst
        if not start <= address < end:
            above = remote_above(d, address)
            if above and table[above - 1].rights & right:
                start, end = table[above - 1].start, table[above - 1].end
        while start <= address < end < address + b.nbytes and (
            above < d.table_n and table[above].start == end and table[above].rights & right
        ):
            end = table[above].end
            above += 1
        if not start <= address < end or address + b.nbytes > end:
            t.text = text_outside(link, t, address, b.nbytes)
            t.verdict = WAS_REFUSED
            return


# -- what waits

cdef u32 nearest_rails(Direct *d, const uint8_t *distances) noexcept nogil:
    """How many rails leave by a device that is as near to the memory as any of them."""
    cdef u32 i, count = 0
    cdef uint8_t nearest = UNUSED
    for i in range(d.rails_n):
        nearest = min(nearest, distances[d.nics[i]])
    for i in range(d.rails_n):
        count += distances[d.nics[i]] == nearest
    return count


cdef void outgoing_prepare(Transfer *t, bint is_shared) noexcept nogil:
    """All of its pieces wait, in their order. Of all that it touches, the first block counts for where
    its memory is: a pool lies on one node or GPU."""
    cdef Posting *p = posting_of(t)
    cdef u32 i, most
    t.sends_at_once = 1
    if t.n == 0:
        return
    p.distances = own_key(t, t.blocks[0].dst if t.is_read else t.blocks[0].src).distances
    most = pieces_for(t.total, t.n, nearest_rails(direct_of(t.link), p.distances))
    p.pieces = <Piece *>need(most * sizeof(Piece))
    p.waiting = p.pieces_n = cut(t.blocks, t.n, t.total, most, p.pieces)
    p.waiting_bytes = t.total
    for i in range(p.pieces_n):
        p.pieces[i].next = i + 2
    p.pieces[p.pieces_n - 1].next = 0
    p.head = 1


cdef void outgoing_settled(Transfer *t) noexcept nogil:
    cdef Posting *p = posting_of(t)
    take_ready(t.link, t)
    free(p.pieces)
    p.pieces = NULL


cdef void put_ready(Link *link, Transfer *t) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef Posting *p = posting_of(t)
    if p.is_ready:
        return
    p.is_ready = True
    p.next_ready = NULL
    if d.ready == NULL:
        d.ready = t
    else:
        posting_of(d.ready_last).next_ready = t
    d.ready_last = t


cdef void take_ready(Link *link, Transfer *t) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef Posting *p = posting_of(t)
    cdef Transfer *before = NULL
    cdef Transfer *one
    if not p.is_ready:
        return
    one = d.ready
    while one != t:
        before = one
        one = posting_of(one).next_ready
    if before == NULL:
        d.ready = p.next_ready
    else:
        posting_of(before).next_ready = p.next_ready
    if d.ready_last == t:
        d.ready_last = before
    p.is_ready = False


cdef void requeue(Link *link, const Posted *posted) noexcept nogil:
    cdef Transfer *t = posted.transfer
    cdef Posting *p = posting_of(t)
    cdef Piece *one = &p.pieces[posted.piece]
    one.next = p.head
    p.head = posted.piece + 1
    p.waiting += 1
    p.waiting_bytes += one.nbytes
    p.unmarked -= posted.is_unmarked
    advance(t, MORE)
    if p.granted and not is_given_up(t):
        put_ready(link, t)


# -- its life

cdef void go_on(Connection *c, Transfer *t) noexcept nogil:
    cdef Posting *p = posting_of(t)
    if is_given_up(t) and (
        t.stage == MOVING or t.stage == STOPPING or t.stage == REFUSED_EARLY
    ):
        take_ready(c.link, t)
        advance(t, GIVEN_UP)
        if t.in_flight:
            return
        if t.is_read:
            advance(t, SENDS_ABANDON)
            advance(t, ABANDONS)  # Unless it was refused.
        else:
            if p.granted or t.stage != REFUSED_EARLY:
                queue_abandon(c, t.id, t.tag, p.pieces_n - p.waiting - p.unmarked)
            advance(t, SENDS_ABANDON)
    elif t.is_read and p.granted and p.waiting == 0 and t.in_flight == 0:
        if plane_flush(c.link.plane):
            refuse_read(t, b"what was read does not show in the memory")
        else:
            advance(t, LANDS)
    conclude(t)


cdef void outgoing_cancel(Transfer *t) noexcept nogil:
    if not end_queued(t):
        go_on(<Connection *>t.link.connections[0], t)
        polled_kick(t.link.connections[0])


cdef void give_up_all(Link *link, int verdict) noexcept nogil:
    """What is unfinished."""
    cdef Connection *c = control_lock(link)
    cdef Transfer *t = link.first
    cdef Transfer *after
    while t != NULL:
        after = t.after
        if t.n and not is_given_up(t):
            t.verdict = verdict
            if t.stage == QUEUED:
                transfer_end(t, FAILED, verdict)
            else:
                go_on(c, t)
        t = after
    control_unlock(c)


cdef void outgoing_turn(Link *link) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef int verdict = d.verdict
    if verdict:
        d.verdict = 0
        give_up_all(link, verdict)


# -- words

cdef void outgoing_ask(Connection *c) noexcept nogil:
    """May these be written? Or, of a transfer without blocks: it has come."""
    cdef Link *link = c.link
    cdef Transfer *t
    cdef Header h
    pthread_mutex_lock(&link.lock)
    t = next_to_issue(link)
    while t != NULL:
        link.issue = t.after
        advance(t, BEGINS)
        if not t.is_read:  # Whose end a completion tells the worker.
            store_pointer(&t.answered_by, c)
        h = header_of(ASK if t.n else <uint8_t>END, t.id, t.tag, t.total)
        if t.n == 0:
            advance(t, ALL_SENT)
        elif not t.is_read:
            h.count = posting_of(t).pieces_n
        queue_frame(c, &h, NULL, 0)
        t = next_to_issue(link)
    pthread_mutex_unlock(&link.lock)


cdef void grant(Connection *c, Transfer *t, u64 mark) noexcept nogil:
    """The destination lets it be written."""
    cdef Link *link = c.link
    cdef u64 now = now_ns()
    posting_of(t).granted = True
    posting_of(t).mark = <u32>mark
    store64(&link.progress_ns, now)
    store64(&t.progress_ns, now)
    if not is_given_up(t):
        check_remote(link, t)
    if not is_given_up(t):
        put_ready(link, t)
        kick_qps(link)


cdef bint take_answer(Connection *c, Transfer *t) noexcept nogil:
    """An acknowledgement for the transfer; False if it was not to come."""
    cdef Posting *p = posting_of(t)
    cdef uint8_t status = c.head.status
    if status == GRANTED:
        if t.stage == QUEUED or p.granted or not p.pieces_n:
            return False
        grant(c, t, c.head.tag)
        return True
    if t.is_read and status != REFUSED:
        return False
    if status == REFUSED and p.granted and t.stage == SENT:
        advance(t, MORE)  # The destination waits to hear that nothing more is written.
    return answer(t, status, c.body, c.head.count)


cdef bint outgoing_acknowledged(Connection *c) noexcept nogil:
    cdef Link *link = c.link
    cdef Header *h = &c.head
    cdef Transfer *t
    cdef bint known
    if not check_reason(c):
        return False
    pthread_mutex_lock(&link.lock)  # All that is RDMA's has one worker: whose turn this is has it at once.
    t = <Transfer *>map_get(&link.by_id, h.transfer)
    store64(&link.progress_ns, now_ns())
    if t != NULL:
        known = take_answer(c, t)
        if known:
            go_on(c, t)
    else:  # One that was given up is granted, or refused, late.
        known = h.status == REFUSED or (h.status == GRANTED and h.transfer <= link.next_id)
    if known and link.issue != NULL:
        store32(&c.polled.kicked, 1)  # There may be room for one more that has to begin.
    pthread_mutex_unlock(&link.lock)
    if not known:
        say_unexpected(c)
    return known
