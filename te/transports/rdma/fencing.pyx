# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from te.core.frames cimport Connection
from te.core.inbound cimport Arriving, arriving_free
from te.core.landing cimport refuse
from te.core.link cimport NO_REASON
from te.core.maps cimport map_take
from te.core.sync cimport *
from te.core.wire cimport ANY_RAIL, TEXT_MAX
from te.core.worker cimport worker_adopt, worker_wake
from te.transports.rdma.control cimport *
from te.transports.rdma.incoming cimport give_slot_back, ungrant
from te.transports.rdma.qps cimport qp_drain, qp_fail, qps_have_gone
from te.transports.rdma.rails cimport carries, RAIL_DRAINING, READ_CANCELLED
from te.transports.rdma.state cimport *


# -- asking for it

cdef u32 ask_to_break(Link *link) noexcept nogil:
    """Has the link's worker do it; for how many fences that is."""
    cdef u32 mine = add32(&direct_of(link).breaks_asked, 1)
    worker_wake(worker_of(link))
    return mine


cdef void fencing_revoke(Link *link) noexcept nogil:
    ask_to_break(link)


cdef bint fencing_drain(Link *link, u64 until_ns) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef u64 now = now_ns()
    cdef u32 mine = ask_to_break(link), done = load32(&d.breaks_done)
    while not load32(&link.has_ended) and mine - done - 1 < <u32>1 << 31:  # `done` is below `mine`.
        if now >= until_ns:
            return False
        futex_wait(&d.breaks_done, done, min(until_ns - now, <u64>10000000))
        done = load32(&d.breaks_done)
        now = now_ns()
    return True


# -- the worker's part

cdef void break_link(Link *link) noexcept nogil:
    """For fences, until all that were asked for are done. A source is asked to stop what was granted
    under closed tags, and the rails go on; if it has not for too long, or a read of this side was
    given up, the rails are drained. A fence that comes in the middle has all of it looked at again."""
    cdef Direct *d = direct_of(link)
    cdef u32 asked = load32(&d.breaks_asked)
    cdef u64 now = now_ns()
    if load32(&link.has_ended):
        return
    if asked != d.breaks_begun:
        d.breaks_begun = asked
        d.must_drain = not link.is_incoming
        revoke_closed(link, now)
    if d.is_draining and not are_drained(link):
        return
    if d.must_drain or is_overdue(link, now):
        d.must_drain = False
        drain_all(link)
        if not are_drained(link):
            return
    if d.revoked == 0:
        store32(&d.breaks_done, d.breaks_begun)
        futex_wake_all(&d.breaks_done)


cdef void revoke_closed(Link *link, u64 now) noexcept nogil:
    """Refuses what was granted under tags that are closed by now."""
    cdef Connection *c = control_lock(link)
    cdef Arriving *a
    cdef u64 i
    cdef char reason[TEXT_MAX]
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a == NULL or granted_of(a) == NULL or a.refused or a.opening == NULL:
            continue
        if not load32(&a.opening.is_open):
            snprintf(reason, TEXT_MAX, b"the tag 0x%llx was fenced", <unsigned long long>a.tag)
            refuse(c, a, reason)
            granted_of(a).revoked_ns = now
            direct_of(link).revoked += 1
    control_unlock(c)


cdef bint is_overdue(Link *link, u64 now) noexcept nogil:
    """Whether the source has not stopped what was revoked for as long as makes a rail suspect at
    the latest; or cannot say so, without a rail."""
    cdef Direct *d = direct_of(link)
    cdef Arriving *a
    cdef u64 i
    cdef bint overdue = False, has_rail = False
    if d.revoked == 0:
        return False
    for i in range(RAILS_MAX):
        has_rail |= carries(&d.rails[i])
    pthread_mutex_lock(&link.lock)
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a != NULL and a.refused and granted_of(a) != NULL and (
            now > granted_of(a).revoked_ns + link.plane.suspect_ns
        ):
            overdue = True
    pthread_mutex_unlock(&link.lock)
    return overdue or not has_rail


cdef void forget_when_drained(Link *link, Arriving *a) noexcept nogil:
    """Of a granted transfer nothing counts any more, but words of it may still land. Under the
    link's lock."""
    cdef Direct *d = direct_of(link)
    map_take(&link.arriving, a.id)
    give_slot_back(link, a)
    (<Granted *>a.own).next = d.undrained
    d.undrained = a


cdef void forget_drained(Link *link) noexcept nogil:
    """Every rail that such transfers could come by is gone. Under the link's lock."""
    cdef Direct *d = direct_of(link)
    cdef Arriving *a
    while d.undrained != NULL:
        a = d.undrained
        d.undrained = (<Granted *>a.own).next
        add32(&a.opening.granted, -1)
        arriving_free(a)


cdef void drain_all(Link *link) noexcept nogil:
    """Nothing lands any more once every rail of now is drained; the source is told to make new
    ones."""
    cdef Direct *d = direct_of(link)
    cdef Connection *c
    cdef Arriving *a
    cdef u64 i = 0
    cdef u32 k
    # In this order: whoever adds a qp reads the number behind it.
    pthread_mutex_lock(&link.lock)
    store64(&d.fences, d.fences + link.is_incoming)
    pthread_mutex_unlock(&link.lock)
    worker_adopt(worker_of(link))
    for k in range(RAILS_MAX):
        if d.qps[k] != NULL and link.is_incoming:
            qp_drain(d.qps[k])
        elif d.qps[k] != NULL:
            qp_fail(d.qps[k], READ_CANCELLED, 0)
    c = control_lock(link)
    while i < link.arriving.size:
        a = <Arriving *>link.arriving.values[i]
        if a != NULL and a.refused and granted_of(a) != NULL:
            forget_when_drained(link, a)
            i = 0  # What comes behind may have moved up.
            continue
        i += 1
    if link.is_incoming:
        queue_broken(c, ANY_RAIL, 0, NO_REASON)
    control_unlock(c)
    d.is_draining = True


cdef bint are_drained(Link *link) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef u32 k
    if not qps_have_gone(link):
        return False
    for k in range(RAILS_MAX):
        if d.rails[k].state == RAIL_DRAINING:
            return False
    d.is_draining = False
    pthread_mutex_lock(&link.lock)
    forget_drained(link)
    pthread_mutex_unlock(&link.lock)
    return True


cdef void fencing_forget(Link *link) noexcept nogil:
    cdef Arriving *a
    cdef u64 i
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a != NULL:
            ungrant(link, a)
    forget_drained(link)
    store32(&link.has_ended, 1)  # Who waits for its rails to be drained waits no more.
    futex_wake_all(&direct_of(link).breaks_done)
