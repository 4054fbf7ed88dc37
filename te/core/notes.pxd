# SPDX-License-Identifier: Apache-2.0
# Notes: short messages to the engine that a link leads to, from the side that has opened it. They go
# in order, behind each other over the link's first connection, each in one or several frames. Nobody
# acknowledges one: it may be lost with the link, and comes once at most.

from libc.stdint cimport uint8_t
from te.core.sync cimport load_pointer, pthread_mutex_t, u32, u64
from te.core.tags cimport Identity
from te.core.wire cimport Header

cdef enum:
    # Of one link, at either end; beyond, none is sent, or what comes is dropped.
    LANE_NOTES_MAX = 1 << 13
    LANE_BYTES_MAX = 8 << 20
    # Of all that have come to an engine and were not taken.
    BOX_BYTES_MAX = 64 << 20

cdef struct Lane

# Its bytes follow it.
cdef struct Note:
    Note *next
    Lane *lane  # a reference, of one that has come
    Identity peer  # who has sent it
    u64 nbytes

# Those of an engine that have come, in order.
cdef struct Box:
    pthread_mutex_t lock
    Note *first
    Note *last
    u64 nbytes
    u64 dropped  # as there were too many

# Of a link.
cdef struct Lane:
    pthread_mutex_t lock
    u32 refs  # atomic
    # To be sent; `first` is atomic, and `parted` is how much of it has gone.
    Note *first
    Note *last
    u64 waiting, waiting_nbytes
    u64 number, parted
    # What has come of the next one.
    Note *coming
    u64 have, room, last_number
    # Of the link's, that have come and are not freed. Atomic; they grow under the box's lock alone.
    u64 kept, kept_nbytes

cdef void box_open(Box *box) noexcept nogil
cdef void box_close(Box *box) noexcept nogil  # no link is left
# All that have come by now, in their order (`Note.next`), which are the caller's; NULL if there are none. And how
# many were dropped. By a calling thread.
cdef Note *box_take(Box *box, u64 *dropped) noexcept
# Frees the first of them; the others.
cdef Note *note_free(Note *note) noexcept nogil

cdef Lane *lane_new() noexcept nogil  # one reference
cdef void lane_drop(Lane *lane) noexcept nogil
# To be sent; False if too much waits. By a calling thread.
cdef bint lane_put(Lane *lane, const uint8_t *data, u64 nbytes) noexcept
# The next frame: its header, and its bytes in `part`, which has room for NOTE_PART_MAX. False if none
# waits, or who asks would have to wait for the lane, and does not.
cdef bint lane_take(Lane *lane, bint waits, Header *h, uint8_t *part) noexcept nogil
# A frame has come, whose header was checked; what is wrong with it, or NULL.
cdef const char *lane_came(
    Lane *lane, Box *box, const Identity *peer, const Header *h, const uint8_t *part
) noexcept nogil


cdef inline bint lane_waits(Lane *lane) noexcept nogil:
    """Whether something is to be sent."""
    return load_pointer(&lane.first) != NULL
