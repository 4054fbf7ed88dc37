# SPDX-License-Identifier: Apache-2.0
# Connections: a channel of bytes, and the frames on it (te/core/wire.h). Here is the codec: small frames
# are queued and read, and their headers checked. What frames mean, and payload, is what stands on it.

from libc.stdint cimport uint8_t
from te.core.channels cimport Channel
from te.core.link cimport Link
from te.core.plane cimport plane_stages
from te.core.tally cimport Flow
from te.core.sync cimport store32, u32, u64
from te.core.wire cimport FLAG_REPLY, Header, SEGMENT
from te.core.worker cimport Polled, Silence

cdef enum:
    ACK_BACKLOG_BYTES = 256 << 10  # a source that reads no acknowledgements is not read from

cdef enum:
    ASLEEP = 1 << 30  # of `Connection.lookers`: there is one, who sleeps until something comes

cdef enum Moved:
    MOVED  # and there may be more
    WAITING  # the kernel has nothing now, or takes nothing
    LOST  # the link dies
    LEFT_TO_WORKER  # what comes next is for the worker's own thread
    TAKEN  # another thread runs the worker: this one touches nothing of it, and has not its turn any more

cdef struct Connection

# What one kind of connection does, in the turn of its worker.
cdef struct Protocol:
    int over  # which links these frames are for: OVER_TCP, ...
    # Whether what moves here keeps the link alive; words about rails, also of dead ones, do not.
    bint moves_payload
    # One step: a call to the kernel, or what follows from a complete item. It may set `is_away`, give up
    # the turn while it waits for another process, and return TAKEN. `answers_only`: by a calling thread, which
    # leaves all frames to the worker that are not `for_callers`: LEFT_TO_WORKER, and the connection is kicked.
    Moved (*receive)(Connection *c, bint answers_only) noexcept nogil
    u32 answers  # kinds of frames that calling threads take; a bit for each
    u64 reply_most  # bytes of a read's reply that calling threads land; 0: none
    # Sends what there is, in at most so many calls.
    Moved (*send)(Connection *c, int turns) noexcept nogil
    # The next four are NULL where there is nothing to do. Whether there is work that nobody rings for.
    bint (*has_work)(Connection *c) noexcept nogil
    # A turn of the connection begins: looks what has become of the copies that it has begun.
    void (*settle)(Connection *c) noexcept nogil
    # Each turn of the worker.
    void (*turn)(Connection *c) noexcept nogil
    # The link has died: lets go of what was being sent. False while a copy still reads for the
    # connection: it is asked again.
    bint (*leave)(Connection *c) noexcept nogil

cdef struct Connection:
    Polled polled  # first: a worker's pointer to it is one to this
    const Protocol *protocol
    Link *link
    Channel *channel
    u32 interest  # atomic: what its worker waits for, EPOLLIN and EPOLLOUT
    u32 watched  # what epoll tells its worker of
    # Atomic: calling threads that look for an answer here, so that its worker is not woken for what comes; or
    # ASLEEP, which is set in the worker's turn: then the worker does not read, either.
    u32 lookers
    bint put_off  # the worker was to read meanwhile: who slept has it do so when he leaves
    u32 gone  # atomic
    Silence silence  # of what is sent
    bint is_suspect
    u32 looked  # atomic: the link's `suspicion` for which it was last looked at
    u64 progress_ns
    bint is_held_up  # what is to be received waits for a slot, or for memory of another process
    u32 is_away  # atomic: a thread that is not its worker's copies for it, and gives it a turn after that
    void *own  # the protocol's, of malloc; freed with it
    Flow *flow  # the link's, of this rail
    # Receiving.
    Header head
    bint has_head  # and its body is being read
    u32 lead_have, body_have, body_want
    uint8_t lead[56]  # a header and the first 16 bytes behind it, which are never payload
    uint8_t *body
    bint is_bulk  # the last answer told how far a long copy is
    # Sending.
    uint8_t *queued  # acknowledgements and the like
    uint8_t *sending
    u64 queued_n, queued_room, sending_room
    u64 out_left  # of what is being sent

cdef inline bint for_callers(Connection *c) noexcept nogil:
    """Whether the frame that has come, of which nothing else is known yet, is for a calling thread that waits: an answer,
    or what one frame brings of a small read."""
    if c.head.kind == SEGMENT:
        return c.head.flags & FLAG_REPLY and 0 < c.head.nbytes <= c.protocol.reply_most and (
            not plane_stages(c.link.plane))
    return c.head.kind < 32 and c.protocol.answers >> c.head.kind & 1


cdef inline Moved leave_to_worker(Connection *c) noexcept nogil:
    """In a turn that is lent: who has it kicks the connection in the end."""
    store32(&c.polled.kicked, 1)
    return LEFT_TO_WORKER


# Small frames, behind the one under way.
cdef void queue_frame(Connection *c, Header *h, const void *items, u64 nbytes) noexcept nogil
cdef void queue_answer(Connection *c, u64 number, uint8_t status, const char *reason) noexcept nogil
# Moves what is queued to `sending`, and notes behind it; how many bytes.
cdef u64 take_queued(Connection *c) noexcept nogil

# Reads on with a frame. Its `head` has been checked, and `body` is complete, when it `is_whole`. Notes
# are taken here.
cdef Moved frame_read(Connection *c, bint answers_only, bint *is_whole) noexcept nogil
# The first bytes of the next frame have come with something else.
cdef void frame_begin(Connection *c, const uint8_t *lead, u32 nbytes) noexcept nogil
# What follows from what a channel returned that was asked for so many bytes.
cdef Moved on_received(Connection *c, ssize_t n, size_t wanted) noexcept nogil
# The same where it returned an errno.
cdef Moved on_sending_failed(Connection *c, int errnum) noexcept nogil
