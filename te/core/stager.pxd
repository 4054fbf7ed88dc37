# SPDX-License-Identifier: Apache-2.0
# The staging of one worker, a ring for each direction, and who polls it.

from te.core.posix cimport iovec
from te.core.regions cimport Region
from te.core.staging cimport Span, Staging
from te.core.sync cimport u32, u64
from te.core.worker cimport Polled, Worker

cdef struct Stager:
    Polled polled  # first
    Staging out, into
    u32 seen[2]  # `staging_count_ended` when connections were last given a turn, by ring
    void *told[2]  # who was given a turn in the last one, as a slot is free, by ring

# Half of the memory for each direction; the worker has it from now on. NULL if that makes no slot, or
# too many. By a calling thread.
cdef Stager *stager_new(Worker *w, void *base, u64 nbytes, u64 slot_bytes) noexcept
# Its worker does not run. False while a copy is under way: then it, and its memory, stay.
cdef bint stager_free(Stager *s) noexcept nogil
# Whether all copies of the link and under the opening (NULL is any) that were under way at the call
# have ended; False if one has not at `until_ns`.
cdef bint stager_quiesce(Stager *s, void *link, void *opening, u64 until_ns) noexcept nogil

# The first `nbytes` of ranges that lie in regions, sorted by address, as spans of one kind each; how
# many, or 0 if there are more than SPANS_MAX, or they do not lie in regions after all.
cdef u32 spans_of(
    Region **sorted, u32 count, iovec *ranges, u64 nbytes, Span *spans
) noexcept nogil
