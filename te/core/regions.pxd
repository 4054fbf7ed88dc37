# SPDX-License-Identifier: Apache-2.0
# Registered memory: what peers may name, and what this engine may read for a transfer.
#
# The regions at one time are a snapshot, sorted by address, which is replaced and never changed. A
# worker uses one inside its section alone, and it is freed when no section that began before it was
# replaced is under way. Those that change the regions are one at a time: they hold the interpreter
# lock.

from libc.stdint cimport uint8_t
from te.core.kinds cimport Kind
from te.core.sections cimport Sections, SECTIONS_MAX
from te.core.sync cimport u32, u64
from te.core.wire cimport NICS_MAX, RIGHT_TAGGED, RIGHT_UNTAGGED

cdef enum:
    SENTENCE_MAX = 256  # bytes of what `say_refused` writes
    # What this engine does itself, which every region allows. The rights of peers are the wire's.
    OWN_USE = 8

cpdef enum:
    # Instead of a device's distance: the memory uses it when no other is left.
    UNUSED = 255

# A range of registered memory as the RDMA devices of its engine call it. Python makes it by
# `packed_key`.
cdef struct Key:
    u64 start, end
    u32 lkeys[NICS_MAX]  # to be named by the engine's own work requests
    u32 rkeys[NICS_MAX]  # to be named by a peer's
    uint8_t distances[NICS_MAX]  # 0 near, 1 the same NUMA node, 2 another; or UNUSED

cdef struct Region:
    u64 start, end, serial
    Kind *kind
    u32 rights  # OWN_USE, and what peers may do: bits of REMOTE_RIGHTS
    bint is_shared  # peers on this host may map it
    u32 readers  # atomic: unfinished transfers that read from it
    u32 refs  # atomic
    bint is_leaving
    Region *next  # of those that leave
    Key *keys  # for each device, and for each part of it that a device takes at once
    u32 keys_n

cdef struct Snapshot:
    u64 version, newest
    u32 count
    Region **regions
    Snapshot *older  # retired before this one, and not yet free
    u64 seen[SECTIONS_MAX]  # where the sections stood when it was retired

cdef struct Regions:
    Snapshot *now  # atomic
    Snapshot *retired
    Region *leaving  # taken out, but a landing or a read may be under way there
    Sections *sections

cdef void regions_open(Regions *all, Sections *sections) noexcept nogil
cdef void regions_close(Regions *all) noexcept nogil  # no worker is left

# One reference is the caller's.
cdef Region *region_new(
    u64 start, u64 end, u64 serial, Kind *kind, u32 rights, bint is_shared, const void *keys,
    size_t keys_nbytes
) noexcept nogil
cdef void region_drop(Region *r) noexcept nogil
# The region, also one that is leaving; NULL if there is none.
cdef Region *region_of(Regions *all, u64 serial) noexcept nogil
# Takes over the caller's reference; or takes back one that is leaving.
cdef void region_put(Regions *all, Region *r) noexcept nogil
# Nothing begins in it any more. It is leaving until `region_forget`.
cdef void region_take(Regions *all, Region *r) noexcept nogil
cdef void region_forget(Regions *all, Region *r) noexcept nogil
# Returns when no transfer reads from it any more, or the time is over.
cdef void await_readers(Region *r, u64 until_ns) noexcept nogil

# Those that were touched (`is_registered`), each with a reference and as read from; of malloc.
cdef Region **regions_hold(Snapshot *s, const uint8_t *touched, u32 *n) noexcept nogil
# Nothing reads from them any more for whom they were held.
cdef void regions_let_go(Region **held, u32 n) noexcept nogil
cdef Snapshot *snapshot_copy(Snapshot *s) noexcept nogil
cdef void snapshot_free(Snapshot *s) noexcept nogil


cdef inline u32 regions_above(Region **sorted, u32 count, u64 address) noexcept nogil:
    """Index of the first region that starts above the address."""
    cdef u32 low = 0, high = count, middle
    while low < high:
        middle = (low + high) >> 1
        if sorted[middle].start <= address:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline bint is_registered(
    Snapshot *s, u64 address, u64 nbytes, u64 newest, u32 rights, uint8_t *touched
) noexcept nogil:
    """Whether every byte lies in regions, which may touch, that have serials up to `newest` and allow
    one of the `rights`; notes the indices of the regions unless `touched` is NULL. Any u64 is safe
    here."""
    cdef u32 i = regions_above(s.regions, s.count, address)
    cdef u64 end = address + nbytes
    if i == 0 or end < address or address >= s.regions[i - 1].end:
        return False
    i -= 1
    while s.regions[i].serial <= newest and s.regions[i].rights & rights:
        if touched != NULL:
            touched[i] = 1
        if end <= s.regions[i].end:
            return True
        i += 1
        if i == s.count or s.regions[i].start != s.regions[i - 1].end:
            return False
    return False


cdef inline u64 gap(u64 start, u64 end, u64 address) noexcept nogil:
    """How far the address lies from the range."""
    if address < start:
        return start - address
    return address - end if address >= end else 0


cdef inline u32 right_to_write(u64 tag) noexcept nogil:
    return RIGHT_TAGGED if tag else RIGHT_UNTAGGED


# Write the sentence for a peer whose range is not registered, or not for what it wants, of up to
# SENTENCE_MAX bytes. Regions in which peers may do nothing are not spoken of. [start, end) is the
# nearest of `count` ranges.
cdef void say_nearest(
    char *text, u64 address, u64 nbytes, u32 count, u64 start, u64 end
) noexcept nogil
# The range is registered, without that one right.
cdef void say_not_allowed(char *text, u64 address, u64 nbytes, u32 right) noexcept nogil
cdef void say_outside(Snapshot *s, u64 address, u64 nbytes, char *text) noexcept nogil
# One of the two, as it is.
cdef void say_refused(Snapshot *s, u64 address, u64 nbytes, u32 right, char *text) noexcept nogil
