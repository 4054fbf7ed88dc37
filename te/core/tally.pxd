# SPDX-License-Identifier: Apache-2.0
# What links count, for Engine.stats: te/stats.py says what each figure means.
#
# A counter has one writer at a time: who has the turn of the connection's worker, or the link's lock. So it is
# added to without a locked instruction; anybody may read it.

from te.core.sync cimport load64, note64, u32, u64
from te.core.wire cimport RAILS_MAX

cdef enum:
    CODES_MAX = 32  # reasons that are told apart; a transport's own begin with 20
    LEDGERS_MAX = 8  # transports that an engine can have

# Payload of one rail. It fills a line of the cache: other rails are other workers' business.
cdef struct Flow:
    u64 sent_nbytes, received_nbytes
    u64 unused[6]

# What became of transfers, by status and by reason, of those submitted here; and of those that peers
# have written here. Under the link's lock, or by its only worker.
cdef struct Outcomes:
    u64 by_status[4]
    u64 failed[CODES_MAX]
    u64 done_blocks, done_nbytes
    u64 landed, landed_nbytes

# The same of several links, those that are gone included.
cdef struct Tally:
    u64 sent_nbytes[RAILS_MAX]
    u64 received_nbytes[RAILS_MAX]
    Outcomes outcomes
    u64 ended[CODES_MAX]  # links, by reason

# Of the links of one transport.
cdef struct Ledger:
    const char *transport  # its name, which is never copied: it tells ledgers apart
    Tally tally


cdef inline void count(u64 *counter, u64 n) noexcept nogil:
    note64(counter, counter[0] + n)


cdef inline u32 code_of(int code) noexcept nogil:
    return <u32>code if 0 <= code < CODES_MAX else 0


cdef inline void counters_add(void *into, void *more, size_t nbytes) noexcept nogil:
    """Of a struct that has nothing but counters. `into` is the caller's alone."""
    cdef u64 *to = <u64 *>into
    cdef u64 *of = <u64 *>more
    cdef u64 i
    for i in range(nbytes // sizeof(u64)):
        to[i] += load64(&of[i])


cdef inline Tally *tally_of(Ledger *ledgers, const char *transport) noexcept nogil:
    """The one of that transport; the last is for what finds no place, which nobody has."""
    cdef u32 i
    for i in range(LEDGERS_MAX):
        if ledgers[i].transport == NULL:
            ledgers[i].transport = transport
        if ledgers[i].transport == transport:
            return &ledgers[i].tally
    return &ledgers[LEDGERS_MAX - 1].tally
