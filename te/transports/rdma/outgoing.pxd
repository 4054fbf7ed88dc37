# SPDX-License-Identifier: Apache-2.0
# The source's side of a transfer over RDMA: asked for, granted, its pieces waiting for rails, given
# up. All of this is under the link's lock but for what takes it.

from te.core.frames cimport Connection
from te.core.link cimport Link, Transfer
from te.transports.rdma.state cimport Posted

# What `Ops` and `Protocol` call.
cdef void outgoing_prepare(Transfer *t, bint is_shared) noexcept nogil
cdef void outgoing_settled(Transfer *t) noexcept nogil
cdef void outgoing_cancel(Transfer *t) noexcept nogil
# Queues questions about the transfers that may begin.
cdef void outgoing_ask(Connection *c) noexcept nogil
cdef bint outgoing_acknowledged(Connection *c) noexcept nogil
# A turn of the link's worker, without a lock: gives up all that is unfinished if `Direct.verdict` says so,
# with the destination's knowledge.
cdef void outgoing_turn(Link *link) noexcept nogil

# It has waiting pieces no more.
cdef void take_ready(Link *link, Transfer *t) noexcept nogil
# The piece waits for a rail, as the next one.
cdef void requeue(Link *link, const Posted *posted) noexcept nogil
# After whatever may have ended it.
cdef void go_on(Connection *c, Transfer *t) noexcept nogil
