# SPDX-License-Identifier: Apache-2.0
# Tags: rights to write, which the destination opens, counts arrivals under, and takes back.
#
# A tag is open until a fence revokes it, and is known until that fence is confirmed: no section lands
# under one that was revoked, and nothing is granted. A transfer keeps the opening under which it
# began, so that a tag that is opened anew is another right.

from te.core.maps cimport Map
from te.core.sync cimport pthread_mutex_t, u32, u64

cdef struct Opening:
    u64 value, count
    u64 nbytes  # atomic: of the transfers counted; added first, so that it is never too few
    u64 progress_ns  # atomic: of a read, when bytes last landed
    u32 is_open, refs  # atomic
    u32 granted  # atomic: transfers that their sources may be writing unasked

cdef struct Tags:
    pthread_mutex_t lock
    Map known

cdef void tags_init(Tags *tags) noexcept nogil
cdef void tags_close(Tags *tags) noexcept nogil

# Opens a tag that is not known. Whether it was not, and in `is_open` whether it is open now.
cdef bint tag_open(Tags *tags, u64 value, bint *is_open) noexcept nogil

# An opening that no tag leads to; one reference is the caller's.
cdef Opening *opening_new(u64 value) noexcept nogil
# With a reference for the caller; NULL when the tag is not known: never opened, or forgotten because
# its fence was confirmed.
cdef Opening *opening_get(Tags *tags, u64 value) noexcept nogil
# The same; NULL when the tag is not open.
cdef Opening *opening_find(Tags *tags, u64 value) noexcept nogil
cdef void opening_drop(Opening *o) noexcept nogil  # NULL is none
# Its fence is confirmed. Its tag may be known anew by then, for another opening.
cdef void opening_forget(Tags *tags, Opening *o) noexcept nogil
