# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memset
from te.core.heap cimport need
from te.core.maps cimport map_free
from te.core.notes cimport lane_drop, lane_new
from te.core.notices cimport bulletin_put
from te.core.sync cimport *
from te.core.tally cimport code_of, counters_add, tally_of, LEDGERS_MAX, Tally
from te.core.worker cimport polled_kick


# -- what a transport may have nothing to do for

cdef u32 check(Link *link, bint stalled) noexcept nogil:
    return 0


cdef void nothing(Link *link) noexcept nogil:
    pass


cdef Ops plain_ops() noexcept:
    cdef Ops ops
    memset(&ops, 0, sizeof(ops))
    ops.check = check
    ops.revoke = ops.forget = nothing
    return ops


# -- links

cdef Death NO_DEATH


cdef Link *link_new(Plane *p, const Ops *ops, bint is_incoming, void *own) noexcept:
    cdef Link *link = <Link *>need(sizeof(Link))
    pthread_mutex_init(&link.lock, NULL)
    link.plane = p
    link.ops = ops
    link.own = own
    link.spin.most_ns = p.workers.of[0].spin.most_ns
    link.death = &NO_DEATH
    link.is_incoming = is_incoming
    link.refs = 1
    link.bulletin.of = link
    link.notes = lane_new()
    lock_as_caller(&p.lock)
    p.links += 1
    link.number = p.links
    link.after = <Link *>p.links_first
    if link.after != NULL:
        link.after.before = link
    p.links_first = link
    pthread_mutex_unlock(&p.lock)
    return link


cdef void link_tally(Link *link, Ledger *ledgers) noexcept nogil:
    """Under the engine's lock."""
    cdef Tally *tally = tally_of(ledgers, link.ops.name)
    cdef u32 i
    for i in range(RAILS_MAX):
        tally.sent_nbytes[i] += load64(&link.flows[i].sent_nbytes)
        tally.received_nbytes[i] += load64(&link.flows[i].received_nbytes)
    counters_add(&tally.outcomes, &link.outcomes, sizeof(Outcomes))
    if load32(&link.dead):
        tally.ended[code_of(link.death.code)] += 1


cdef void links_tally(Plane *p, Ledger *ledgers) noexcept nogil:
    cdef Link *link
    cdef u32 i
    pthread_mutex_lock(&p.lock)
    for i in range(LEDGERS_MAX):
        if p.ledgers[i].transport != NULL:
            counters_add(
                tally_of(ledgers, p.ledgers[i].transport), &p.ledgers[i].tally, sizeof(Tally))
    link = <Link *>p.links_first
    while link != NULL:
        link_tally(link, ledgers)
        link = link.after
    pthread_mutex_unlock(&p.lock)


cdef void forget(Link *link) noexcept nogil:
    """It leaves what it has counted."""
    cdef Plane *p = link.plane
    pthread_mutex_lock(&p.lock)
    link_tally(link, p.ledgers)
    if link.before == NULL:
        p.links_first = link.after
    else:
        link.before.after = link.after
    if link.after != NULL:
        link.after.before = link.before
    pthread_mutex_unlock(&p.lock)


cdef void link_drop(Link *link) noexcept nogil:
    if add32(&link.refs, -1):
        return
    forget(link)
    link.ops.release(link)
    map_free(&link.by_id)
    map_free(&link.arriving)
    lane_drop(link.notes)
    free(link.spare)
    if link.death != &NO_DEATH:
        free(link.death)
    pthread_mutex_destroy(&link.lock)
    free(link)


cdef void link_kick(Link *link) noexcept nogil:
    cdef u32 i
    for i in range(load32(&link.connections_n)):
        polled_kick(link.connections[i])


cdef void link_die(Link *link, int code, int errnum, const char *text) noexcept nogil:
    cdef Death *death
    if load32(&link.dead):
        return
    death = <Death *>need(sizeof(Death))
    death.code = code
    death.errnum = errnum
    if text != NULL:
        snprintf(death.text, TEXT_MAX, b"%s", text)
    if not swap_pointer_if(&link.death, &NO_DEATH, death):
        free(death)
    store32(&link.dead, 1)
    link_kick(link)


cdef void link_tell(Link *link) noexcept nogil:
    # The list's reference comes first: whoever reads the list may drop it at once.
    add32(&link.refs, 1)
    if not bulletin_put(&link.plane.notices, &link.bulletin):
        link_drop(link)


cdef u64 first_moved_ns(Link *link) noexcept nogil:
    cdef Transfer *t = link.first
    if t == NULL:
        return 0
    return load64(&t.progress_ns) if t.opening == NULL else max(
        load64(&t.progress_ns), load64(&t.opening.progress_ns))
