# SPDX-License-Identifier: Apache-2.0
# Transfers as their destination sees them: they begin, land, are abandoned, and are finished. What
# the source is told of that, and how, is the transport's.
#
# Functions are called under the link's lock, but for `may_land` and `is_placed`: these are for a
# worker inside its section (te/core/sections.pxd).

from te.core.link cimport Link
from te.core.posix cimport iovec
from te.core.sections cimport Section
from te.core.sync cimport u32, u64
from te.core.tags cimport Opening

cdef struct Arriving:
    u64 id, tag, total
    u64 announced  # how much the source has said that it sends
    u64 arrived
    u32 staged_frames  # frames of it whose payload has begun, and whose bytes are told as parts
    Opening *opening  # NULL: without a tag
    bint is_reply  # to a read of this side
    u32 refused  # atomic: workers of other connections look at it without the lock
    bint abandoned  # by the source: what it has announced is all that comes
    bint spoiled  # the source could not read some of it
    void *own  # the transport's, of malloc; freed with it

# Where a landing goes: ranges that were registered when they were checked, and may be written for
# as long as they are registered since.
cdef struct Place:
    u64 version, newest

# The transfer that this is about: as it was begun, or a new one. NULL after a violation, which
# `text` says. A new one that may not land is `refused`: `text` says why, and the source is to be
# told. Room for TEXT_MAX characters, empty if there is nothing to say.
cdef Arriving *arriving_begin(
    Link *link, u64 id, u64 tag, u64 total, bint is_reply, char *text
) noexcept nogil
cdef Arriving *arriving_of(Link *link, u64 id) noexcept nogil  # NULL if there is none
# Refuses it: nothing of it lands any more. True the first time: the source is to be told.
cdef bint arriving_refuse(Arriving *a) noexcept nogil
# More of it is announced; False after a violation, which `text` says.
cdef bint arriving_announce(Arriving *a, u64 nbytes, char *text) noexcept nogil
# The source gives it up, and has sent `nbytes` of it; False if that cannot be.
cdef bint arriving_abandon(Arriving *a, u64 nbytes) noexcept nogil
# All of it has landed: counts it. Inside a section of its own, so that no arrival is counted after
# a fence has returned. False if it may not land any more, and `reason` says why.
cdef bint arriving_count(Link *link, Section *section, Arriving *a, char *reason) noexcept nogil
# Forgets it; and frees one that the link does not know any more.
cdef void arriving_forget(Link *link, Arriving *a) noexcept nogil
cdef void arriving_free(Arriving *a) noexcept nogil
# Of a link that has ended.
cdef void arriving_forget_all(Link *link) noexcept nogil

# Whether bytes of it may land now, in these ranges; else `reason` says why not.
cdef bint may_land(
    Link *link, Arriving *a, Place *place, iovec *ranges, u32 n, char *reason
) noexcept nogil
# Whether the transfer may be written to these ranges: all are registered for what it is, and are
# among those of its tag; notes that in `place`. Else `reason` says what is wrong.
cdef bint is_placed(
    Link *link, Arriving *a, Place *place, iovec *ranges, u32 n, char *reason
) noexcept nogil


cdef inline bint is_whole(Arriving *a) noexcept nogil:
    return a.arrived == a.total and a.staged_frames == 0
