# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport strerror
from te.core.heap cimport need
from te.core.link cimport Transfer
from te.core.maps cimport map_free, map_get, map_put, map_take
from te.core.plane cimport plane_flush
from te.core.regions cimport *
from te.core.sections cimport enter, leave
from te.core.sync cimport add32, add64, load32, load_pointer, store32
from te.core.tags cimport *
from te.core.tally cimport count
from te.core.wire cimport ARRIVING_MAX, TEXT_MAX

ctypedef unsigned long long ull


cdef Arriving *arriving_of(Link *link, u64 id) noexcept nogil:
    return <Arriving *>map_get(&link.arriving, id)


cdef Arriving *arriving_begin(
    Link *link, u64 id, u64 tag, u64 total, bint is_reply, char *text
) noexcept nogil:
    cdef Arriving *a = arriving_of(link, id)
    text[0] = 0
    if a != NULL:
        if a.tag == tag and a.is_reply == is_reply and (a.abandoned or a.total == total):
            return a
        snprintf(
            text, TEXT_MAX, b"transfer %llu with tag %llu and %llu bytes began with tag %llu and"
            b" %llu bytes", <ull>id, <ull>tag, <ull>total, <ull>a.tag, <ull>a.total)
        return NULL
    if link.arriving.count == ARRIVING_MAX:
        snprintf(text, TEXT_MAX, b"too many unfinished transfers")
        return NULL
    a = <Arriving *>need(sizeof(Arriving))
    a.id = id
    a.tag = tag
    a.total = total
    a.is_reply = is_reply
    map_put(&link.arriving, id, a)
    if is_reply:
        join_read(link, a, text)
    elif tag:
        a.opening = opening_find(&link.plane.tags, tag, &link.peer)
        if a.opening == NULL:
            say_not_open(text, TEXT_MAX, tag)
            store32(&a.refused, 1)
    return a


cdef void join_read(Link *link, Arriving *a, char *text) noexcept nogil:
    """A reply lands under its read."""
    cdef Transfer *read = <Transfer *>map_get(&link.by_id, a.tag)
    if read != NULL and read.is_read and read.opening != NULL:
        a.opening = read.opening
        add32(&a.opening.refs, 1)
    else:
        snprintf(text, TEXT_MAX, b"the read was given up")
        store32(&a.refused, 1)


cdef bint arriving_refuse(Arriving *a) noexcept nogil:
    if a.refused:
        return False
    store32(&a.refused, 1)
    return True


cdef bint arriving_announce(Arriving *a, u64 nbytes, char *text) noexcept nogil:
    a.announced += nbytes
    if a.announced <= a.total:
        return True
    snprintf(text, TEXT_MAX, b"transfer %llu of %llu bytes comes with %llu",
             <ull>a.id, <ull>a.total, <ull>a.announced)
    return False


cdef bint arriving_abandon(Arriving *a, u64 nbytes) noexcept nogil:
    if nbytes < a.announced or nbytes > a.total:
        return False
    a.total = nbytes
    a.abandoned = True
    return True


cdef bint arriving_count(Link *link, Section *section, Arriving *a, char *reason) noexcept nogil:
    cdef bint good
    cdef int problem = plane_flush(link.plane) if link.ops.lands_by_device else 0
    if problem:
        snprintf(reason, TEXT_MAX, b"what was written does not show: %s", strerror(problem))
        return False
    enter(section, link, a.opening)
    good = may_land(link, a, NULL, NULL, 0, reason)
    if good and a.opening != NULL:
        add64(&a.opening.nbytes, a.total)
        add64(&a.opening.count, 1)
    if good and not a.is_reply:
        count(&link.outcomes.landed, 1)
        count(&link.outcomes.landed_nbytes, a.total)
    leave(section)
    return good


cdef void arriving_forget(Link *link, Arriving *a) noexcept nogil:
    map_take(&link.arriving, a.id)
    arriving_free(a)


cdef void arriving_free(Arriving *a) noexcept nogil:
    opening_drop(a.opening)
    free(a.own)
    free(a)


cdef void arriving_forget_all(Link *link) noexcept nogil:
    cdef u64 i
    cdef Arriving *a
    for i in range(link.arriving.size):
        a = <Arriving *>link.arriving.values[i]
        if a != NULL:
            arriving_free(a)
    map_free(&link.arriving)


cdef bint may_land(
    Link *link, Arriving *a, Place *place, iovec *ranges, u32 n, char *reason
) noexcept nogil:
    cdef Snapshot *s
    cdef u32 i
    if a.opening != NULL and not load32(&a.opening.is_open):
        if a.is_reply:
            snprintf(reason, TEXT_MAX, b"the read was given up")
        else:
            snprintf(reason, TEXT_MAX, b"the tag 0x%llx was fenced", <ull>a.tag)
        return False
    if n == 0:
        return True
    s = <Snapshot *>load_pointer(&link.plane.regions.now)
    if s.version == place.version:
        return True
    # Only what was registered at the frame's check and still is: the same range can have been
    # registered anew, for something else. What peers may do in a region never changes.
    for i in range(n):
        if not is_registered(
            s, <u64>ranges[i].iov_base, ranges[i].iov_len, place.newest, OWN_USE, NULL
        ):
            i = snprintf(reason, TEXT_MAX, b"deregistered meanwhile: ")
            say_outside(s, <u64>ranges[0].iov_base, ranges[0].iov_len, reason + i)
            return False
    place.version = s.version
    return True


cdef bint is_placed(
    Link *link, Arriving *a, Place *place, iovec *ranges, u32 n, char *reason
) noexcept nogil:
    cdef Snapshot *s = <Snapshot *>load_pointer(&link.plane.regions.now)
    cdef u32 i, right = OWN_USE if a.is_reply else right_to_write(a.tag)
    cdef u64 at, nbytes
    cdef int k
    place.version = s.version
    place.newest = s.newest
    for i in range(n):
        at, nbytes = <u64>ranges[i].iov_base, ranges[i].iov_len
        if not is_registered(s, at, nbytes, s.newest, right, NULL):
            k = snprintf(reason, TEXT_MAX, b"the destination: ")
            say_refused(s, at, nbytes, right, reason + k)
            return False
        if not opening_covers(a.opening, at, nbytes):
            k = snprintf(reason, TEXT_MAX, b"the destination: ")
            say_not_covered(reason + k, TEXT_MAX - k, a.opening, at, nbytes)
            return False
    return True
