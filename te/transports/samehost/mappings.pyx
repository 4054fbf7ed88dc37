# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free
from te.core.frames cimport Connection
from te.core.heap cimport need
from te.core.kinds cimport Copy, Kind
from te.core.link cimport Link
from te.core.payload cimport Payload, payload_of
from te.core.plane cimport plane_private
from te.core.posix cimport _SC_PAGESIZE, iovec, mincore, munmap, sysconf
from te.core.regions cimport regions_above, Snapshot
from te.core.sync cimport add64, load32, load_pointer, or32, store32, store_pointer, u32, u64
from te.transports.samehost.state cimport Mapping, Samehost

cdef enum:
    CHUNK_PAGES_MAX = 16  # of 4 KiB, the smallest that there are

cdef char OURS  # its address tells the transport's


cdef u64 *mapped_bytes(Link *link) noexcept nogil:
    return <u64 *>plane_private(link.plane, &OURS, sizeof(u64))


# -- holes

cdef void mapping_watch_holes(Mapping *m) noexcept nogil:
    m.found = <u32 *>need(sizeof(u32) * (m.nbytes / (32 * CHUNK_BYTES) + 1))


cdef bint mapping_has(Mapping *m, u64 offset, u64 nbytes) noexcept nogil:
    cdef u64 i, end = offset + nbytes
    if m.found == NULL:
        return True
    for i in range(offset / CHUNK_BYTES, (end - 1) / CHUNK_BYTES + 1):
        if not load32(&m.found[i / 32]) & <u32>1 << i % 32 and not chunk_has(m, i, offset, end):
            return False
    return True


cdef bint chunk_has(Mapping *m, u64 i, u64 offset, u64 end) noexcept nogil:
    """Whether what the range has of the chunk is there; notes if all of the chunk is. A page that was
    swapped out counts as not there: it is copied out of the source's memory."""
    cdef unsigned char there[CHUNK_PAGES_MAX]
    cdef u64 start = i * <u64>CHUNK_BYTES, page = sysconf(_SC_PAGESIZE), at, k
    cdef u64 stop = min(start + <u64>CHUNK_BYTES, m.nbytes)
    cdef bint is_whole = True
    if mincore(m.here + start, stop - start, there):
        return False
    for k in range((stop - start + page - 1) / page):
        at = start + k * page
        if there[k] & 1:
            continue
        is_whole = False
        if at < end and offset < at + page:
            return False
    if is_whole:
        or32(&m.found[i / 32], <u32>1 << i % 32)
    return True


# -- the list

cdef Mapping *mapping_at(Samehost *own, u64 address) noexcept nogil:
    cdef Mapping *m = <Mapping *>load_pointer(&own.mappings)
    while m != NULL and not m.start <= address < m.end:
        m = m.next
    return m


cdef bint is_kinds(Samehost *own, u64 address) noexcept nogil:
    cdef Mapping *m
    if load32(&own.has_kinds) == 0:
        return False
    m = mapping_at(own, address)
    return m != NULL and m.kind != NULL


cdef void mapping_put(Link *link, Mapping *m) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    add64(mapped_bytes(link), m.nbytes)
    if m.kind != NULL:
        store32(&own.has_kinds, 1)
    m.next = own.mappings
    store_pointer(&own.mappings, m)


cdef void mapping_undo(Mapping *m) noexcept nogil:
    if m.kind == NULL:
        munmap(m.here, m.nbytes)
    elif m.number:
        m.kind.ops.unmap(m.kind.state, m.number)
    free(m.found)
    free(m)


cdef void unmap(Link *link, Mapping *m) noexcept nogil:
    add64(mapped_bytes(link), -m.nbytes)
    mapping_undo(m)


cdef Mapping *mappings_take(Link *link, u64 serial) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    cdef Mapping **at = &own.mappings
    cdef Mapping *m
    cdef Mapping *taken = NULL
    while at[0] != NULL:
        m = at[0]
        if m.serial != serial:
            at = &m.next
            continue
        store_pointer(at, m.next)
        m.after = taken
        taken = m
    return taken


cdef void mappings_drop(Link *link, Mapping *taken) noexcept nogil:
    cdef Mapping *m
    while taken != NULL:
        m = taken
        taken = m.after
        unmap(link, m)


cdef void mappings_keep(Link *link, Mapping *taken) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    cdef Mapping *last = taken
    while last.after != NULL:
        last = last.after
    last.after = own.unlinked
    own.unlinked = taken


cdef void mappings_free(Link *link) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    cdef Mapping *m = own.mappings
    while m != NULL:
        m.after = m.next
        m = m.next
    mappings_drop(link, own.mappings)
    mappings_drop(link, own.unlinked)
    own.mappings = own.unlinked = NULL


# -- copies by kinds

cdef Kind *kind_at(Snapshot *now, u64 address, u64 *end) noexcept nogil:
    """Of the registered memory there, and where its region ends; NULL if there is none."""
    cdef u32 i = regions_above(now.regions, now.count, address)
    if i == 0 or address >= now.regions[i - 1].end:
        return NULL
    end[0] = now.regions[i - 1].end
    return now.regions[i - 1].kind


cdef u32 mapped_copies(
    Connection *c, iovec *remote, Copy *copies, u32 most, u64 slot_bytes, Kind **kind, bint *is_direct, u64 *nbytes
) noexcept nogil:
    cdef Samehost *own = <Samehost *>c.link.own
    cdef Payload *p = payload_of(c)
    cdef Snapshot *now = <Snapshot *>load_pointer(&c.link.plane.regions.now)
    cdef u32 i = p.local_at, n = 0
    cdef u64 src, dst, end = 0, part, offset = 0
    cdef Mapping *m = NULL
    cdef bint is_its_own
    is_direct[0] = False
    nbytes[0] = 0
    while i < p.local_n and n < most and (is_direct[0] or nbytes[0] < slot_bytes):
        src, dst = <u64>remote[i].iov_base + offset, <u64>p.local[i].iov_base + offset
        if m == NULL or not m.start <= src < m.end:
            m = mapping_at(own, src)
        if m == NULL or m.kind == NULL:
            break
        is_its_own = kind_at(now, dst, &end) == m.kind
        if n == 0:
            kind[0], is_direct[0] = m.kind, is_its_own
        elif m.kind != kind[0] or is_its_own != is_direct[0]:
            break
        part = min(p.local[i].iov_len - offset, m.end - src)
        part = min(part, end - dst if is_its_own else slot_bytes - nbytes[0])
        copies[n].dst, copies[n].src = <void *>dst, m.here + (src - m.start)
        copies[n].nbytes = part
        n += 1
        nbytes[0] += part
        offset += part
        if offset == p.local[i].iov_len:
            i += 1
            offset = 0
    return n


cdef u64 bytes_before_kinds(Connection *c, iovec *remote) noexcept nogil:
    cdef Samehost *own = <Samehost *>c.link.own
    cdef Payload *p = payload_of(c)
    cdef u64 nbytes = 0
    cdef u32 i
    if load32(&own.has_kinds) == 0:
        return p.left
    for i in range(p.local_at, p.local_n):
        if is_kinds(own, <u64>remote[i].iov_base):
            break
        nbytes += p.local[i].iov_len
    return nbytes
