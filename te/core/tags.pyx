# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memcmp, memcpy, memset
from te.core.heap cimport need
from te.core.maps cimport map_free, map_get, map_put, map_take
from te.core.sync cimport (
    add32, load32, lock_as_caller, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock, u32, u64,
)


cdef enum:
    FEW = 256  # ranges: less than that are sorted and found soon enough


cdef void tags_init(Tags *tags) noexcept nogil:
    pthread_mutex_init(&tags.lock, NULL)


cdef void tags_close(Tags *tags) noexcept nogil:
    cdef u64 i
    for i in range(tags.known.size):
        opening_drop(<Opening *>tags.known.values[i])
    map_free(&tags.known)
    pthread_mutex_destroy(&tags.lock)


cdef bint tag_open(Tags *tags, Opening *new, bint *is_open) noexcept:
    cdef Opening *o
    lock_as_caller(&tags.lock)
    o = <Opening *>map_get(&tags.known, new.value)
    cdef bint is_new = o == NULL
    if is_new:
        o = new
        map_put(&tags.known, new.value, new)
    is_open[0] = load32(&o.is_open) != 0
    pthread_mutex_unlock(&tags.lock)
    if not is_new:
        opening_drop(new)
    return is_new


# -- one opening

cdef Opening *opening_new(u64 value, Range *ranges, u64 ranges_n) noexcept nogil:
    cdef Opening *o = <Opening *>need(sizeof(Opening))
    o.value, o.ranges, o.ranges_n = value, ranges, ranges_n
    o.is_open = o.refs = 1
    if FEW <= ranges_n < <u32>-1:
        find_places(o)
    return o


cdef void opening_bind(Opening *o, const Identity *peer, bint is_of_life) noexcept nogil:
    memcpy(&o.peer, peer, sizeof(Identity))
    o.is_bound, o.is_of_life = True, is_of_life


cdef void opening_drop(Opening *o) noexcept nogil:
    if o != NULL and add32(&o.refs, -1) == 0:
        free(o.ranges)
        free(o.places)
        free(o)


cdef bint opening_admits(Opening *o, const Identity *peer) noexcept nogil:
    if not o.is_bound:
        return True
    return memcmp(o.peer.engine, peer.engine, sizeof(peer.engine)) == 0 and (
        not o.is_of_life or o.peer.epoch == peer.epoch
    )


cdef Opening *get_and_unlock(Tags *tags, u64 value) noexcept nogil:
    cdef Opening *o = <Opening *>map_get(&tags.known, value)
    if o != NULL:
        add32(&o.refs, 1)
    pthread_mutex_unlock(&tags.lock)
    return o


cdef Opening *opening_asked(Tags *tags, u64 value) noexcept:
    lock_as_caller(&tags.lock)
    return get_and_unlock(tags, value)


cdef Opening *opening_find(Tags *tags, u64 value, const Identity *peer) noexcept nogil:
    cdef Opening *o
    pthread_mutex_lock(&tags.lock)
    o = get_and_unlock(tags, value)
    if o != NULL and not (load32(&o.is_open) and opening_admits(o, peer)):
        opening_drop(o)
        return NULL
    return o


cdef void opening_forget(Tags *tags, Opening *o) noexcept:
    lock_as_caller(&tags.lock)
    if <Opening *>map_get(&tags.known, o.value) == o:
        map_take(&tags.known, o.value)
        opening_drop(o)
    pthread_mutex_unlock(&tags.lock)


# -- ranges

cdef int by_start(const void *a, const void *b) noexcept nogil:
    cdef u64 one = (<const Range *>a).start, other = (<const Range *>b).start
    return (one > other) - (one < other)


cdef void by_byte(Range *into, const Range *ranges, u64 n, u32 shift) noexcept nogil:
    """Copies them in the order of one byte of their starts; those that share it keep theirs."""
    cdef u64 places[256]
    cdef u64 i, count, before = 0
    cdef u32 value
    memset(places, 0, sizeof(places))
    for i in range(n):
        places[ranges[i].start >> shift & 0xff] += 1
    for i in range(256):
        count = places[i]
        places[i] = before
        before += count
    for i in range(n):
        value = ranges[i].start >> shift & 0xff
        into[places[value]] = ranges[i]
        places[value] += 1


cdef void sort_many(Range *ranges, u64 n) noexcept nogil:
    """Of 200,000 at random qsort takes 35 ms of processor time, this 3, where there is room."""
    cdef Range *room = <Range *>malloc(n * sizeof(Range))
    cdef Range *now = ranges
    cdef Range *next = room
    cdef u64 differ = 0, i
    cdef u32 shift
    if room == NULL:
        qsort(ranges, n, sizeof(Range), by_start)
        return
    for i in range(n):
        differ |= ranges[i].start ^ ranges[0].start
    for shift in range(0, 64, 8):
        if differ >> shift & 0xff:
            by_byte(next, now, n, shift)
            now, next = next, now
    if now == room:
        memcpy(ranges, room, n * sizeof(Range))
    free(room)


cdef u64 ranges_normalise(Range *ranges, u64 n) noexcept nogil:
    cdef u64 i, kept = 0
    for i in range(1, n):
        if ranges[i].start < ranges[i - 1].start:  # Mostly they rise already.
            if n < FEW:
                qsort(ranges, n, sizeof(Range), by_start)
            else:
                sort_many(ranges, n)
            break
    for i in range(n):
        if kept and ranges[i].start <= ranges[kept - 1].end:
            ranges[kept - 1].end = max(ranges[kept - 1].end, ranges[i].end)
        else:
            ranges[kept] = ranges[i]
            kept += 1
    return kept


cdef void find_places(Opening *o) noexcept nogil:
    """For look-ups in no order, if there is room. Among 40,000 ranges a search of them all takes
    300 ns."""
    cdef u64 first = o.ranges[0].start, span = o.ranges[o.ranges_n - 1].start - first, i
    while span >> o.shift >= o.ranges_n:
        o.shift += 1
    o.places_n = (span >> o.shift) + 2
    o.places = <u32 *>calloc(o.places_n, sizeof(u32))
    if o.places == NULL:
        return
    for i in range(o.ranges_n):
        o.places[(o.ranges[i].start - first >> o.shift) + 1] = <u32>i
    for i in range(1, o.places_n):
        o.places[i] = max(o.places[i], o.places[i - 1])


cdef bint ranges_cover(const Range *ranges, u64 n, u64 address, u64 nbytes) noexcept nogil:
    """Whether one of them, of which there is one, has all these bytes."""
    cdef const Range *last = ranges
    cdef u64 half, end = address + nbytes
    while n > 1:  # for the last that starts at the address or below
        half = n >> 1
        if last[half].start <= address:
            last += half
        n -= half
    return last.start <= address <= end <= last.end


cdef bint opening_covers(const Opening *o, u64 address, u64 nbytes) noexcept nogil:
    cdef u64 first = 0, n, part
    if o == NULL or o.ranges == NULL:
        return True
    n = o.ranges_n
    if o.places != NULL and address >= o.ranges[0].start:
        part = min(address - o.ranges[0].start >> o.shift, o.places_n - 2)
        first = o.places[part]
        n = o.places[part + 1] - first + 1
    return n != 0 and ranges_cover(o.ranges + first, n, address, nbytes)


# -- sentences

cdef void say_not_open(char *text, size_t room, u64 value) noexcept nogil:
    snprintf(
        text, room, b"the tag 0x%llx is not open here: never expected, fenced, or expected from"
        b" another engine", <unsigned long long>value)


cdef void say_not_covered(
    char *text, size_t room, Opening *o, u64 address, u64 nbytes
) noexcept nogil:
    cdef int n = snprintf(
        text, room, b"%llu bytes at 0x%llx lie outside the ranges that ",
        <unsigned long long>nbytes, <unsigned long long>address)
    if o.value:
        snprintf(text + n, room - n, b"the tag 0x%llx was opened for; give expect() this one, too",
                 <unsigned long long>o.value)
    else:
        snprintf(text + n, room - n, b"the read is for")
