# SPDX-License-Identifier: Apache-2.0
# The life of a transfer at its source: one table says what may follow what, and nobody else writes an
# outcome. Functions are called under the link's lock, by who has the turn of one of its workers, but for those of
# which something else is said.

from libc.stdint cimport uint8_t
from te.core.link cimport Link, Transfer
from te.core.regions cimport Region
from te.core.sync cimport load32, u32, u64
from te.core.wire cimport Block

cdef extern from "core/stages.h" nogil:
    enum:  # stages
        QUEUED, MOVING, SENT, STOPPING, ABANDON_SENT, REFUSED_EARLY, IS_LANDED, IS_REFUSED
        IS_ABANDONED, OVER
    enum:  # happenings
        BEGINS, ALL_SENT, MORE, GIVEN_UP, SENDS_ABANDON, LANDS, REFUSES, ABANDONS

# Descriptors for `n` blocks; NULL without memory. Any thread.
cdef Block *blocks_new(Link *link, u64 n) noexcept nogil
cdef void blocks_free(Link *link, Block *blocks) noexcept nogil

# Takes over `blocks` and `held`; has one reference, the caller's. Any thread.
cdef Transfer *transfer_new(
    Link *link, bint is_read, u64 tag, Block *blocks, u64 n, u64 total, Region **held, u32 held_n
) noexcept nogil
cdef void transfer_drop(Transfer *t) noexcept nogil  # any thread
# A new one serves a peer's read: the link owes its blocks until they are sent. Any thread.
cdef void transfer_serve(Transfer *t) noexcept nogil
# All its frames are made: its descriptors are needed no more, and its blocks count no more as a reply's.
cdef void transfer_made(Transfer *t) noexcept nogil
# Puts it behind the others of its link. The list has a reference of its own.
cdef void transfer_list(Transfer *t) noexcept nogil
# Of one that was never on the list: its outcome, which is counted; or, before it was submitted, it goes
# without any, and nobody else has it.
cdef void transfer_settle(Transfer *t, u32 status, int code) noexcept nogil
cdef void transfer_discard(Transfer *t) noexcept nogil

# The first that is not all issued, once those that were cancelled before they began are ended; NULL if
# there is none, or it would begin as one too many.
cdef Transfer *next_to_issue(Link *link) noexcept nogil
# Ends one on the list that is cancelled, if it has not begun; False if it has.
cdef bint end_queued(Transfer *t) noexcept nogil
# Whether it has its outcome by then. Without a lock.
cdef bint transfer_await(Transfer *t, u64 until_ns) noexcept nogil

# Takes its next step; False, and nothing is changed, where that cannot happen.
cdef bint advance(Transfer *t, int happening) noexcept nogil
# Ends it if it has its answer, and nothing of it is under way any more.
cdef void conclude(Transfer *t) noexcept nogil
# Ends one that is on the list, whatever is known of it. The one behind it has its whole time from
# now on.
cdef void transfer_end(Transfer *t, u32 status, int code) noexcept nogil
# What the destination says of it (LANDED, REFUSED with a reason of so many characters, or ABANDONED;
# te/core/wire.h); False if it was not to say that. `conclude` is the caller's.
cdef bint answer(Transfer *t, uint8_t status, const uint8_t *reason, u32 count) noexcept nogil
# Of a read: this side refuses what comes.
cdef void refuse_read(Transfer *t, const char *reason) noexcept nogil
# The link has ended: so do all that are on its list.
cdef void fail_all(Link *link) noexcept nogil


cdef inline bint is_given_up(Transfer *t) noexcept nogil:
    return load32(&t.cancel) or t.fault or t.verdict or (
        t.stage == REFUSED_EARLY or t.stage == IS_REFUSED)
