# SPDX-License-Identifier: Apache-2.0
# Links, the transfers on them, and the compiled half of the contract of a transport; its other half
# is te/transports/base.py.
#
# A link is all rails between two engines that one side has opened. What is common to all transports
# is here; each keeps what is its own behind `Link.own` and `Transfer.own`.
#
# A link has an owner, the worker of its first connection. Who submits or cancels a transfer puts a command on the
# owner's list, and changes nothing of the link itself (te/core/callers.pxd). The workers of a link's other
# connections and the owner have the link's lock while they change what they share (`link_lock`), and never while
# they move bytes; a thread that has it takes only locks of the engine (tags, notices, staging) behind it.

from libc.stdint cimport uint8_t
from te.core.maps cimport Map
from te.core.notes cimport Lane
from te.core.notices cimport Notice
from te.core.plane cimport Plane
from te.core.regions cimport Region
from te.core.sync cimport (
    load32, load64, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_trylock, u32, u64,
)
from te.core.tags cimport Identity, Opening
from te.core.tally cimport Flow, Ledger, Outcomes
from te.core.wire cimport Block, RAILS_MAX, TEXT_MAX
from te.core.worker cimport Command, Polled, Silence, Spin, Worker, counts_most_ns, silence_lasts

# Why a link died or a transfer failed; te/reasons.py makes the sentences. A transport's own reasons
# begin with 20.
cpdef enum Reason:
    NO_REASON = 0
    STALLED = 1
    BROKE = 2
    ENDED = 3
    VIOLATED = 4
    PEER_CLOSED = 5
    ENGINE_CLOSED = 6
    LINK_DIED = 7  # of a transfer: the link's own reason says it
    WAS_REFUSED = 8
    SOURCE_FAULT = 9
    NO_RAIL = 10
    PROCESS_GONE = 11

cdef enum:  # blocks of peers' reads, 24 bytes each, that were asked for and not yet answered
    # Of a link: more than an engine has asked for at once (READS_ASKED_MAX frames of BLOCKS_MAX).
    REPLY_BLOCKS_MAX = 1 << 15
    # Of all links: once it is that much, each is read from only while it owes nothing.
    REPLY_BLOCKS_ALL_MAX = 1 << 19

cdef enum:  # what a transport says to a check of its link
    LET_PASS = 1  # a stall is none
    CHECK_AGAIN = 2  # it has a deadline of its own

cdef struct Link
cdef struct Transfer

# Why a link is dead.
cdef struct Death:
    int code, errnum
    char text[TEXT_MAX]

# What a transport does with its links.
cdef struct Ops:
    const char *name  # of the transport
    # Bytes that it keeps with each transfer.
    size_t transfer_bytes
    # Whether a read is written by this side's own device, so that the regions it lands in must stay
    # while it is under way. Else the bytes come in as frames, which are checked as they land, and blocks that touch
    # may be handed to it as one.
    bint lands_by_device

    # The source's side. A new transfer of which nobody else knows: says whether it is sent at once (`sends_at_once`).
    # `is_shared`: the peer may map all of the source's memory.
    void (*prepare)(Transfer *t, bint is_shared) noexcept nogil
    # `Transfer.cancel` is set, and `call_off` was called: ends it as soon as can be. In the owner's turn, under
    # the link's lock.
    void (*cancel)(Transfer *t) noexcept nogil
    # A read that was cancelled, or has failed: calls it off, and returns True once nothing lands for it any
    # more; False if that is not so at `until_ns`. It can be called again. By a calling thread.
    bint (*cancel_read)(Transfer *t, u64 until_ns) noexcept nogil
    # It has its outcome, or was never submitted, and what is its own can go. Under the link's lock if it was
    # on the list.
    void (*settled)(Transfer *t) noexcept nogil

    # The destination's side. A tag was revoked, and no landing is under way: tells the link's worker to
    # have that end which the peer was let write by itself under it (`Opening.granted` tells when). Any
    # thread, also with the engine's lock; returns at once.
    void (*revoke)(Link *link) noexcept nogil

    # Both sides. Now and then, by the owner: may end the link. `stalled`: its first transfer has not
    # moved for too long. Returns LET_PASS and CHECK_AGAIN as bits.
    u32 (*check)(Link *link, bint stalled) noexcept nogil
    # All of its connections are closed: forgets what was landing. Under the link's lock, by a worker.
    void (*forget)(Link *link) noexcept nogil
    # Nobody has it any more.
    void (*release)(Link *link) noexcept nogil

cdef struct Transfer:
    u64 id, tag
    Link *link
    bint is_read
    bint is_reply  # it serves a peer's read; nobody here has a handle of it
    bint is_awaited  # a thread waits for it at once, here or, of a reply, at the peer
    bint is_late  # the link was dead when it was submitted
    int sends_at_once  # in so many calls at most, once it is submitted; 0: it is left to the connections' workers
    Block *blocks
    u64 n, total  # blocks, bytes
    u64 asked  # blocks of the caller, some of which may be one here
    Region **held  # regions that it reads from, or lands in by a device
    u32 held_n
    Opening *opening  # of a read: what the replies land under
    # Under the link's lock.
    uint8_t stage  # te/core/stages.h
    u32 in_flight  # how much of it is being sent: frames, or pieces
    bint is_listed
    bint may_land  # a read of which bytes may still land: it cannot be cancelled yet
    int fault  # errno: the source memory cannot be read
    int verdict  # the reason it is given up for, unless that is a cancellation
    char *text
    Transfer *before
    Transfer *after
    # Atomic.
    u32 cancel, is_called_off, status, waiters, notify, refs
    u64 submitted_ns, settled_ns
    # When it last moved on, or the one before it was over: the first of a link is judged by it. What
    # moves of others must not keep its memory in use.
    u64 progress_ns
    # The connection that the answer comes by, where calling threads may look for it: of what one frame writes. NULL:
    # workers alone take it.
    Polled *answered_by
    int code
    Notice notice
    Command submitting, cancelling  # the owner's to carry out
    void *own  # the transport's

cdef struct Link:
    Plane *plane
    const Ops *ops
    void *own  # the transport's
    u64 number
    bint is_incoming
    Identity peer  # of an incoming link: whom tags may be opened for
    Worker *owner  # atomic; NULL before it has a connection
    pthread_mutex_t lock
    u32 refs, dead  # atomic
    u32 has_ended  # atomic: its connections are gone
    Death *death  # atomic; without a reason while it is not dead, and there before that
    Polled *connections[RAILS_MAX]
    u32 connections_n, connections_alive  # atomic
    u32 turn  # the owner's: which connection is next
    Spin spin  # of callers that wait; only they touch it, with the interpreter lock
    Block *spare  # atomic: see `blocks_new`
    u64 progress_ns  # when anything moved: whoever moved it looks again
    # The owner's: of the first transfer. It is judged once all connections were looked at again.
    Silence silence
    bint is_suspect
    u32 suspicion  # atomic: the number of the last one
    # Submitted and unfinished, in this order; `issue` is the first that is not all issued.
    Transfer *first
    Transfer *last
    Transfer *issue
    Map by_id
    u64 next_id
    u32 unfinished  # atomic: submitted, by callers, and without an outcome
    u32 replies, begun
    u64 reply_blocks  # atomic: blocks that peers have asked for, of replies that are not all sent
    u32 is_held_back  # atomic: a connection is not read from because of that
    Map arriving  # te/core/inbound.pyx
    Lane *notes
    Notice bulletin
    bint end_was_told  # to Python, which alone looks at this
    Flow flows[RAILS_MAX]  # by rail
    Outcomes outcomes
    # Of all links of the engine, under its lock.
    Link *before
    Link *after

# A transport that keeps nothing with its transfers, and lets no peer write by itself; the source's
# functions and `release` are NULL.
cdef Ops plain_ops() noexcept

# One reference is the caller's. `own` is the transport's, and complete: fences find the link from here on.
cdef Link *link_new(Plane *p, const Ops *ops, bint is_incoming, void *own) noexcept
cdef void link_drop(Link *link) noexcept nogil
# Adds what all links of the engine have counted, by transport. Any thread.
cdef void links_tally(Plane *p, Ledger *ledgers) noexcept nogil
# Has its connections go; their workers close them. The first reason counts. Any thread; waits for none.
cdef void link_die(Link *link, int code, int errnum, const char *text) noexcept nogil
# Has Python look at it: it has ended, or its rails have changed.
cdef void link_tell(Link *link) noexcept nogil
# Gives all its connections a turn.
cdef void link_kick(Link *link) noexcept nogil
# When the first transfer of the list last moved; 0 if there is none. Those behind it wait their turn, so what moves
# of them says nothing of it; and each is the first in the end. Under the lock.
cdef u64 first_moved_ns(Link *link) noexcept nogil


cdef inline bint has_too_many_replies(Link *link) noexcept nogil:
    """Whether it is not to be read from until its peer takes what it has asked for."""
    cdef u64 blocks = load64(&link.reply_blocks)
    return blocks != 0 and (
        blocks >= REPLY_BLOCKS_MAX or load64(&link.plane.reply_blocks) >= REPLY_BLOCKS_ALL_MAX)


cdef inline bint link_lock(Link *link, Worker *w) noexcept nogil:
    """In the worker's turn: takes the link's lock. False if it cannot: the turn is lent to a calling thread, which
    waits for no lock, and the worker of another connection has it."""
    if w.is_lent:
        return pthread_mutex_trylock(&link.lock) == 0
    return pthread_mutex_lock(&link.lock) == 0


cdef inline u64 silent_ns(Link *link, Silence *s, u64 moved_ns, u64 now, u64 limit_ns) noexcept nogil:
    """At a check: for how long nothing has moved (`silence_lasts`), as far as it is judged by that limit."""
    return silence_lasts(s, moved_ns, now, counts_most_ns(link.plane.workers.check_ns, limit_ns))


cdef inline bint is_too_silent(Link *link, Silence *s, u64 moved_ns, u64 now) noexcept nogil:
    """At a check: whether nothing has moved for as long as makes a stall."""
    return silent_ns(link, s, moved_ns, now, link.plane.stall_ns) > link.plane.stall_ns


cdef inline u32 rails_of(Link *link) noexcept nogil:
    """How many connections it has, one at least: its first one may move before it is counted."""
    return max(load32(&link.connections_n), <u32>1)


cdef inline void violate(Link *link, const char *text) noexcept nogil:
    link_die(link, VIOLATED, 0, text)
