# SPDX-License-Identifier: Apache-2.0
# Taking a right back, so that nothing lands any more: mark it as revoked, then wait for whoever may
# not have seen the mark. Marked sections are the landings; tags are the rights; over RDMA a right
# that was granted is taken back by breaking the rails.

# -- marked sections

cdef inline void enter(Rail *r, Opening *o) noexcept nogil:
    """Begins a section of the rail's worker; `o` is what it lands under, NULL where no tag is asked.

    Who waits for a section reads what it is about after having seen that it is under way.
    """
    note_pointer(&r.worker.inside_link, r.link)
    note_pointer(&r.worker.inside_opening, o)
    add64(&r.worker.inside, 1)


cdef inline void leave(Rail *r) noexcept nogil:
    add64(&r.worker.inside, 1)


cdef bint concerns(Worker *w, Link *link, Opening *o) noexcept nogil:
    """Whether the section under way is the link's, and lands under the opening; NULL is any."""
    return (link == NULL or load_pointer(&w.inside_link) == link) and (
        o == NULL or load_pointer(&w.inside_opening) == o)


cdef bint quiesce(Plane *p, Link *link, Opening *o, u64 timeout_ns) noexcept nogil:
    """Returns once each such section under way at the call has ended; False when one did not in
    time. One that copies out of another process waits for that process's pages: those who wait for
    another link or tag must not wait with it."""
    cdef u64 give_up = now_ns() + timeout_ns, seen
    cdef timespec pause
    cdef u32 i, looks = 0
    pause.tv_sec = 0
    pause.tv_nsec = 20000
    for i in range(p.workers_n):
        seen = load64(&p.workers[i].inside)
        if not (seen & 1 and concerns(&p.workers[i], link, o)):
            continue
        while load64(&p.workers[i].inside) == seen:
            looks += 1
            if looks < 200:
                relax()
                continue
            if now_ns() >= give_up:
                return False
            nanosleep(&pause, NULL)
            pause.tv_nsec = min(pause.tv_nsec + pause.tv_nsec / 8, <long>1000000)
    return True


# -- tags: open, then revoked, then forgotten

cdef void opening_drop(Opening *o) noexcept nogil:
    if o != NULL and add32(&o.refs, -1) == 0:
        free(o)


cdef Opening *opening_new(u64 value) noexcept nogil:
    cdef Opening *o = <Opening *>need(sizeof(Opening))
    o.value = value
    o.is_open = o.refs = 1
    return o


cdef Opening *opening_get(Plane *p, u64 value) noexcept nogil:
    """With a reference for the caller; NULL when the tag is not known: never opened, or forgotten
    because its fence was confirmed."""
    pthread_mutex_lock(&p.tags_lock)
    cdef Opening *o = <Opening *>map_get(&p.tags, value)
    if o != NULL:
        add32(&o.refs, 1)
    pthread_mutex_unlock(&p.tags_lock)
    return o


cdef Opening *opening_find(Plane *p, u64 value) noexcept nogil:
    """With a reference for the caller; NULL when the tag is not open."""
    cdef Opening *o = opening_get(p, value)
    if o != NULL and not load32(&o.is_open):
        opening_drop(o)
        return NULL
    return o


cdef void opening_forget(Plane *p, Opening *o) noexcept nogil:
    """Its fence is confirmed. Its tag may be known anew by then, for another opening."""
    cdef Opening *known
    pthread_mutex_lock(&p.tags_lock)
    known = <Opening *>map_get(&p.tags, o.value)
    if known == o:
        map_take(&p.tags, o.value)
        opening_drop(o)
    pthread_mutex_unlock(&p.tags_lock)


# -- over RDMA: what was granted under a revoked tag counts as granted until its rails are drained

cdef bint has_grant(Link *link, Opening *o) noexcept nogil:
    """Whether the peer may still be writing under the opening. Under the link's lock."""
    cdef Arriving *a = link.undrained
    cdef u64 i
    while a != NULL:
        if a.opening == o:
            return True
        a = a.next
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a != NULL and a.bits != NULL and a.opening == o:
            return True
    return False


cdef void forget_when_drained(Link *link, Arriving *a) noexcept nogil:
    """Of a granted transfer nothing counts any more, but words of it may still land. Under the
    link's lock."""
    map_take(&link.arriving, a.id)
    if a.bits == NULL:
        opening_drop(a.opening)
        free(a)
        return
    give_slot_back(link, a)
    a.next = link.undrained
    link.undrained = a


cdef void forget_drained(Link *link) noexcept nogil:
    """Every rail that such transfers could come by is gone. Under the link's lock."""
    cdef Arriving *a
    while link.undrained != NULL:
        a = link.undrained
        link.undrained = a.next
        add32(&a.opening.granted, -1)
        opening_drop(a.opening)
        free(a)
