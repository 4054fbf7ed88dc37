# SPDX-License-Identifier: Apache-2.0
# Gives the pieces that wait to the rails, by the rule of balance.pxd. The link's worker's, which
# drives all of its rails.

from te.core.link cimport Link
from te.core.sync cimport u64
from te.transports.rdma.state cimport Direct

# Whether there was a piece, and a rail with room for it. What rails were given is theirs to send.
cdef bint dispatch(Link *link) noexcept nogil
# After a pace has changed. Under the link's lock.
cdef void level_speeds(Direct *d, u64 now) noexcept nogil
