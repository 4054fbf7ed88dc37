# SPDX-License-Identifier: Apache-2.0
# Payload of a connection that goes through slots of its worker's staging, as the memory is none that
# the kernel can touch. By the connection's worker, without the link's lock.

from te.core.frames cimport Connection
from te.core.kinds cimport Copy, Kind
from te.core.link cimport Transfer
from te.core.posix cimport iovec
from te.core.staging cimport Lane, Slot, SLOTS_MAX
from te.core.sync cimport u32, u64

cdef enum:
    FRAMES_AHEAD = 4  # of a connection, copied while the one before is sent

# A frame whose payload is being copied into a slot, or waits there to be sent.
cdef struct Prepared:
    Transfer *transfer  # a reference
    void *frame  # header and descriptors
    u64 frame_nbytes

# What a slot that is copied out of belongs to.
cdef struct Part:
    void *of
    u64 nbytes
    int fault  # the errno of a copy that has failed

# What a connection has of it: `Connection.own` begins with that.
cdef struct Staged:
    Lane out, into
    # In the order of the slots of `out`.
    Prepared frames[FRAMES_AHEAD]
    u32 first, n  # `n`: that are prepared
    bint is_loaded  # the first is being sent
    # In the order of the slots of `into` that are being copied out of.
    Part parts[SLOTS_MAX]
    u32 parts_first, parts_n
    void *of  # what is being received belongs to that; NULL: it does not go through slots
    bint is_gathering  # mapped memory is being copied into the last slot
    u64 have  # received into the last slot
    u64 handed_over  # of the frame: what is told, or was told, as parts

# -- the source

# A slot for one more frame; NULL if there is none now. The connection is given a turn when there is.
cdef Slot *staged_take(Connection *c) noexcept nogil
cdef u64 staged_slot_bytes(Connection *c) noexcept nogil
# A frame, whose payload lies in so many bytes of the ranges. Takes a reference of the transfer.
cdef void staged_put(
    Connection *c, Slot *slot, Transfer *t, const void *frame, u64 frame_nbytes, iovec *ranges,
    u64 nbytes
) noexcept nogil
# The next frame, of which there is one, is to be sent, and its slot; NULL if it is not copied yet. Its
# reference is the caller's.
cdef Prepared *staged_load(Connection *c, Slot **slot) noexcept nogil
# What was loaded has been sent.
cdef void staged_sent(Connection *c) noexcept nogil
# The connection goes: the transfer of its next prepared frame, with the reference, NULL when there is no
# more; once `staged_is_quiet`, as no copy reads for it any more, here or of another process.
cdef bint staged_is_quiet(Connection *c) noexcept nogil
cdef Transfer *staged_forget(Connection *c) noexcept nogil

# -- the destination

# A payload is to go through slots.
cdef void staged_expect(Connection *c, void *of) noexcept nogil
# The payload has come, or is given up; how much of it is told as parts, by then or later.
cdef u64 staged_end(Connection *c) noexcept nogil
# A slot to receive into, from `have` on; NULL if there is none now: the connection is held up.
cdef Slot *staged_slot(Connection *c) noexcept nogil
# Gives it back: what it has is not to land.
cdef void staged_return(Connection *c) noexcept nogil
# Inside the section of `opening`: begins to copy what the slot has to the next of these ranges.
cdef void staged_scatter(Connection *c, iovec *ranges, void *opening) noexcept nogil
# Inside it, of memory of another process that a kind has mapped, with a slot of `staged_slot`: copies
# `nbytes` of it to where they belong, past the slot, which is the lane's no more. Or copies what the copies name
# into the slot, wherever they lead: until `staged_gathered` the connection is held up.
cdef void staged_move(
    Connection *c, Kind *kind, const Copy *copies, u32 n, u64 nbytes, void *opening
) noexcept nogil
cdef void staged_gather(Connection *c, Kind *kind, const Copy *copies, u32 n, void *opening) noexcept nogil
# The slot if it has what was gathered, and may be scattered, or holds the fault; NULL if not yet.
cdef Slot *staged_gathered(Connection *c) noexcept nogil
# Whether others wait for a slot.
cdef bint staged_is_scarce(Connection *c) noexcept nogil
# The next copy to where bytes belong that is over; False if there is none.
cdef bint staged_done(Connection *c, Part *part) noexcept nogil

# `Protocol.turn`.
cdef void staged_turn(Connection *c) noexcept nogil


cdef inline bint staged_is_open(Connection *c) noexcept nogil:
    """Whether the payload that is coming goes through slots."""
    return (<Staged *>c.own).of != NULL


cdef inline bint staged_is_gathering(Connection *c) noexcept nogil:
    return (<Staged *>c.own).is_gathering
