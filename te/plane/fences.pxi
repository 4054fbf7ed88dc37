# SPDX-License-Identifier: Apache-2.0
# Over RDMA what was granted under a revoked tag counts as granted until its rails are drained.

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
