# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# A hash table from key digests to where objects are said to lie. Open addressing with linear
# probing: one entry is 32 bytes beside each other, where a dict of Python objects takes 300. The
# interpreter's lock guards it; a look-up of 1,000 keys takes 30 µs. See _table.pyi for the contract.
#
# It is cut into shards, which grow one by one. A table in one piece kept other threads, such as
# SGLang's scheduler, from running for up to 1.9 s while it grew to 7 million entries; with shards
# they wait no longer than beside a thread that does something else (30 ms on two busy cores).

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_Check
from libc.stdint cimport int8_t, uint16_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

ctypedef uint8_t u8
ctypedef uint16_t u16
ctypedef uint32_t u32
ctypedef uint64_t u64

cdef extern from *:
    """
    static inline void look_ahead(const void *p) { __builtin_prefetch(p); }
    """
    void look_ahead(const void *p) noexcept nogil

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

cdef enum:
    KEY = 16
    FREE = 0       # never used since the table was made: ends a probe
    USED = 1
    GONE = 2       # removed: a probe goes on behind it
    ADDED = 1      # Change.op
    REMOVED = 2
    MISSING = 0    # what a look-up says of a key
    FOUND = 1
    OTHER = 2      # it is there under another signature or size alone
    OWNERS = 1024
    SHARD_BITS = 10
    SHARDS = 1024
    SMALLEST = 16
    AT_ONCE = 1024  # changes, after which other threads may have the interpreter's lock
    SHARDS_AT_ONCE = 16
    IN_MEMORY = 128  # ranks are below it

cdef u32 LOWER_TIER = 0xFFFFFFFF  # the slot of an object that does not lie in memory

cdef struct Entry:
    u64 key[2]
    u32 fingerprint         # of the signature and the size
    u32 slot
    u32 generation
    u16 owner
    u8 state
    u8 unused

cdef struct Change:  # kvstore.objects.changes.CHANGE
    u64 key[2]
    u32 fingerprint
    u32 slot
    u32 generation
    u32 op

cdef struct Shard:
    Entry *entries   # NULL before the first one
    u64 mask, used, gone

cdef struct Place:   # kvstore.objects.changes.PLACE
    u32 slot
    u32 generation
    u16 owner
    u8 found
    u8 copies     # owners that have it, as far as they count
    u32 unused


cdef inline u64 hash_of(const u64 *key) noexcept nogil:
    """Keys are digests already; a key of little entropy still spreads."""
    return (key[0] ^ (key[1] * <u64>0x9E3779B97F4A7C15)) * <u64>0xD6E8FEB86659FD93


cdef inline bint same(const u64 *one, const u64 *other) noexcept nogil:
    return one[0] == other[0] and one[1] == other[1]


cdef inline Shard *shard_of(Shard *shards, u64 hashed) noexcept nogil:
    """By the bits that the place within it does not depend on."""
    return &shards[hashed >> (64 - SHARD_BITS)]


cdef inline u8 rank_of(const Entry *e, const u8 *ranks) noexcept nogil:
    """0 if the owner cannot be used; memory comes before what lies below."""
    cdef u8 rank = ranks[e.owner]
    return rank | IN_MEMORY if rank and e.slot != LOWER_TIER else rank


cdef class Table:
    cdef Shard *shards
    cdef u64 used, places
    cdef u64 counts[OWNERS]

    def __cinit__(self):
        self.shards = <Shard *>calloc(SHARDS, sizeof(Shard))
        if self.shards is NULL:
            raise MemoryError
        self.used = self.places = 0
        memset(self.counts, 0, sizeof(self.counts))

    def __dealloc__(self):
        cdef int i
        if self.shards is not NULL:
            for i in range(SHARDS):
                free(self.shards[i].entries)
            free(self.shards)

    def __len__(self):
        return self.used

    @property
    def nbytes(self):
        return self.places * sizeof(Entry) + SHARDS * sizeof(Shard)

    def count(self, u32 owner):
        if owner >= OWNERS:
            raise ValueError(f"owner {owner} must be below {OWNERS}")
        return self.counts[owner]

    def apply(self, u32 owner, object changes):
        """Adds and removals of one owner, in order."""
        cdef Py_buffer view
        cdef Change *c
        cdef Py_ssize_t i, n
        if owner >= OWNERS:
            raise ValueError(f"owner {owner} must be below {OWNERS}")
        PyObject_GetBuffer(changes, &view, PyBUF_SIMPLE)
        try:
            if view.len % sizeof(Change):
                raise ValueError(f"{view.len} bytes are no whole number of changes")
            c = <Change *>view.buf
            n = view.len // sizeof(Change)
            for i in range(n):
                if i and i % AT_ONCE == 0:
                    with nogil:
                        pass
                if c[i].op == ADDED:
                    self.add(owner, &c[i])
                elif c[i].op == REMOVED:
                    self.remove(owner, &c[i])
                else:
                    raise ValueError(f"change {i} has the operation {c[i].op}, which is none")
        finally:
            PyBuffer_Release(&view)

    def drop(self, u32 owner):
        """Forgets all entries of an owner; how many these were."""
        cdef u64 dropped = 0
        cdef int i
        if owner >= OWNERS:
            raise ValueError(f"owner {owner} must be below {OWNERS}")
        for i in range(SHARDS):
            if i % SHARDS_AT_ONCE == 0:
                with nogil:
                    pass
            dropped += self.drop_in(&self.shards[i], owner)
        return dropped

    cdef u64 drop_in(self, Shard *shard, u32 owner) noexcept nogil:
        cdef u64 i, dropped = 0
        if shard.entries is NULL:
            return 0
        for i in range(shard.mask + 1):
            if shard.entries[i].state == USED and shard.entries[i].owner == owner:
                shard.entries[i].state = GONE
                dropped += 1
        shard.used -= dropped
        shard.gone += dropped
        self.used -= dropped
        self.counts[owner] -= dropped
        return dropped

    def look_up(self, object keys, u32 fingerprint, object ranks, object places):
        cdef Py_buffer key_view, rank_view, place_view
        cdef Py_ssize_t n
        cdef u64 found
        PyObject_GetBuffer(keys, &key_view, PyBUF_SIMPLE)
        PyObject_GetBuffer(ranks, &rank_view, PyBUF_SIMPLE)
        PyObject_GetBuffer(places, &place_view, PyBUF_WRITABLE)
        try:
            n = key_view.len // KEY
            if key_view.len % KEY or place_view.len != n * <Py_ssize_t>sizeof(Place):
                raise ValueError(f"{key_view.len} bytes of keys, {place_view.len} of places")
            if rank_view.len != OWNERS:
                raise ValueError(f"{rank_view.len} ranks, and {OWNERS} are needed")
            found = self.find(<u64 *>key_view.buf, n, fingerprint, <u8 *>rank_view.buf,
                              <Place *>place_view.buf)
        finally:
            PyBuffer_Release(&place_view)
            PyBuffer_Release(&rank_view)
            PyBuffer_Release(&key_view)
        return found

    cdef u64 find(
        self, const u64 *keys, Py_ssize_t n, u32 fingerprint, const u8 *ranks, Place *places
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef u64 found = 0, hashed
        cdef Shard *later
        for i in range(n):
            if i + 8 < n:
                hashed = hash_of(&keys[2 * (i + 8)])
                later = shard_of(self.shards, hashed)
                look_ahead(&later.entries[hashed & later.mask])
            self.find_one(&keys[2 * i], fingerprint, ranks, &places[i])
            found += places[i].found == FOUND
        return found

    cdef void find_one(
        self, const u64 *key, u32 fingerprint, const u8 *ranks, Place *place
    ) noexcept nogil:
        cdef u64 hashed = hash_of(key)
        cdef Shard *shard = shard_of(self.shards, hashed)
        cdef u64 at = hashed & shard.mask
        cdef Entry *e
        cdef u8 best = 0, rank
        memset(place, 0, sizeof(Place))
        if shard.entries is NULL:
            return
        while True:
            e = &shard.entries[at]
            if e.state == FREE:
                return
            if e.state == USED and same(e.key, key):
                rank = rank_of(e, ranks) if e.fingerprint == fingerprint else 0
                if e.fingerprint != fingerprint and place.found == MISSING:
                    place.found = OTHER
                place.copies += rank > 0 and place.copies < 255
                if rank > best:
                    best = rank
                    place.slot, place.generation = e.slot, e.generation
                    place.owner, place.found = e.owner, FOUND
            at = (at + 1) & shard.mask

    cdef int add(self, u32 owner, Change *c) except -1:
        cdef u64 hashed = hash_of(c.key)
        cdef Shard *shard = shard_of(self.shards, hashed)
        cdef Entry *e = entry_of(shard, hashed, owner, c)
        if e is NULL:
            if 4 * (shard.used + shard.gone + 1) > 3 * (shard.mask + 1):
                self.grow(shard)
            e = place_for(shard, hashed)
            shard.gone -= e.state == GONE
            e.key[0], e.key[1] = c.key[0], c.key[1]
            e.fingerprint, e.owner, e.state = c.fingerprint, owner, USED
            shard.used += 1
            self.used += 1
            self.counts[owner] += 1
        e.slot, e.generation = c.slot, c.generation
        return 0

    cdef void remove(self, u32 owner, Change *c) noexcept:
        """Of this generation: what came to the same key since then stays."""
        cdef u64 hashed = hash_of(c.key)
        cdef Shard *shard = shard_of(self.shards, hashed)
        cdef Entry *e = entry_of(shard, hashed, owner, c)
        if e is not NULL and e.generation == c.generation and e.slot == c.slot:
            e.state = GONE
            shard.used -= 1
            shard.gone += 1
            self.used -= 1
            self.counts[owner] -= 1

    cdef int grow(self, Shard *shard) except -1:
        """Twice as large if it is half full, else as large, without what is gone."""
        cdef Entry *old = shard.entries
        cdef u64 i, count = shard.mask + 1 if old is not NULL else 0
        cdef u64 more = max(count * 2 if 2 * shard.used >= count else count, <u64>SMALLEST)
        cdef Entry *fresh = <Entry *>calloc(more, sizeof(Entry))
        if fresh is NULL:
            raise MemoryError(f"no memory for {more} entries")
        shard.entries, shard.mask, shard.gone = fresh, more - 1, 0
        self.places += more - count
        for i in range(count):
            if old[i].state == USED:
                memcpy(place_for(shard, hash_of(old[i].key)), &old[i], sizeof(Entry))
        free(old)
        return 0


cdef Entry *entry_of(Shard *shard, u64 hashed, u32 owner, Change *c) noexcept nogil:
    cdef u64 at = hashed & shard.mask
    cdef Entry *e
    if shard.entries is NULL:
        return NULL
    while True:
        e = &shard.entries[at]
        if e.state == FREE:
            return NULL
        if e.state == USED and e.owner == owner and e.fingerprint == c.fingerprint and same(e.key, c.key):
            return e
        at = (at + 1) & shard.mask


cdef Entry *place_for(Shard *shard, u64 hashed) noexcept nogil:
    cdef u64 at = hashed & shard.mask
    while shard.entries[at].state == USED:
        at = (at + 1) & shard.mask
    return &shard.entries[at]


def sole_owner(object places):
    cdef Py_buffer view
    cdef Place *place
    cdef Py_ssize_t i, n
    cdef bint is_sole
    cdef u16 owner = 0
    PyObject_GetBuffer(places, &view, PyBUF_SIMPLE)
    place = <Place *>view.buf
    n = view.len // sizeof(Place)
    is_sole = n > 0 and view.len % sizeof(Place) == 0
    if is_sole:
        owner = place[0].owner
    for i in range(n if is_sole else 0):
        is_sole &= (
            place[i].found == FOUND and place[i].slot != LOWER_TIER and place[i].owner == owner
        )
    PyBuffer_Release(&view)
    return <int>owner if is_sole else -1


cdef int8_t[256] DIGITS
cdef int _i
for _i in range(256):
    DIGITS[_i] = -1
for _i in range(10):
    DIGITS[48 + _i] = _i
for _i in range(6):
    DIGITS[97 + _i] = DIGITS[65 + _i] = 10 + _i


def digests_of_hex(object texts):
    """The first 16 bytes of each of the digests in hex."""
    cdef Py_ssize_t i, k, n = len(texts), size
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, n * KEY)
    cdef u8 *to = <u8 *>PyBytes_AsString(packed)
    cdef const u8 *text
    cdef int high, low, bad
    for i in range(n):
        one = texts[i]
        if not PyUnicode_Check(one):
            raise ValueError(f"key {i} is of {type(one).__name__}, not a digest in hex")
        text = <const u8 *>PyUnicode_AsUTF8AndSize(one, &size)
        if size < 2 * KEY:
            raise ValueError(f"key {i} is {one!r}: a digest in hex has at least {2 * KEY} digits")
        bad = 0
        for k in range(KEY):
            high, low = DIGITS[text[2 * k]], DIGITS[text[2 * k + 1]]
            bad |= high | low
            to[k] = <u8>(high << 4 | low)
        if bad < 0:
            raise ValueError(f"key {i} is {one!r}, and no digest in hex")
        to += KEY
    return packed
