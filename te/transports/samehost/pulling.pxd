# SPDX-License-Identifier: Apache-2.0
# The same host: the destination copies, out of the source's memory, so that its consent, bounds
# and fence hold whatever the source does.

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection, Moved
from te.core.inbound cimport Arriving
from te.core.landing cimport Landings
from te.core.posix cimport iovec, pid_t
from te.core.sending cimport Streams
from te.core.sync cimport u32, u64
from te.core.wire cimport BLOCKS_MAX, Header

# Memory of the source that this process has mapped too: `local` is where `start` lies here.
cdef struct Mapping:
    u64 serial, start, end, mapped
    uint8_t *here
    Mapping *next

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
    u64 alive_ns  # atomic: when it was last seen alive
    # Where that process has what, and no child of it; it is read with what is copied.
    u64 nonce_at
    u64 nonce_ns  # atomic: when it was last found there
    uint8_t nonce[NONCE_BYTES]
    Mapping *mappings
    Mapping *unlinked  # could not be unmapped, as somebody copied out of them
    # PULLs that any connection's worker may take up, in this order; under the link's lock.
    Job *jobs
    Job *jobs_last
    u32 jobs_n  # atomic

# `Connection.own`.
cdef struct Pulling:
    Landings landings  # first
    u64 told_of, told_nbytes  # copied and not yet told, of which transfer, in how many frames
    u32 told_n
    uint8_t seen[NONCE_BYTES]  # what was read of the nonce
    iovec remote[BLOCKS_MAX + 1]  # where the source has what goes to `Connection.local`, and one more

cdef void pulling_pull(Connection *c, Arriving *a) noexcept nogil
cdef Moved pulling_copy(Connection *c) noexcept nogil
cdef void pulling_landed(Connection *c, bint is_good) noexcept nogil
cdef bint pulling_take_up(Connection *c, bint is_idle) noexcept nogil
cdef bint pulling_has_work(Connection *c) noexcept nogil
# Whether the process whose memory is copied has ended: its number may be another one's soon, while
# somebody else may have kept its connection (fork(2)).
cdef bint process_gone(Samehost *own) noexcept nogil
cdef void forget_jobs(Samehost *own) noexcept nogil
