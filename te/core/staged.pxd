# SPDX-License-Identifier: Apache-2.0
# Payload of a connection that goes through slots of its worker's staging, as the memory is none that
# the kernel can touch. By the connection's worker, with its lock held, and without the link's.

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection, Moved
from te.core.kinds cimport Copy, Kind
from te.core.link cimport Transfer
from te.core.staging cimport Lane, Slot, SLOTS_MAX, Span
from te.core.sync cimport u32, u64

cdef enum:
    FRAMES_AHEAD = 4  # of a connection, copied while the one before is sent

# A frame whose payload is being copied into a slot, or waits there to be sent.
cdef struct Prepared:
    Transfer *transfer  # a reference
    uint8_t *frame  # header and descriptors
    u64 items_nbytes

# What a slot that is copied out of belongs to.
cdef struct Part:
    void *of
    u64 nbytes

# `Connection.staged`.
cdef struct Staged:
    Lane out, into
    # In the order of the slots of `out`.
    Prepared frames[FRAMES_AHEAD]
    u32 first, n
    bint is_loaded  # the first is being sent
    # In the order of the slots of `into` that are being copied out of.
    Part parts[SLOTS_MAX]
    u32 parts_first, parts_n
    void *of  # what is being received belongs to that; NULL: it does not go through slots
    bint is_gathering  # mapped memory is being copied into the last slot
    u64 have  # received into the last slot
    u64 handed_over  # of the frame: what is told, or was told, as parts

# -- the source

# Frames that are prepared.
cdef u32 staged_ahead(Connection *c) noexcept nogil
# A slot for one more; NULL if there is none now. The connection is given a turn when there is.
cdef Slot *staged_take(Connection *c) noexcept nogil
cdef u64 staged_slot_bytes(Connection *c) noexcept nogil
# The frame is in `frame` with `items_nbytes` behind its header, its payload in `out` from 2 on, `n`
# ranges of `nbytes`. Takes a reference of the transfer.
cdef void staged_put(
    Connection *c, Slot *slot, Transfer *t, u64 items_nbytes, u32 n, u64 nbytes
) noexcept nogil
# Loads the next frame that is copied; False if there is none.
cdef bint staged_load(Connection *c) noexcept nogil
# What was loaded has been sent.
cdef void staged_sent(Connection *c) noexcept nogil
# The connection goes: its next prepared frame, with the reference, NULL when there is no more; once
# `staged_is_quiet`, as no copy reads for it any more, here or of another process.
cdef bint staged_is_quiet(Connection *c) noexcept nogil
cdef Transfer *staged_forget(Connection *c) noexcept nogil

# -- the destination

# A payload is to go through slots, `local` says where to.
cdef void staged_expect(Connection *c, void *of) noexcept nogil
# The payload has come, or is given up; how much of it is told as parts, by then or later.
cdef u64 staged_end(Connection *c) noexcept nogil
# A slot to receive into, from `have` on; NULL if there is none now: the connection is held up.
cdef Slot *staged_slot(Connection *c) noexcept nogil
# `nbytes` more are in the slot, and `payload_left` is what is still to come. Copies out of the slot if
# it is full, or the payload's last; False if that must not land, and was refused.
cdef bint staged_got(Connection *c, u64 nbytes) noexcept nogil
# The same, but what there is is copied at once.
cdef bint staged_push(Connection *c, u64 nbytes) noexcept nogil
# The payload lies in memory of another process that a kind has mapped. Both inside the section, with a
# slot of `staged_slot`: copies `nbytes` of it to where they belong, past the slot, which is the lane's no
# more; `payload_left` is what is still to come. Or copies some into the slot: until `staged_gathered`
# the connection is held up.
cdef void staged_move(
    Connection *c, Kind *kind, const Copy *copies, u32 n, u64 nbytes
) noexcept nogil
cdef void staged_gather(Connection *c, const Span *spans, u32 n) noexcept nogil
# The slot if it has what was gathered, and may be pushed, or holds the fault; NULL if it has not yet.
cdef Slot *staged_gathered(Connection *c) noexcept nogil
# `Protocol.copy` of a payload that comes through the channel.
cdef Moved staged_receive(Connection *c) noexcept nogil

# `Protocol.settle` and `.turn`.
cdef void staged_settle(Connection *c) noexcept nogil
cdef void staged_turn(Connection *c) noexcept nogil


cdef inline bint staged_is_open(Connection *c) noexcept nogil:
    """Whether the payload that is coming goes through slots."""
    return c.staged != NULL and (<Staged *>c.staged).of != NULL


cdef inline bint staged_is_gathering(Connection *c) noexcept nogil:
    return c.staged != NULL and (<Staged *>c.staged).is_gathering
