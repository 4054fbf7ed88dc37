# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.link cimport Link
from te.core.plane cimport plane_quiesce
from te.core.sync cimport *
from te.core.tags cimport opening_admits


cdef void withdraw(Plane *p, Opening *o) noexcept nogil:
    """Tells the owners of all links that the opening is for."""
    cdef Link *link
    pthread_mutex_lock(&p.lock)
    link = <Link *>p.links_first
    while link != NULL:
        if link.is_incoming and opening_admits(o, &link.peer):
            link.ops.revoke(link)
        link = link.after
    pthread_mutex_unlock(&p.lock)


cdef bint fence_opening(Plane *p, Opening *o, u64 until_ns) noexcept nogil:
    if not plane_quiesce(p, NULL, o, 0, 0, until_ns):
        return False
    # Behind that nothing is granted any more. Who fences once more asks nobody again.
    if load32(&o.granted) and not swap32(&o.is_withdrawn, 1):
        withdraw(p, o)
    while load32(&o.granted):
        if not look_later(until_ns, LOOK_NS):
            return False
    return True
