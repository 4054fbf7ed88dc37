# SPDX-License-Identifier: Apache-2.0
# Connections: a channel of bytes, and the frames on it (te/core/wire.h). What frames mean is a
# `Protocol`; all of its functions are called with the connection's lock held, and without the link's.

from libc.stdint cimport uint8_t
from te.core.channels cimport Channel
from te.core.link cimport Link, Transfer
from te.core.posix cimport iovec
from te.core.tally cimport Flow
from te.core.sync cimport pthread_mutex_t, u32, u64
from te.core.wire cimport Header
from te.core.worker cimport Polled

cdef enum:
    IOV_MAX = 1024
    ACK_BACKLOG_BYTES = 256 << 10  # a source that reads no acknowledgements is not read from

cdef enum Moved:
    MOVED  # and there may be more
    WAITING  # the kernel has nothing now, or takes nothing
    LOST  # the link dies
    NOT_MINE  # only the connection's worker may go on
    TAKEN  # another thread runs the worker: this one touches nothing of it, and has no lock any more

cdef enum Stand:  # what comes next
    AT_HEAD
    AT_BODY
    AT_PAYLOAD
    AT_TRAILER
    AT_DISCARD
    AT_COPY  # nothing: the protocol copies something by itself, for the frame that has come

cdef struct Connection

cdef struct Protocol:
    int over  # which links these frames are for: OVER_TCP, ...
    # What moves here are words about rails, also of dead ones: they do not keep a link alive.
    bint is_words
    # Makes the next frame to send (`frame_*` below); False if there is none now.
    bint (*load)(Connection *c) noexcept nogil
    # That frame has been sent; or it never will be, as the connection is gone.
    void (*sent)(Connection *c, bint is_whole) noexcept nogil
    # `head` and `body` are complete; False after a violation.
    bint (*received)(Connection *c) noexcept nogil
    # The payload: inside the worker's section, whether it may land now, else why not. And what
    # section that is.
    void *(*right)(Connection *c) noexcept nogil
    bint (*may_land)(Connection *c, char *reason) noexcept nogil
    # It must not land, for that reason: `throw_away` is called behind this.
    void (*refuse)(Connection *c, const char *reason) noexcept nogil
    # So many bytes have landed.
    void (*moved)(Connection *c, u64 nbytes) noexcept nogil
    # All of it has landed, or was thrown away; `is_good`: as the source had it.
    void (*landed)(Connection *c, bint is_good) noexcept nogil
    # AT_COPY: goes on. It may set `is_away`, give up the connection's lock while it waits for another
    # process, and return TAKEN.
    Moved (*copy)(Connection *c) noexcept nogil
    # Between two frames: takes something else up; `is_idle`: nothing has come just now. NULL if there
    # never is anything, and whether there is.
    bint (*take_up)(Connection *c, bint is_idle) noexcept nogil
    bint (*has_work)(Connection *c) noexcept nogil
    # Each turn of the worker, without the connection's lock; NULL if there is nothing to do.
    void (*turn)(Connection *c) noexcept nogil
    # Of payload that goes through staging (te/core/staged.pxd); NULL where none does. `settle`: looks
    # which copies are over. `part`: so much that belongs to `of` has landed, or its copy has failed
    # with an errno. `leave`: the link has died; False while a copy still reads for the connection:
    # it is asked again.
    void (*settle)(Connection *c) noexcept nogil
    void (*part)(Connection *c, void *of, u64 nbytes, int fault) noexcept nogil
    bint (*leave)(Connection *c) noexcept nogil

cdef struct Connection:
    Polled polled  # first: a worker's pointer to it is one to this
    const Protocol *protocol
    Link *link
    pthread_mutex_t lock
    Channel *channel
    u32 interest  # atomic: what its worker waits for, EPOLLIN and EPOLLOUT
    u32 driven  # by a caller
    bint gone, suspect
    u64 progress_ns
    bint napping  # a caller waits for the wake-up
    bint is_workers  # its worker is at it, and no caller
    bint is_held_up  # what is to be received waits for a slot, or for memory of another process
    u32 is_away  # atomic: a thread that is not its worker's copies for it, and gives it a turn after that
    void *staged  # te/core/staged.pxd; of malloc
    void *own  # the protocol's, of malloc; freed with it
    Flow *flow  # the link's, of this rail
    # Receiving.
    Stand place
    Header head
    u32 lead_have, body_have, body_want, tail_have
    # A header and the first 16 bytes behind it, which are never payload; and a trailer and those.
    uint8_t lead[56]
    uint8_t tail[64]
    bint drained  # the kernel had no more behind the payload
    bint is_bulk  # the last answer told how far a long copy is
    uint8_t *body
    iovec *local  # where the payload goes, and one more
    u32 local_at, local_n
    u64 payload_left, discard_left
    # Sending.
    uint8_t *queued  # acknowledgements and the like
    uint8_t *sending
    u64 queued_n, queued_room, sending_room
    uint8_t *frame  # header and descriptors
    u64 trailer
    iovec *out
    u32 out_at, out_n
    u64 out_left, out_tail, out_payload
    Transfer *out_transfer  # a reference

# Sends what there is, in at most so many calls.
cdef Moved connection_send(Connection *c, int turns) noexcept nogil
# One step: a call to the kernel, or what follows from a complete item.
cdef Moved connection_receive(Connection *c, bint answers_only) noexcept nogil
# The frame under way has been sent; or it never will be, as the connection is gone.
cdef void frame_sent(Connection *c, bint is_whole) noexcept nogil

# Small frames, behind the one under way.
cdef void queue_frame(Connection *c, Header *h, const void *items, u64 nbytes) noexcept nogil
cdef void queue_answer(Connection *c, u64 number, uint8_t status, const char *reason) noexcept nogil
# What `Protocol.load` calls: the header is in `frame`, and `nbytes` of descriptors behind it; the
# payload, if any, is in `out` from 2 on.
cdef void frame_load(
    Connection *c, Transfer *t, u64 items_nbytes, u32 payload_n, u64 payload_nbytes
) noexcept nogil
# What follows from what a channel returned that was asked for so many bytes.
cdef Moved on_received(Connection *c, ssize_t n, size_t wanted) noexcept nogil
# What `Protocol.copy` calls behind the last byte of a payload: the trailer is next.
cdef void expect_trailer(Connection *c) noexcept nogil
# What `Protocol.received` calls: the payload goes where `local` says.
cdef void expect_payload(Connection *c, u32 n, u64 nbytes) noexcept nogil
# The payload that is to come, or is coming, must not land.
cdef void throw_away(Connection *c) noexcept nogil
