# SPDX-License-Identifier: Apache-2.0
# What the plane is made of. Locks are taken in this order, never the other way round: a rail's, its
# link's, then one of the plane's (tags, notices, events) or a worker's. A link over RDMA has one
# connection, which carries words about it, and pairs, which only the link's worker touches.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset, strerror, strlen

from te.core.channels cimport *
from te.core.heap cimport need, need_more
from te.core.maps cimport *
from te.core.posix cimport *
from te.core.regions cimport *
from te.core.sections cimport *
from te.core.sync cimport *
from te.core.tags cimport *
from te.core.vectors cimport *
from te.core.wire cimport *
from te.verbs.abi cimport *

cdef enum:  # beside the kinds and statuses of the wire
    WRITE_DIRECT = 30  # kinds of transfer over RDMA
    READ_DIRECT = 31
    NO_ANSWER = 255  # of a transfer: it has no status of an ACK yet

cdef enum:  # why a link died or a transfer failed; te/plane/reasons.py makes the sentences
    NO_REASON = 0
    STALLED = 1
    BROKE = 2
    ENDED = 3
    VIOLATED = 4
    PEER_CLOSED = 5
    ENGINE_CLOSED = 6
    FENCED = 7
    LINK_DIED = 8  # of a transfer: the link's own reason says it
    WAS_REFUSED = 9
    SOURCE_FAULT = 10
    NO_RAIL = 11
    PROCESS_GONE = 12
    RAIL_UP = 20
    BAD_STATUS = 21
    NO_COMPLETION = 22
    POST_FAILED = 23
    POLL_FAILED = 24
    PEER_BROKE = 25
    PORT_DOWN = 26
    DEVICE_FATAL = 27
    PAIR_EVENT = 28
    RAIL_SUSPECT = 29
    RAIL_MOVED = 30

cdef enum:  # status of a transfer; te.transfers.Status in this order
    PENDING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3

cdef enum:
    IOV_MAX = 1024
    TEXT_MAX = 512
    BEGUN_MAX = 256  # transfers a source has on the wire without an answer
    ARRIVING_MAX = 4096  # transfers a destination has begun to receive, per link
    READS_SERVED_MAX = 256
    READS_ASKED_MAX = 32
    ACK_BACKLOG_BYTES = 256 << 10  # a source that reads no acknowledgements is not read from
    SCRATCH_BYTES = 256 << 10
    READS_PER_TURN = 32
    SENDS_PER_TURN = 8
    YIELD_NS = 8000  # one that takes longer has let somebody do real work; alone it takes 0.5 us
    SHARED_TURNS = 4
    MOVE_NS = 100000000
    BACKOFF_LEAST_NS = 4000000
    BACKOFF_MOST_NS = 250000000
    QUIESCE_NS = 900000000
    # Frames a rail is ahead of the copying: milliseconds of it, for the copying threads may keep the
    # source off the processor; few enough that a cancel has something to stop.
    PULLS_AHEAD = 16
    PULLS_TOLD = 4  # frames copied between two words of it: each may wake the source up
    PULL_BYTES = 4 << 20  # of one marked section
    SPREAD_BYTES = 256 << 10  # smaller copies are over before another thread has woken up
    JOBS_MAX = 64
    # How long a process that was seen alive is copied from unasked (2 us): before its number is
    # given out again, 32,768 others are made and end, at 15 us each at best.
    ALIVE_NS = 1000000
    MAPPINGS_MAX = 1024  # of a link; each may be looked through for each block
    MAPPED_GIB_MAX = 1 << 12  # of a link
    PLANE_MAPPED_GIB_MAX = 1 << 15  # of all; a process has 2 ** 17 to give
    PULL_BLOCK_BYTES = 2048  # smaller blocks go through the ring
    LOOKS = 24  # at the rings for each turn of spinning
    POSTED_BYTES = 8 << 20  # of a pair under way at once; the last piece may exceed it
    # Of a measurement of a pair's rate: what is over sooner tells of the way there and back instead.
    MEASURED_BYTES = 128 << 10
    SIGNAL_EVERY = 64  # work requests: returns send credits in the middle of long pieces
    POLLED_MAX = 32  # completions of one look
    DRAIN_NS = 200000000
    # A rail is suspect after a quarter of the time in which it is given up, and no later than this: a
    # piece of 1 MiB takes 84 ms at 100 Mbit/s.
    SUSPECT_NS = 250000000
    UNREAD_NS = 300000000
    RECEIVES = 256  # marks that a pair takes before the destination says that there is room again

cdef struct Job
cdef struct Link
cdef struct Mapping
cdef struct Pair
cdef struct Plane
cdef struct Rail
cdef struct Worker


# The last that became of a pair, until Python has read it.
cdef struct News:
    bint is_new
    u32 epoch
    int code, errnum

# What one rail carries of a transfer over RDMA between two marks.
cdef struct Piece:
    u64 first, offset, nbytes  # begins at `offset` of the block `first`
    u32 rail, next

cdef struct Transfer:
    u64 id, tag
    Link *link
    uint8_t kind  # SEGMENT, PULL or READ: what its frames are
    uint16_t flags
    Block *blocks
    u64 n, total
    Region **held
    u32 held_n
    # Under the link's lock.
    u64 index, offset, issued, confirmed, segment_bytes
    u32 in_flight  # rails that are sending a frame of it
    bint begun, stopped, closed, is_listed
    bint is_quiet  # of a READ: it was cancelled, and nothing lands any more
    uint8_t answer
    int fault  # errno: the source memory cannot be read
    char *text
    u64 returned, outstanding  # of a READ: bytes that have landed, frames without a reply
    Opening *opening  # of a READ: what the replies land under
    Transfer *before
    Transfer *after
    # Atomic.
    u32 cancel, status, waiters, notify, refs
    u64 submitted_ns, settled_ns
    # When it last moved on, or the one before it was over: the first of a link is judged by it. What
    # moves of others must not keep its memory in use.
    u64 progress_ns
    int code
    Rail *rail  # that sent the last frame
    Transfer *next_notice
    # Over RDMA, under the link's lock. Lists of waiting pieces by rail: their index + 1, or 0.
    Piece *pieces
    u32 pieces_n, waiting
    u32 heads[RAILS_MAX]
    # By rail, how many pieces another one must have waiting before this one takes one of them; 0 of
    # a rail that is not to carry any of it while another can.
    uint8_t least[RAILS_MAX]
    u32 mark  # of its trailing writes; the index of a piece is added
    u32 unmarked  # pieces of which something may be written, but no mark
    bint granted, is_ready
    int verdict  # the reason it is given up for, unless that is a cancellation
    Transfer *next_ready

# A transfer as its destination sees it.
cdef struct Arriving:
    u64 id, tag, total, announced, arrived
    Opening *opening
    u64 *bits  # over RDMA, once granted: which pieces have landed
    u32 slot, pieces, landed
    u64 revoked_ns  # over RDMA: when it was refused after it had been granted
    u32 refused  # atomic: other rails look at it without the lock
    bint abandoned, spoiled
    uint16_t flags
    Arriving *next  # of those that wait for rails to be drained

ctypedef enum Place:
    AT_HEAD
    AT_BODY
    AT_PAYLOAD
    AT_TRAILER
    AT_DISCARD
    AT_PULL

ctypedef enum PairState:
    PAIR_PROBE  # of a source: connected, but nothing has come through yet
    PAIR_UP
    PAIR_LOST  # of a source: its end is gone, the destination has yet to close its own
    PAIR_DRAIN  # of a destination: in the error state, not all of its completions seen
    PAIR_GONE

cdef struct Posted:
    Transfer *transfer
    u32 piece
    u64 sequence, nbytes  # of the work request that ends it
    u64 mark  # which of the pair's marks; 0 of a read, which has none

# A connected RDMA queue pair of a link: one rail. Only the link's worker touches it, except for
# what is atomic.
cdef struct Pair:
    Plane *plane
    Link *link
    Worker *worker
    Pair *next
    Endpoint *e
    PairState state
    u32 index, epoch, near_nic, far_nic
    u32 kick  # atomic
    u32 doomed  # atomic: a reason to give it up; above 8 bits, what the peer gives as its own
    u32 kicks_seen, faults_seen
    bint armed, late, overdue
    bint suspect  # has work that does not move: the rest of it is for other rails
    u64 progress_ns
    int code, errnum  # why it is lost
    # The source's end: kept work requests, of which [built_at, built_n) are not handed over yet.
    VSendWr *wrs
    VSge *sges
    u32 built_at, built_n, since_signal
    u64 sequence, completed  # of work requests built and known to be done
    u32 mark_data
    Posted ring[POSTED_MAX]
    u32 ring_first, ring_n
    u64 ring_bytes
    u64 busy_since, busy_bytes  # of the measurement under way: never idle since, done since
    Transfer *building
    u32 building_piece
    u64 at_block, at_offset, at_left
    u64 marks, credit  # marks posted since it was connected, and how many may be
    u64 confirmed  # how many the destination has seen; all of them where a completion says that
    u64 fences  # nothing is sent before the link has heard of that many
    # The destination's end.
    u32 receives, receives_turn
    u64 marks_seen, marks_told, drain_until
    PieceId *lost  # what the source asks about
    u32 lost_n
    bint lost_asked

cdef struct Rail:
    Plane *plane
    Link *link
    Worker *worker
    Rail *next
    pthread_mutex_t lock
    Channel channel
    u32 kick  # atomic: look for something to send
    u32 interest  # atomic: what its worker waits for, EPOLLIN and EPOLLOUT
    u32 driven
    bint gone, suspect
    u64 progress_ns
    bint napping  # a caller waits for the bell
    # Receiving.
    Place place
    Header head
    u32 lead_have, body_have, body_want, tail_have
    # A header and the first 16 bytes behind it, which are never payload; and a trailer and those.
    uint8_t lead[56]
    uint8_t tail[64]
    bint drained  # the kernel had no more behind the payload
    bint is_bulk  # the last answer told how far a long copy is
    uint8_t *body
    iovec *near
    iovec *far
    u32 near_at, near_n
    u64 payload_left, discard_left, last_id
    u64 version, newest  # of the regions that the payload was checked against
    Arriving *arriving
    u64 pulled_of, pulled_nbytes  # not yet told, of which transfer, in how many frames
    u32 pulled
    # Sending.
    uint8_t *queued  # acknowledgements and the like
    uint8_t *sending
    u64 queued_n, queued_room, sending_room
    uint8_t *frame  # header and descriptors
    u64 trailer
    iovec *out
    u32 out_at, out_n
    u64 out_left, out_tail, out_payload
    Transfer *out_transfer

# Looking again before sleeping. On a machine with idle cores a wake-up costs more than a small copy;
# on a busy one the spinning itself keeps off the processor whom it waits for. Which it is shows
# when the processor is offered to others: if somebody takes it, a worker tries another one, and
# if there it is the same, nothing spins for a while. That it took long is not enough: a virtual
# machine's processor itself stands still now and then (250 times a second, measured).
cdef struct Spin:
    u64 most_ns, resume_ns, backoff_ns
    u32 displaced  # as last counted
    u32 shared  # turns in a row that another spinning thread took
    bint may_move
    u64 moved_ns  # when it last changed the processor

# All rails between two engines that one Engine.connect opened.
cdef struct Link:
    Plane *plane
    u64 number
    bint is_incoming, is_pull
    Identity peer  # of an incoming link: whom tags may be opened for
    pid_t pid
    int pidfd  # of the process whose memory is copied; -1 where there is none
    u64 alive_ns  # atomic: when that process was last seen alive
    pthread_mutex_t lock
    u32 refs, dropped, dead
    int code, errnum
    char text[TEXT_MAX]
    Rail *rails[RAILS_MAX]
    u32 rails_n, rails_alive, turn
    Spin spin  # of callers that wait; only they touch it, with the interpreter lock
    Block *spare  # atomic: see `blocks_new`
    u64 progress_ns  # when anything moved: whoever moved it looks again
    # Submitted and unfinished, in this order; `issue` is the first that is not all issued.
    Transfer *first
    Transfer *last
    Transfer *issue
    Map by_id
    u64 next_id
    u32 unfinished, begun, reads_asked, reads_served
    Map arriving
    Mapping *mappings
    Mapping *unlinked  # could not be unmapped, as somebody copied out of them
    # PULLs that any rail's worker may take up, in this order.
    Job *jobs
    Job *jobs_last
    u32 jobs_n  # atomic
    # Over RDMA.
    bint is_direct
    Worker *worker
    Pair *pairs[RAILS_MAX]
    Transfer *ready  # granted, with pieces that wait for a rail
    Transfer *ready_last
    Far *table  # the destination's memory, as it has told; the worker's alone
    u32 table_n, table_room
    u64 table_told  # version of the regions that the source was told of
    u32 table_rights  # what it has asked for: keys of regions that allow none of it are kept back
    Arriving *undrained  # fenced, but the rails they were granted are not closed yet
    void *slots[BEGUN_MAX]  # Arriving; their generations
    uint8_t generations[BEGUN_MAX]
    u32 slots_turn, slots_taken
    u64 fences
    # Atomic: how many fences have asked that every pair be drained, and for how many they are.
    u32 breaks_asked, breaks_done
    u32 breaks_begun  # the worker's alone, as all that follows of breaking
    bint is_breaking, is_draining, must_drain
    u32 revoked  # granted transfers whose tags were closed since
    u32 kicks  # atomic: counts calls to look for something to send
    u32 hopeless  # atomic: without a rail for too long
    u32 has_ended  # atomic: its pairs and connections are gone
    bint has_outlasted
    # Under the plane's lock of events.
    News news[RAILS_MAX]
    bint has_died, has_news
    Link *next_news
    u64 rail_bytes[RAILS_MAX]  # atomic, as the next one: done, by rail
    u64 rail_flying[RAILS_MAX]  # handed over and not done
    # Under the link's lock: what rails have moved in measurements, and how long these took.
    u64 rail_moved[RAILS_MAX]
    u64 rail_busy_ns[RAILS_MAX]

# A PULL that waits: its header, then as iovecs the ranges here and there.
cdef struct Job:
    Job *next
    Header head
    Arriving *arriving
    iovec ranges[1]  # 2 * head.count

# Memory of the source that this process has mapped too: `near` is where `start` lies here.
cdef struct Mapping:
    u64 serial, start, end, mapped
    uint8_t *near
    Mapping *next

cdef struct Worker:
    Plane *plane
    u32 index
    Spin spin
    int epoll, eventfd
    u32 sleeping, kicked
    u32 processor  # atomic: the one it copies on, plus 1; 0 while it does not copy
    Section section
    pthread_mutex_t lock
    Rail *adopted
    Rail *rails
    Pair *adopted_pairs
    Pair *pairs
    u32 draining
    bint owes  # a bell
    uint8_t *scratch

cdef struct Plane:
    u32 workers_n, stop
    u64 stall_ns, rail_ns, suspect_ns, spin_ns, segment_bytes
    u32 segment_blocks
    Worker workers[WORKERS_MAX]
    Sections sections
    Regions regions
    Tags tags
    pthread_mutex_t notices_lock
    Transfer *notices
    int notices_eventfd
    pthread_mutex_t events_lock
    Link *news  # links of which Python has not read all, each with a reference
    int events_eventfd
    uint8_t *zeros
    # Atomic: how often each RDMA device has failed as a whole, and why the last time.
    u32 nic_faults[NICS_MAX]
    u32 nic_reasons[NICS_MAX]
    u32 kicks  # atomic: counts calls to look at all pairs
    u64 links
    u64 bytes_sent, bytes_received, rails_in, rails_out
    u64 mapped_bytes  # atomic: of peers' memory
    u64 outcomes[4]
