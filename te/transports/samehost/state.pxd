# SPDX-License-Identifier: Apache-2.0
# What the modules of the same host share.

from libc.stdint cimport uint8_t
from te.core.inbound cimport Arriving
from te.core.kinds cimport Kind
from te.core.maps cimport Map
from te.core.payload cimport Payload
from te.core.posix cimport iovec, pid_t
from te.core.sending cimport Streams
from te.core.sync cimport pthread_mutex_t, u32, u64
from te.core.wire cimport BLOCKS_MAX, Header
from te.core.worker cimport Silence

# Memory of the source that this process has mapped, too: a part of one of its regions.
cdef struct Mapping:
    u64 serial, start, end
    uint8_t *here  # where `start` lies in this process
    u64 nbytes  # that are mapped: the whole memory file, or whole parts of what a kind maps
    Kind *kind  # that has; NULL: the processor reads it
    u64 number  # for the kind's `unmap`; 0 if there is nothing to undo
    # A bit for each CHUNK_BYTES of it, atomic: all of that has been found there. NULL of one whose
    # pages are not looked for.
    u32 *found
    Mapping *next
    Mapping *after  # of those that were taken out of the list: who looks through it may still need `next`

# A PULL that waits: its header, then as iovecs the ranges here and there.
cdef struct Job:
    Job *next
    Header head
    Arriving *arriving
    iovec ranges[1]  # 2 * head.count

cdef enum:
    NONCE_BYTES = 16  # as in messages.py

# `Link.own`.
cdef struct Samehost:
    Streams streams  # first
    pid_t pid  # whose memory is copied
    int pidfd  # of that process
    u32 tells_of_end  # atomic: the link's owner is woken up when that process ends
    u64 alive_ns  # atomic: when it was last seen alive
    # Where that process has what, and no child of it; it is read with what is copied.
    u64 nonce_at
    u64 nonce_ns  # atomic: when it was last found there
    uint8_t nonce[NONCE_BYTES]
    Mapping *mappings
    Mapping *unlinked  # could not be unmapped, as somebody copied out of them
    u32 has_kinds  # atomic: there is, or was, a mapping that a kind has made
    # Threads that wait for the source's memory and whose workers others have taken over: nobody else
    # begins to wait for it. Atomic, as is the time of the first of them.
    u32 waits
    u64 waits_since_ns
    Silence silence  # of those copies; the owner's
    # The other side's, under a lock of its own: serials of regions that the peer has mapped.
    pthread_mutex_t mapped_lock
    Map mapped_by_peer
    # PULLs that any connection's worker may take up, in this order; under the link's lock.
    Job *jobs
    Job *jobs_last
    u32 jobs_n  # atomic

# `Connection.own`.
cdef struct Pulling:
    Payload payload  # first
    u64 told_of, told_nbytes  # copied and not yet told, of which transfer, in how many frames
    u32 told_n
    uint8_t seen[NONCE_BYTES]  # what was read of the nonce
    # What `copy_foreign` has returned, errno, and whether the fault is this side's; not looked at yet.
    ssize_t moved
    int errnum
    bint is_own_fault, has_moved
    bint is_noted  # in `Samehost.waits`
    iovec remote[BLOCKS_MAX + 1]  # where the source has what goes to `Connection.local`, and one more
