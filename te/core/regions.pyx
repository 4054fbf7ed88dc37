# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from te.core.heap cimport need
from te.core.sync cimport add32, load32, load64, look_later, LOOK_NS, store_pointer, u32, u64
from te.core.wire cimport REMOTE_RIGHTS, RIGHT_READ, RIGHT_UNTAGGED


def packed_key(u64 start, u64 end, object lkeys, object rkeys, object distances):
    cdef Key key
    memset(&key, 0, sizeof(Key))
    key.start, key.end = start, end
    if not len(lkeys) == len(rkeys) == len(distances) <= NICS_MAX:
        raise ValueError("each device has its keys and its distance")
    for i in range(len(lkeys)):
        key.lkeys[i], key.rkeys[i], key.distances[i] = lkeys[i], rkeys[i], distances[i]
    return (<char *>&key)[:sizeof(Key)]


cdef void regions_open(Regions *all, Sections *sections) noexcept nogil:
    all.sections = sections
    all.now = <Snapshot *>need(sizeof(Snapshot))
    all.now.version = 1


cdef void regions_close(Regions *all) noexcept nogil:
    publish(all, <Snapshot *>need(sizeof(Snapshot)))
    snapshot_free(all.now)
    all.now = NULL
    while all.leaving != NULL:
        region_forget(all, all.leaving)


# -- one region

cdef Region *region_new(
    u64 start, u64 end, u64 serial, Kind *kind, u32 rights, bint is_shared, const void *keys,
    size_t keys_nbytes
) noexcept nogil:
    cdef Region *r = <Region *>need(sizeof(Region))
    r.start, r.end, r.serial, r.is_shared = start, end, serial, is_shared
    r.rights = OWN_USE | (rights & REMOTE_RIGHTS)
    r.kind = kind
    r.refs = 1
    r.keys_n = <u32>(keys_nbytes / sizeof(Key))
    r.keys = <Key *>need(r.keys_n * sizeof(Key) + 1)
    memcpy(r.keys, keys, r.keys_n * sizeof(Key))
    return r


cdef void region_drop(Region *r) noexcept nogil:
    if add32(&r.refs, -1) == 0:
        free(r.keys)
        free(r)


cdef void await_readers(Region *r, u64 until_ns) noexcept nogil:
    while load32(&r.readers) and look_later(until_ns, LOOK_NS):
        pass


# -- all of them

cdef void snapshot_free(Snapshot *s) noexcept nogil:
    cdef u32 i
    for i in range(s.count):
        region_drop(s.regions[i])
    free(s.regions)
    free(s)


cdef Region **regions_hold(Snapshot *s, const uint8_t *touched, u32 *n) noexcept nogil:
    cdef Region **held = <Region **>need((s.count + 1) * sizeof(Region *))
    cdef u32 i
    n[0] = 0
    for i in range(s.count):
        if touched[i]:
            add32(&s.regions[i].refs, 1)
            add32(&s.regions[i].readers, 1)
            held[n[0]] = s.regions[i]
            n[0] += 1
    return held


cdef void regions_let_go(Region **held, u32 n) noexcept nogil:
    cdef u32 i
    for i in range(n):
        add32(&held[i].readers, -1)
        region_drop(held[i])
    free(held)


cdef Snapshot *snapshot_copy(Snapshot *s) noexcept nogil:
    return copied(s, NULL, 0, NULL)


cdef Snapshot *copied(Snapshot *s, Region *more, u32 at, Region *less) noexcept nogil:
    """A copy of the snapshot with one region more, at an index, or without one; NULL is none."""
    cdef Snapshot *new = <Snapshot *>need(sizeof(Snapshot))
    cdef u32 i
    new.version, new.newest = s.version, s.newest
    new.regions = <Region **>need((s.count + 2) * sizeof(Region *))
    for i in range(s.count + 1):
        if more != NULL and i == at:
            append(new, more)
        if i < s.count and s.regions[i] != less:
            append(new, s.regions[i])
    return new


cdef inline void append(Snapshot *s, Region *r) noexcept nogil:
    add32(&r.refs, 1)
    s.regions[s.count] = r
    s.count += 1


cdef void reclaim(Regions *all) noexcept nogil:
    """Frees the retired that no worker can be using: each has left the section it was in."""
    cdef Snapshot *s = all.retired
    cdef Snapshot *kept = NULL
    cdef Snapshot *older
    cdef u32 i
    cdef bint used
    while s != NULL:
        older = s.older
        used = False
        for i in range(all.sections.n):
            if s.seen[i] & 1 and load64(&all.sections.of[i].count) == s.seen[i]:
                used = True
        if used:
            s.older = kept
            kept = s
        else:
            snapshot_free(s)
        s = older
    all.retired = kept


cdef void publish(Regions *all, Snapshot *new) noexcept nogil:
    cdef Snapshot *old = all.now
    cdef u32 i
    new.version = old.version + 1
    store_pointer(&all.now, new)
    for i in range(all.sections.n):
        old.seen[i] = load64(&all.sections.of[i].count)
    old.older = all.retired
    all.retired = old
    reclaim(all)


cdef Region *region_of(Regions *all, u64 serial) noexcept nogil:
    cdef Region *r = all.leaving
    cdef u32 i
    while r != NULL and r.serial != serial:
        r = r.next
    for i in range(all.now.count if r == NULL else 0):
        if all.now.regions[i].serial == serial:
            r = all.now.regions[i]
    return r


cdef void region_put(Regions *all, Region *r) noexcept nogil:
    cdef Snapshot *old = all.now
    cdef Snapshot *new = copied(old, r, regions_above(old.regions, old.count, r.start), NULL)
    new.newest = max(old.newest, r.serial)
    publish(all, new)
    if r.is_leaving:
        region_forget(all, r)
    else:
        region_drop(r)


cdef void region_take(Regions *all, Region *r) noexcept nogil:
    if r.is_leaving:
        return
    r.is_leaving = True
    add32(&r.refs, 1)
    r.next = all.leaving
    all.leaving = r
    publish(all, copied(all.now, NULL, 0, r))


cdef void region_forget(Regions *all, Region *r) noexcept nogil:
    cdef Region **at = &all.leaving
    while at[0] != NULL and at[0] != r:
        at = &at[0].next
    if at[0] == r:
        at[0] = r.next
        r.is_leaving = False
        region_drop(r)


# -- sentences

cdef void say_nearest(
    char *text, u64 address, u64 nbytes, u32 count, u64 start, u64 end
) noexcept nogil:
    cdef int n = snprintf(
        text, SENTENCE_MAX, b"%llu bytes at 0x%llx lie outside the registered memory; ",
        <unsigned long long>nbytes, <unsigned long long>address)
    if count == 0:
        snprintf(text + n, SENTENCE_MAX - n, b"nothing is registered for peers")
        return
    snprintf(
        text + n, SENTENCE_MAX - n,
        b"the nearest of %u regions for peers is [0x%llx, 0x%llx) of %llu bytes",
        count, <unsigned long long>start, <unsigned long long>end,
        <unsigned long long>(end - start))


cdef void say_not_allowed(char *text, u64 address, u64 nbytes, u32 right) noexcept nogil:
    cdef const char *rest = b"write; register it there with remote=\"tagged\" or \"read-tagged\""
    if right == RIGHT_READ:
        rest = b"read; register it there with remote=\"read\" or \"read-tagged\""
    elif right == RIGHT_UNTAGGED:
        rest = (b"write without a tag; write under one that is expected there, or register it there"
                b" with remote=\"read-write\"")
    snprintf(
        text, SENTENCE_MAX, b"%llu bytes at 0x%llx are memory that peers may not %s",
        <unsigned long long>nbytes, <unsigned long long>address, rest)


cdef void say_outside(Snapshot *s, u64 address, u64 nbytes, char *text) noexcept nogil:
    cdef Region *near = NULL
    cdef u32 i, count = 0
    for i in range(s.count):
        if not s.regions[i].rights & REMOTE_RIGHTS:
            continue
        count += 1
        if near == NULL or gap(s.regions[i].start, s.regions[i].end, address) < gap(
            near.start, near.end, address
        ):
            near = s.regions[i]
    if near == NULL:
        say_nearest(text, address, nbytes, 0, 0, 0)
    else:
        say_nearest(text, address, nbytes, count, near.start, near.end)


cdef void say_refused(Snapshot *s, u64 address, u64 nbytes, u32 right, char *text) noexcept nogil:
    if is_registered(s, address, nbytes, s.newest, REMOTE_RIGHTS, NULL):
        say_not_allowed(text, address, nbytes, right)
    else:
        say_outside(s, address, nbytes, text)
