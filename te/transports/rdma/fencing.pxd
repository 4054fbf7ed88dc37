# SPDX-License-Identifier: Apache-2.0
# What was granted under a revoked tag counts as granted until its source has stopped, or its rails are
# drained.

from te.core.link cimport Link
from te.core.sync cimport load32, u64
from te.transports.rdma.state cimport direct_of

# What `Ops` call.
cdef void fencing_revoke(Link *link) noexcept nogil
cdef bint fencing_drain(Link *link, u64 until_ns) noexcept nogil
cdef void fencing_forget(Link *link) noexcept nogil

# A turn of the link's worker, without a lock.
cdef void break_link(Link *link) noexcept nogil


cdef inline bint has_to_break(Link *link) noexcept nogil:
    return load32(&direct_of(link).breaks_asked) != load32(&direct_of(link).breaks_done)
