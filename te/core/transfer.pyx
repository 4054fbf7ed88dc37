# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, strlen
from te.core.heap cimport need
from te.core.link cimport *
from te.core.maps cimport map_put, map_take
from te.core.notices cimport notice_put
from te.core.plane cimport CANCELLED, DONE, FAILED, PENDING
from te.core.posix cimport malloc_usable_size
from te.core.regions cimport regions_let_go
from te.core.sync cimport *
from te.core.tags cimport opening_drop
from te.core.tally cimport code_of, count
from te.core.wire cimport ABANDONED, BEGUN_MAX, LANDED, REFUSED

cdef extern from "core/stages.h" nogil:
    const uint8_t **NEXT_STAGE

cdef enum:
    SPARE_LEAST = 128 << 10  # bytes: above that malloc asks the kernel, for pages to clear
    SPARE_NBYTES = 1 << 20


# -- descriptors

cdef Block *blocks_new(Link *link, u64 n) noexcept nogil:
    # A link keeps one room of some ten thousand blocks for the next transfer: new pages cost 11 ns
    # a block, which is as much as all else of it.
    cdef Block *blocks
    if not SPARE_LEAST < n * sizeof(Block) <= SPARE_NBYTES:
        return <Block *>malloc((n + 1) * sizeof(Block))
    blocks = <Block *>swap_pointer(&link.spare, NULL)
    return <Block *>malloc(SPARE_NBYTES) if blocks == NULL else blocks


cdef void blocks_free(Link *link, Block *blocks) noexcept nogil:
    """Of `blocks_new`, or malloc's own."""
    cdef size_t room = 0 if blocks == NULL else malloc_usable_size(blocks)
    if SPARE_NBYTES <= room < 2 * SPARE_NBYTES:
        blocks = <Block *>swap_pointer(&link.spare, blocks)
    free(blocks)


# -- from the first reference to the last

cdef Transfer *transfer_new(
    Link *link, bint is_read, u64 tag, Block *blocks, u64 n, u64 total, Region **held, u32 held_n
) noexcept nogil:
    cdef Transfer *t = <Transfer *>need(sizeof(Transfer) + link.ops.transfer_bytes)
    add32(&link.refs, 1)
    t.link = link
    t.is_read = t.is_awaited = is_read
    t.tag = tag
    t.blocks = blocks
    t.n = t.asked = n
    t.total = total
    t.held = held
    t.held_n = held_n
    t.refs = 1
    t.notice.of = t
    t.own = t + 1
    t.submitted_ns = now_ns()
    return t


cdef void transfer_drop(Transfer *t) noexcept nogil:
    if add32(&t.refs, -1) == 0:
        free(t.text)
        opening_drop(t.opening)
        link_drop(t.link)
        free(t)


cdef void transfer_serve(Transfer *t) noexcept nogil:
    t.is_reply = t.is_awaited = True
    add64(&t.link.reply_blocks, t.n)
    add64(&t.link.plane.reply_blocks, t.n)


cdef void transfer_made(Transfer *t) noexcept nogil:
    cdef Link *link = t.link
    if t.is_reply and t.blocks != NULL:
        add64(&link.reply_blocks, -t.n)
        add64(&link.plane.reply_blocks, -t.n)
        if load32(&link.is_held_back) and not has_too_many_replies(link):
            store32(&link.is_held_back, 0)
            link_kick(link)
    blocks_free(link, t.blocks)
    t.blocks = NULL


cdef void let_go(Transfer *t) noexcept nogil:
    """Nothing here reads its memory again."""
    regions_let_go(t.held, t.held_n)
    transfer_made(t)
    t.link.ops.settled(t)
    t.held = NULL
    t.held_n = 0


cdef void tell(Transfer *t, u32 status, int code) noexcept nogil:
    """Counts its outcome. A link that has died is no reason: it has one."""
    cdef Link *link = t.link
    if code == LINK_DIED and link.death.code:
        code = link.death.code
    count(&link.outcomes.by_status[status], 1)
    if status == FAILED:
        count(&link.outcomes.failed[code_of(code)], 1)
    elif status == DONE:
        count(&link.outcomes.done_blocks, t.asked)
        count(&link.outcomes.done_nbytes, t.total)


cdef void transfer_settle(Transfer *t, u32 status, int code) noexcept nogil:
    let_go(t)
    t.stage = OVER
    t.code = code
    t.settled_ns = now_ns()
    if t.opening != NULL:
        store32(&t.opening.is_open, 0)
    if not t.is_reply:
        tell(t, status, code)
        add32(&t.link.unfinished, -1)
    store32(&t.status, status)
    if load32(&t.waiters):
        futex_wake_all(&t.status)
    if swap32(&t.notify, 2) == 1:
        add32(&t.refs, 1)
        notice_put(&t.link.plane.notices, &t.notice)


cdef void transfer_discard(Transfer *t) noexcept nogil:
    let_go(t)
    transfer_drop(t)


cdef void transfer_list(Transfer *t) noexcept nogil:
    cdef Link *link = t.link
    add32(&t.refs, 1)
    link.next_id += 1
    t.id = link.next_id
    t.before = link.last
    if link.last == NULL:
        link.first = t
    else:
        link.last.after = t
    link.last = t
    if link.issue == NULL:
        link.issue = t
    map_put(&link.by_id, t.id, t)
    t.is_listed = True
    link.replies += t.is_reply
    store64(&t.progress_ns, t.submitted_ns)


cdef void transfer_end(Transfer *t, u32 status, int code) noexcept nogil:
    cdef Link *link = t.link
    cdef Transfer *after = t.after
    if t.before == NULL:
        link.first = t.after
    else:
        t.before.after = t.after
    if t.after == NULL:
        link.last = t.before
    else:
        t.after.before = t.before
    if link.issue == t:
        link.issue = t.after
    map_take(&link.by_id, t.id)
    t.is_listed = False
    if t.stage != QUEUED:
        link.begun -= 1
    link.replies -= t.is_reply
    transfer_settle(t, status, code)
    if after != NULL:
        store64(&after.progress_ns, t.settled_ns)
    transfer_drop(t)


cdef Transfer *next_to_issue(Link *link) noexcept nogil:
    cdef Transfer *t = link.issue
    while t != NULL and load32(&t.cancel) and end_queued(t):
        t = link.issue
    return NULL if t != NULL and t.stage == QUEUED and link.begun >= BEGUN_MAX else t


cdef bint end_queued(Transfer *t) noexcept nogil:
    if t.stage != QUEUED:
        return False
    transfer_end(t, CANCELLED, NO_REASON)
    return True


cdef bint transfer_await(Transfer *t, u64 until_ns) noexcept nogil:
    while load32(&t.status) == PENDING and now_ns() < until_ns:
        futex_wait(&t.status, PENDING, 1000000)
    return load32(&t.status) != PENDING


cdef void fail_all(Link *link) noexcept nogil:
    link.issue = NULL
    while link.first != NULL:
        transfer_end(link.first, FAILED, LINK_DIED)


# -- its stages

cdef bint advance(Transfer *t, int happening) noexcept nogil:
    cdef uint8_t next = NEXT_STAGE[t.stage][happening]
    if next == 0:
        return False
    if t.stage == QUEUED:
        t.link.begun += 1
    t.stage = next
    return True


cdef void conclude(Transfer *t) noexcept nogil:
    if t.in_flight:
        return
    if t.stage == IS_LANDED:
        transfer_end(t, DONE, NO_REASON)
    elif t.stage == IS_REFUSED:
        transfer_end(t, FAILED, WAS_REFUSED)
    elif t.stage == IS_ABANDONED:
        if t.fault:
            transfer_end(t, FAILED, SOURCE_FAULT)
        elif t.verdict:
            transfer_end(t, FAILED, t.verdict)
        elif not t.may_land:  # Else who cancels sees first that nothing lands.
            transfer_end(t, CANCELLED, NO_REASON)


cdef bint answer(Transfer *t, uint8_t status, const uint8_t *reason, u32 count) noexcept nogil:
    if status == LANDED:
        return advance(t, LANDS)
    if status == ABANDONED:
        # Nobody has asked for that, and the trailers of its frames did not tell of a fault.
        if t.stage == SENT and not t.fault and not t.verdict:
            return False
        return advance(t, ABANDONS)
    if status == REFUSED and advance(t, REFUSES):
        free(t.text)
        t.text = <char *>need(count + 1)
        memcpy(t.text, reason, count)
        if t.opening != NULL:
            store32(&t.opening.is_open, 0)
        return True
    # A refusal can be late: the pieces of a read are refused one by one.
    return status == REFUSED and t.stage >= REFUSED_EARLY


cdef void refuse_read(Transfer *t, const char *reason) noexcept nogil:
    answer(t, REFUSED, <const uint8_t *>reason, <u32>strlen(reason))
