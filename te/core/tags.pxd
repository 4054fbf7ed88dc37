# SPDX-License-Identifier: Apache-2.0
# Tags: rights to write, which the destination opens, counts arrivals under, and takes back. One may
# be for a single peer, and for certain ranges of memory.
#
# A tag is open until a fence revokes it, and is known until that fence is confirmed: no section lands
# under one that was revoked, and nothing is granted. A transfer keeps the opening under which it
# began, so that a tag that is opened anew is another right.

from libc.stdint cimport uint8_t
from te.core.maps cimport Map
from te.core.sync cimport pthread_mutex_t, u32, u64

cdef enum:
    RANGES_MAX = 1 << 16  # of a tag, once those that touch are one; 1 MiB, and 256 KiB to find them

# Who a peer says that it is, as on its card.
cdef struct Identity:
    uint8_t engine[16]
    u64 epoch

cdef struct Range:
    u64 start, end  # end: behind the last byte

cdef struct Opening:
    u64 value, count
    bint is_bound, is_of_life  # for one engine alone; for one life of it, by its epoch
    Identity peer
    Range *ranges  # rising, apart from each other; NULL: it is for all that the regions allow
    u64 ranges_n
    # Of many ranges: the one with the last start in the first k of equal parts of 2**shift bytes.
    u32 *places
    u64 places_n
    u32 shift
    u64 nbytes  # atomic: of the transfers counted; added first, so that it is never too few
    u64 progress_ns  # atomic: of a read, when bytes last landed
    u32 is_open, refs  # atomic
    u32 granted  # atomic: transfers that their sources may be writing unasked
    u32 is_withdrawn  # atomic: the links were told that those have to end

cdef struct Tags:
    pthread_mutex_t lock
    Map known

cdef void tags_init(Tags *tags) noexcept nogil
cdef void tags_close(Tags *tags) noexcept nogil

# Opens a tag that is not known, as the new opening, which is taken over. Whether it was not known;
# and in `is_open` whether it is open now. By a calling thread.
cdef bint tag_open(Tags *tags, Opening *new, bint *is_open) noexcept

# An opening that no tag leads to; one reference is the caller's. Takes over the ranges, which
# `ranges_normalise` has made, or NULL.
cdef Opening *opening_new(u64 value, Range *ranges, u64 ranges_n) noexcept nogil
# For that engine alone; and only for that life of it if `is_of_life`.
cdef void opening_bind(Opening *o, const Identity *peer, bint is_of_life) noexcept nogil
# With a reference for the caller; NULL when the tag is not known: never opened, or forgotten because
# its fence was confirmed. By a calling thread.
cdef Opening *opening_asked(Tags *tags, u64 value) noexcept
# The same, by a worker; NULL when the tag is not open, or not for that peer.
cdef Opening *opening_find(Tags *tags, u64 value, const Identity *peer) noexcept nogil
# Whether it is for that peer, which need not be the only one.
cdef bint opening_admits(Opening *o, const Identity *peer) noexcept nogil
# The sentence for a peer that finds none, which is the same whatever the cause is.
cdef void say_not_open(char *text, size_t room, u64 value) noexcept nogil
cdef void opening_drop(Opening *o) noexcept nogil  # NULL is none
# Its fence is confirmed. Its tag may be known anew by then, for another opening. By a calling thread.
cdef void opening_forget(Tags *tags, Opening *o) noexcept

# Sorts the ranges, of which none is empty, and makes those one that overlap or touch; how many are
# left.
cdef u64 ranges_normalise(Range *ranges, u64 n) noexcept nogil
# Whether these bytes, which may be any, may be written under it; NULL is no tag, which has no ranges.
cdef bint opening_covers(const Opening *o, u64 address, u64 nbytes) noexcept nogil


cdef void say_not_covered(
    char *text, size_t room, Opening *o, u64 address, u64 nbytes
) noexcept nogil
