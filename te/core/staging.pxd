# SPDX-License-Identifier: Apache-2.0
# Staging: for memory that neither the processor nor the kernel can touch. A ring of pinned host memory,
# cut into slots, between such memory and any byte channel. Copies overlap with the network, since a
# channel has several slots under way at once.
#
#   source:       lane_take, slot_gather (memory to slot) ... SLOT_COPIED: send it ... lane_give
#   destination:  lane_take, receive into the slot, slot_scatter (slot to memory) ... SLOT_COPIED: the
#                 bytes have landed and may be counted ... lane_give
#   destination of memory that it has mapped: lane_take, slot_move (past the slot) ... SLOT_COPIED, ...
#
# Nothing here waits. The thread that uses the lanes calls `staging_poll` while `staging_copying` is
# not 0, and may sleep for 50 us at most meanwhile (no descriptor becomes readable when a device is
# ready). A staging serves one direction: if what is to be sent could take all slots, two engines that
# write to each other might both wait for ever for one to receive into.
#
# A copy cannot be recalled. One out of a slot is a landing, also while no worker is in a section; one
# into a slot reads from the source's memory. So who revokes an opening, or gives memory back, marks
# the opening as revoked, waits for the sections (te/core/sections.pxd), takes `staging_mark`, and then
# asks `staging_ended` until it says so or the time is over. What gathers or scatters does so inside a
# section, after it has seen that the opening is not revoked. Any thread may ask, and ends copies by
# asking: a worker that hangs in a copy of another kind holds nothing up.

from libc.stdint cimport uint8_t
from te.core.kinds cimport Copy, Event, Kind, KINDS_MAX
from te.core.sync cimport pthread_mutex_t, u32, u64

cpdef enum:
    SLOTS_MAX = 64

cdef enum:
    SPANS_MAX = 1024  # of one slot; as many as a call of sendmsg(2) takes

# FREE -> HELD -> COPYING -> COPIED -> FREE; from HELD also to FREE, when nothing is copied.
cdef enum:
    SLOT_FREE = 0
    SLOT_HELD = 1  # the lane's: to be gathered or received into
    SLOT_COPYING = 2
    SLOT_COPIED = 3  # or it failed: `fault`

# Some memory of the application, of one kind.
cdef struct Span:
    Kind *kind
    uint8_t *at
    u64 nbytes

# The copies of a slot that one kind makes.
cdef struct Batch:
    Kind *kind
    Event *event

cdef struct Slot:
    uint8_t *base
    u64 nbytes  # gathered, or scattered
    int fault  # once SLOT_COPIED: 0, or the errno of a copy that failed
    u32 state  # atomic
    Slot *next  # of its lane
    bint is_foreign  # what is copied is mapped memory of another process: it must stay mapped meanwhile
    # Under the staging's lock.
    bint is_begun  # all batches have been handed over
    bint is_orphan  # its lane has gone
    u64 number  # of the copy
    void *link
    void *opening
    Batch batches[KINDS_MAX]
    u32 batches_n

# The slots of one channel and direction, in order. A lane of zeros is an empty one.
cdef struct Lane:
    void *owner  # whom `staging_next` names
    Slot *first
    Slot *last
    u32 held
    bint is_waiting
    Lane *after  # waits behind it

cdef struct Staging:
    pthread_mutex_t lock
    u64 slot_bytes
    u32 slots_n
    u32 free_n
    u32 copying  # atomic
    u32 ended  # atomic: copies that were under way, by whoever has ended them
    u64 begun  # number of the last copy
    Slot slots[SLOTS_MAX]
    Lane *waiting  # without a slot, the first of them first
    Lane *waiting_last

# Cuts memory, which every kind of the engine has pinned, into slots; what is left over is not used. 0, or
# EINVAL for none or too many slots.
cdef int staging_open(Staging *s, void *base, u64 nbytes, u64 slot_bytes) noexcept nogil
# False while a copy is under way: then the memory must be kept, and closing is to be tried again. No
# lane has a slot.
cdef bint staging_close(Staging *s) noexcept nogil

# Lanes are used by one thread.

# A free slot, behind the others of the lane; NULL when there is none, or others have waited longer. Then
# the lane waits, until it gets one, or `lane_leave`.
cdef Slot *lane_take(Staging *s, Lane *lane) noexcept nogil
cdef void lane_leave(Staging *s, Lane *lane) noexcept nogil  # waits no more
# Gives back the first slot: it is held, or copied.
cdef void lane_give(Staging *s, Lane *lane) noexcept nogil
# Gives back the last slot, which is held: nothing came for it.
cdef void lane_return(Staging *s, Lane *lane) noexcept nogil
# The channel has gone, and gives back all slots, and its place among those who wait. Copies that are
# under way end by themselves.
cdef void lane_drop(Staging *s, Lane *lane) noexcept nogil
# The owner of the lane whose turn it is and that a slot is free for; NULL if there is none. It takes
# one, or leaves: the others wait for it.
cdef void *staging_next(Staging *s) noexcept nogil
# It has not: the lane waits no more, and the next one has its turn.
cdef void staging_skip(Staging *s) noexcept nogil
# Whether a lane waits and no slot is free. A destination whose channel has no more bytes just now then
# scatters what it has received into a slot, or gives back one that it has received nothing into:
# the bytes that it waits for may themselves wait for those that another lane has no slot for.
cdef bint staging_is_scarce(Staging *s) noexcept nogil

# Begin to copy between a held slot and spans, up to SPANS_MAX, of as many bytes as a slot has at most;
# at least one byte in all. `link` and `opening` are those of the section (te/core/sections.pxd), or of a
# source the link and the transfer. What goes wrong is the slot's fault once it is SLOT_COPIED, and
# nobody else's.
cdef void slot_gather(
    Staging *s, Slot *slot, const Span *spans, u32 n, void *link, void *opening
) noexcept nogil
cdef void slot_scatter(
    Staging *s, Slot *slot, const Span *spans, u32 n, void *link, void *opening
) noexcept nogil
# The same by one kind within its own memory: the slot's is not used, but there are no more such copies
# under way than slots. `nbytes` is the sum.
cdef void slot_move(
    Staging *s, Slot *slot, Kind *kind, const Copy *copies, u32 n, u64 nbytes, void *link, void *opening
) noexcept nogil

# Any thread.

# How many slots' copies are under way.
cdef u32 staging_copying(Staging *s) noexcept nogil
# Changes whenever one has ended. It has changed already when `staging_copying` shows that.
cdef u32 staging_count_ended(Staging *s) noexcept nogil
# Ends the copies that are done or have failed; how many those were.
cdef u32 staging_poll(Staging *s) noexcept nogil
# Stands for the copies that have begun until now.
cdef u64 staging_mark(Staging *s) noexcept nogil
# Whether all copies that had begun by the mark, and that are of the link and under the opening (NULL is
# any), have ended. Polls.
cdef bint staging_ended(Staging *s, u64 mark, void *link, void *opening) noexcept nogil
