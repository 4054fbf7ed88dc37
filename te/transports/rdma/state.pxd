# SPDX-License-Identifier: Apache-2.0
# What a link over RDMA is made of. It has one connection, which carries words about its rails, and up
# to RAILS_MAX rails, each a connected queue pair (qp). The link's worker alone touches the queue
# pairs, except for what is atomic.

from libc.stdint cimport int64_t, uint8_t
from te.core.inbound cimport Arriving
from te.core.link cimport Link, Transfer
from te.core.regions cimport Key, Region, regions_above
from te.core.sync cimport add64, pthread_mutex_t, u32, u64
from te.core.wire cimport BEGUN_MAX, RemoteRange, NICS_MAX, POSTED_MAX, PieceId, RAILS_MAX, TEXT_MAX
from te.core.worker cimport Polled, Silence, Worker
from te.transports.rdma.balance cimport Pace
from te.transports.rdma.pieces cimport Piece
from te.transports.rdma.rails cimport Rail, RailTiming
from te.verbs.abi cimport Endpoint, VSendWr, VSge

# `Transfer.own`, under the link's lock.
cdef struct Posting:
    Piece *pieces
    u32 pieces_n, waiting
    u32 head  # the first of the waiting pieces: index + 1, or 0
    u64 waiting_bytes
    const uint8_t *distances  # of the devices from its memory: a key's
    u32 mark  # of its trailing writes; the index of a piece is added
    u32 unmarked  # pieces of which something may be written, but no mark
    bint granted, is_ready
    Transfer *next_ready

# `Arriving.own` of a transfer that was granted.
cdef struct Granted:
    u32 slot, pieces, landed
    u32 by_rail[RAILS_MAX]  # of those that have landed
    bint has_slot
    u64 revoked_ns  # when it was refused after it had been granted
    Arriving *next  # of those that wait for rails to be drained
    u64 bits[1]  # which pieces have landed: pieces / 64 + 1

# A piece that a qp carries.
cdef struct Posted:
    Transfer *transfer
    u32 piece, blocks
    u64 nbytes
    u64 sequence  # of the work request that ends it; not known, and huge, before that one is built
    u64 mark  # which of the qp's marks; 0 of a read, which has none
    bint is_unmarked  # counted in `Posting.unmarked`

# What the transport keeps for an engine. Atomic: how often each device has failed as a whole, and
# why the last time; how often its port's link has come back, and all of them together; calls to look
# at all queue pairs; and how many rails went down while they carried, and came back.
cdef struct Devices:
    u32 faults[NICS_MAX]
    u32 reasons[NICS_MAX]
    u32 returns[NICS_MAX]
    u32 returned
    u32 kicks
    u32 lost, remade

cdef struct Qp:
    Polled polled  # first: a worker's pointer to it is one to this
    Link *link
    Endpoint *e
    u32 index, epoch, local_nic, remote_nic
    u64 hello  # at a destination: the number of the hello that has asked for it
    u32 kicks_seen, faults_seen
    bint armed
    bint is_quiet, is_overdue  # at the last check
    u64 progress_ns
    Silence silence  # of what it has under way
    u64 others_moved  # bytes of other rails when that began
    # The source's end: kept work requests, of which [built_at, built_n) are not handed over yet.
    VSendWr *wrs
    VSge *sges
    u32 built_at, built_n, since_signal
    u64 sequence, completed  # of work requests built and known to be done
    u32 mark_data
    Posted ring[POSTED_MAX]
    u32 ring_first, ring_n
    u32 unbuilt, unbuilt_blocks  # the last ones, which are not built, or not as a whole
    u64 ring_bytes
    u64 busy_since, busy_bytes  # of the measurement under way: never idle since, done since
    bint is_building  # the first unbuilt one
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

# An attempt to make a rail that came to nothing: the newest of the rail.
cdef struct Refusal:
    bint is_new
    u32 epoch
    char text[TEXT_MAX]

# A device's queue pair that was to be destroyed, and was not: nobody uses it, and it may still write.
cdef struct Undead:
    Endpoint *e
    Undead *next

# `Link.own`.
cdef struct Direct:
    Devices *devices
    # The link's worker alone changes the rails (`rail_step` in qps.pxd). Others read them, and it
    # writes them, under the lock, behind which no other is taken.
    pthread_mutex_t rails_lock
    Rail rails[RAILS_MAX]
    double rates[RAILS_MAX]  # the paces', as last looked at
    RailTiming timing
    Refusal refusals[RAILS_MAX]  # under the same lock, by who has made the attempt
    u32 is_refused  # atomic: some of them are new
    Qp *qps[RAILS_MAX]  # of the rails that have one; the worker's, as the next four
    Undead *undead
    u32 broken[RAILS_MAX]  # that the destination has broken: its reason, plus 1
    u64 hellos[RAILS_MAX]  # at a destination: of the newest queue pair of each rail
    u32 returned_seen
    u32 returns_seen[RAILS_MAX]
    u32 kicks  # atomic: counts calls to look for something to send
    int verdict  # the worker's, as the next: what is unfinished is to be given up for that, in its turn
    bint has_given_up  # and nothing moved since
    # The source's side, under the link's lock.
    Transfer *ready  # granted, with pieces that wait for a rail
    Transfer *ready_last
    u32 turn  # which rail is the next one among equals
    u32 rails_n
    u32 nics[RAILS_MAX]  # the devices that they leave by
    Pace paces[RAILS_MAX]
    double speeds[RAILS_MAX]  # out of the paces, for the balancer
    double fastest  # of them
    u64 tried_ns[RAILS_MAX]  # when it last counted as fast as the fastest
    # The destination's memory, as it has told.
    RemoteRange *table
    u32 table_n, table_room
    u64 rail_flying[RAILS_MAX]  # bytes that rails have under way: atomic
    # The destination's side, under the link's lock.
    u64 table_told  # version of the regions that the source was told of
    u32 table_rights  # what it has asked for: keys of regions that allow none of it are kept back
    Arriving *undrained  # fenced, but the rails they were granted are not closed yet
    Arriving *slots[BEGUN_MAX]
    uint8_t generations[BEGUN_MAX]  # of the slots
    u32 slots_turn, slots_taken
    u32 revoked  # granted transfers whose tags were closed since
    u64 fences  # of either side: how often all rails were broken
    # Atomic: how many fences have asked that every qp be drained, and for how many they are.
    u32 breaks_asked, breaks_done
    u32 breaks_begun  # the worker's alone, as all that follows of breaking
    bint is_draining, must_drain


cdef inline Direct *direct_of(Link *link) noexcept nogil:
    return <Direct *>link.own


cdef inline Worker *worker_of(Link *link) noexcept nogil:
    """Its owner, which has its queue pairs; also before it has a connection."""
    return &link.plane.workers.of[link.number % link.plane.workers.n]


cdef inline Rail *rail_of(Qp *q) noexcept nogil:
    """Of a queue pair that is its rail's. Its worker's."""
    return &direct_of(q.link).rails[q.index]


cdef inline bint is_current(Qp *q) noexcept nogil:
    """Whether it is its rail's, and no former one."""
    return direct_of(q.link).qps[q.index] == q


cdef inline Posting *posting_of(Transfer *t) noexcept nogil:
    return <Posting *>t.own


cdef inline Granted *granted_of(Arriving *a) noexcept nogil:
    """NULL if it was not granted, or needs no slot any more."""
    cdef Granted *g = <Granted *>a.own
    return g if g != NULL and g.has_slot else NULL


cdef inline Key *own_key(Transfer *t, u64 address) noexcept nogil:
    """A transfer's own blocks lie in regions that it holds, and that may go with it."""
    cdef Region *region = t.held[regions_above(t.held, t.held_n, address) - 1]
    cdef u32 i
    for i in range(region.keys_n):
        if region.keys[i].start <= address < region.keys[i].end:
            return &region.keys[i]
    return NULL


cdef inline Posted *first_unbuilt(Qp *q) noexcept nogil:
    return &q.ring[(q.ring_first + q.ring_n - q.unbuilt) % POSTED_MAX]


cdef inline Posted *take_posted(Qp *q) noexcept nogil:
    """The first piece that the qp carries, which it carries no more. Under the link's lock; valid until
    the qp is given another one."""
    cdef Posted *one = &q.ring[q.ring_first]
    q.ring_first = (q.ring_first + 1) % POSTED_MAX
    q.ring_n -= 1
    q.ring_bytes -= one.nbytes
    one.transfer.in_flight -= 1
    add64(&direct_of(q.link).rail_flying[q.index], -<int64_t>one.nbytes)
    return one
