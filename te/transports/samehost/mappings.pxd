# SPDX-License-Identifier: Apache-2.0
# Memory of the source that this process has mapped. The list changes under the interpreter's lock; a
# worker looks into it inside a section, so that what it has found stays until that is over, or until
# the copy that it has begun there is.

from te.core.frames cimport Connection
from te.core.kinds cimport Copy, Kind
from te.core.link cimport Link
from te.core.posix cimport iovec
from te.core.sync cimport u32, u64
from te.transports.samehost.state cimport Mapping, Samehost

# What the transport keeps for an engine: bytes of peers' memory that are mapped; atomic.
cdef u64 *mapped_bytes(Link *link) noexcept nogil

cdef enum:
    CHUNK_BYTES = 64 << 10

# The memory file of one that the processor reads has so many bytes: from now on `mapping_has` looks.
cdef void mapping_watch_holes(Mapping *m) noexcept nogil
# Whether all these bytes of the memory file are there, from an offset on. Reading where there are none
# would have the kernel make pages that are charged to this process, for as long as the file lives.
# None of them goes again (`keeps_pages`), so what has been found there is not looked for any more.
cdef bint mapping_has(Mapping *m, u64 offset, u64 nbytes) noexcept nogil

# That has the address; NULL if there is none.
cdef Mapping *mapping_at(Samehost *own, u64 address) noexcept nogil
# Whether the range begins where a kind has mapped.
cdef bint is_kinds(Samehost *own, u64 address) noexcept nogil
# A new one, whose fields the caller has set.
cdef void mapping_put(Link *link, Mapping *m) noexcept nogil
# One that is not put into the list after all.
cdef void mapping_undo(Mapping *m) noexcept nogil
# Takes those of a region out of the list: nothing more is copied from them; the first of them, or NULL.
cdef Mapping *mappings_take(Link *link, u64 serial) noexcept nogil
# Unmaps what was taken out, without any lock. No copy from it is under way.
cdef void mappings_drop(Link *link, Mapping *taken) noexcept nogil
# The same with the link, as a copy has not ended.
cdef void mappings_keep(Link *link, Mapping *taken) noexcept nogil
# Of a link that nobody has any more.
cdef void mappings_free(Link *link) noexcept nogil

# What comes next of a connection's payload lies in memory that a kind has mapped, `remote` says where. How much of it that
# kind can copy at once, as so many copies (`most` at most); 0 if that begins with memory that is not the kind's.
# `is_direct`: to where it belongs, which is memory of the same kind. Else it is to go through a slot of `slot_bytes`.
cdef u32 mapped_copies(
    Connection *c, iovec *remote, Copy *copies, u32 most, u64 slot_bytes, Kind **kind, bint *is_direct, u64 *nbytes
) noexcept nogil
# How many bytes come before the first that a kind has mapped.
cdef u64 bytes_before_kinds(Connection *c, iovec *remote) noexcept nogil
