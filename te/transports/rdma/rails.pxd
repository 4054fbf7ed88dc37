# SPDX-License-Identifier: Apache-2.0
# The life of a rail that can die and come back: what may follow what (rails.h), and when. Pure: the
# caller brings the time, and is the owner of the rail, which alone changes it.

from libc.stdint cimport uint8_t
from te.core.sync cimport u32, u64
from te.core.wire cimport TEXT_MAX

cdef extern from "transports/rdma/rails.h" nogil:
    cpdef enum RailState:
        RAIL_DOWN, RAIL_BUILDING, RAIL_PROBED, RAIL_UP, RAIL_SUSPECT, RAIL_UNSETTLED, RAIL_DRAINING
    enum:  # happenings
        IS_DUE, NOT_MADE, IS_LATE, IS_BUILT, ANSWERS, IS_QUIET, MOVES, FAILS, IS_TAKEN, DRAINS
        IS_DRAINED, IS_CLOSED

# Why a rail failed; reasons.py makes the sentences.
cpdef enum RailReason:
    NOT_BUILT = 20
    BAD_STATUS = 21
    NO_COMPLETION = 22
    POST_FAILED = 23
    POLL_FAILED = 24
    PEER_BROKE = 25
    PORT_DOWN = 26
    DEVICE_FATAL = 27
    QP_EVENT = 28
    NO_ANSWER = 29
    ATTEMPT_FAILED = 30
    READ_CANCELLED = 31

# Deadlines and back-off of a source's rails.
cdef struct RailTiming:
    # Both sides must have the new queue pair, and the probe must be there, in this time each.
    u64 build_ns, probe_ns
    # From a failure to the next attempt: this long at first, twice as long with each failure more, never
    # longer than the maximum. Shortened by up to a half, at random: the rails of many peers that fail
    # together shall not come back together. The maximum counts where nobody tells that a link is back
    # (a switch in between): an attempt fails, this passes, the next one succeeds.
    u64 backoff_ns, backoff_max_ns
    # A rail that carried for so long has its former failures forgiven.
    u64 steady_ns

cdef struct Rail:
    uint8_t state
    u32 epoch  # of its queue pair, or of the attempt to make one: one more with each attempt
    u32 failures  # times that it went down since it was last steady
    u32 ways, way  # how many devices and addresses it could lead over, and which it does
    u32 downs, ups  # how often it went down, and came up
    bint has_carried  # it was up before it last failed
    u64 since_ns, up_since_ns
    u64 due_ns  # of one that is down: when it is to be made
    u64 random
    int code, errnum  # why it last failed; 0 if it never did
    char text[TEXT_MAX]  # the words for that, where the code has none

# A source's rail, to be made at once, in so many ways. `seed` makes its jitter.
cdef void rail_begin(Rail *r, u32 ways, u64 seed, u64 now) noexcept nogil
# A rail that nobody makes: of a destination, whose source does, or of a link that has ended.
cdef void rail_rest(Rail *r) noexcept nogil
# Takes its next step; False, and nothing is changed, where that cannot happen.
cdef bint rail_happens(Rail *r, const RailTiming *timing, int happening, u64 now) noexcept nogil
# Why it fails, or has failed.
cdef void rail_blame(Rail *r, int code, int errnum, const char *text) noexcept nogil
# When the clock has something to do with it (NEVER_NS: never); and what happens if it is that late.
cdef u64 rail_due(const Rail *r, const RailTiming *timing) noexcept nogil
cdef int rail_late(const Rail *r) noexcept nogil
# What it waited for has probably come: its back-off ends soon.
cdef void rail_hurry(Rail *r, const RailTiming *timing, u64 now) noexcept nogil


cdef inline bint is_dead(const Rail *r) noexcept nogil:
    """Whether nothing that it was given is under way, and it is given nothing."""
    return r.state == RAIL_DOWN or r.state == RAIL_BUILDING or r.state == RAIL_PROBED


cdef inline bint carries(const Rail *r) noexcept nogil:
    return r.state == RAIL_UP or r.state == RAIL_SUSPECT
