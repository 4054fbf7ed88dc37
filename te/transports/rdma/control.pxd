# SPDX-License-Identifier: Apache-2.0
# The connection of a link over RDMA, and the words that go over it: small frames and no payload.

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection, Moved
from te.core.link cimport Link
from te.core.sync cimport u32, u64
from te.core.wire cimport PieceId

# `Connection.own`.
cdef struct Control:
    u64 last_id  # of the transfers that the source has begun
    u64 sending_n  # of what is being sent

# Sends what is queued, in one call; WAITING if that was not all, or nothing.
cdef Moved control_send(Connection *c) noexcept nogil

# The link's connection, with the link's lock. In the turn of the link's worker.
cdef Connection *control_lock(Link *link) noexcept nogil
# Sends at once what was queued meanwhile.
cdef void control_unlock(Connection *c) noexcept nogil
# Has the link's queue pairs look for something to send. Any thread.
cdef void kick_qps(Link *link) noexcept nogil

# A word about one rail, with a list of pieces.
cdef void queue_pieces(
    Connection *c, uint8_t kind, u64 rail, u64 epoch, PieceId *items, u32 n
) noexcept nogil
cdef void queue_broken(Connection *c, u64 rail, u64 epoch, u32 why) noexcept nogil
cdef void queue_grant(Connection *c, u64 number, u64 mark) noexcept nogil
cdef void queue_credit(Connection *c, u64 rail, u64 epoch, u64 marks) noexcept nogil
cdef void queue_abandon(Connection *c, u64 number, u64 tag, u64 pieces) noexcept nogil
# The memory that is registered for peers, if it has changed since the last time or the source needs
# more keys: of regions that allow it something that it has asked for.
cdef void tell_table(Connection *c, u32 right) noexcept nogil


cdef inline Control *control_of(Connection *c) noexcept nogil:
    return <Control *>c.own
