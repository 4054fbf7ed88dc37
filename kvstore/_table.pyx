# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# A hash table from key digests to where objects are said to lie. Open addressing with linear
# probing: one entry is 36 bytes beside each other, where a dict of Python objects takes 300. The
# interpreter's lock guards it; a look-up of 1,000 keys takes 30 µs. See _table.pyi for the contract.

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
    SMALLEST = 1024

cdef struct Entry:
    u64 key[2]
    u32 form         # of the signature and the size
    u32 slot
    u32 generation
    u16 owner
    u8 state
    u8 unused

cdef struct Change:  # kvstore.changes.CHANGE
    u64 key[2]
    u32 form
    u32 slot
    u32 generation
    u32 op

cdef struct Place:   # kvstore.changes.PLACE
    u32 slot
    u32 generation
    u16 owner
    u8 found
    u8 unused
    u32 unused2


cdef inline u64 hash_of(const u64 *key) noexcept nogil:
    """Keys are digests already; a key of little entropy still spreads."""
    return (key[0] ^ (key[1] * <u64>0x9E3779B97F4A7C15)) * <u64>0xD6E8FEB86659FD93


cdef inline bint same(const u64 *one, const u64 *other) noexcept nogil:
    return one[0] == other[0] and one[1] == other[1]


cdef class Table:
    cdef Entry *entries
    cdef u64 mask, used, gone
    cdef u64 counts[OWNERS]

    def __cinit__(self):
        self.entries = <Entry *>calloc(SMALLEST, sizeof(Entry))
        if self.entries is NULL:
            raise MemoryError
        self.mask = SMALLEST - 1
        self.used = self.gone = 0
        memset(self.counts, 0, sizeof(self.counts))

    def __dealloc__(self):
        free(self.entries)

    def __len__(self):
        return self.used

    @property
    def nbytes(self):
        return (self.mask + 1) * sizeof(Entry)

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
        cdef u64 i, dropped = 0
        if owner >= OWNERS:
            raise ValueError(f"owner {owner} must be below {OWNERS}")
        for i in range(self.mask + 1):
            if self.entries[i].state == USED and self.entries[i].owner == owner:
                self.entries[i].state = GONE
                dropped += 1
        self.used -= dropped
        self.gone += dropped
        self.counts[owner] = 0
        return dropped

    def look_up(self, object keys, u32 form, object ranks, object places):
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
            found = self.find(<u64 *>key_view.buf, n, form, <u8 *>rank_view.buf,
                              <Place *>place_view.buf)
        finally:
            PyBuffer_Release(&place_view)
            PyBuffer_Release(&rank_view)
            PyBuffer_Release(&key_view)
        return found

    cdef u64 find(
        self, const u64 *keys, Py_ssize_t n, u32 form, const u8 *ranks, Place *places
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef u64 found = 0
        for i in range(n):
            if i + 8 < n:
                look_ahead(&self.entries[hash_of(&keys[2 * (i + 8)]) & self.mask])
            self.find_one(&keys[2 * i], form, ranks, &places[i])
            found += places[i].found == FOUND
        return found

    cdef void find_one(
        self, const u64 *key, u32 form, const u8 *ranks, Place *place
    ) noexcept nogil:
        cdef u64 at = hash_of(key) & self.mask
        cdef Entry *e
        cdef u8 best = 0
        memset(place, 0, sizeof(Place))
        while True:
            e = &self.entries[at]
            if e.state == FREE:
                return
            if e.state == USED and same(e.key, key):
                if e.form != form:
                    if place.found == MISSING:
                        place.found = OTHER
                elif ranks[e.owner] > best:
                    best = ranks[e.owner]
                    place.slot, place.generation = e.slot, e.generation
                    place.owner, place.found = e.owner, FOUND
            at = (at + 1) & self.mask

    cdef Entry *entry_of(self, u32 owner, Change *c) noexcept nogil:
        cdef u64 at = hash_of(c.key) & self.mask
        cdef Entry *e
        while True:
            e = &self.entries[at]
            if e.state == FREE:
                return NULL
            if e.state == USED and e.owner == owner and e.form == c.form and same(e.key, c.key):
                return e
            at = (at + 1) & self.mask

    cdef int add(self, u32 owner, Change *c) except -1:
        cdef Entry *e = self.entry_of(owner, c)
        if e is NULL:
            if 4 * (self.used + self.gone + 1) > 3 * (self.mask + 1):
                self.grow()
            e = self.place_for(c.key)
            self.gone -= e.state == GONE
            e.key[0], e.key[1] = c.key[0], c.key[1]
            e.form, e.owner, e.state = c.form, owner, USED
            self.used += 1
            self.counts[owner] += 1
        e.slot, e.generation = c.slot, c.generation
        return 0

    cdef void remove(self, u32 owner, Change *c) noexcept:
        """Of this generation: what came to the same key since then stays."""
        cdef Entry *e = self.entry_of(owner, c)
        if e is not NULL and e.generation == c.generation and e.slot == c.slot:
            e.state = GONE
            self.used -= 1
            self.gone += 1
            self.counts[owner] -= 1

    cdef Entry *place_for(self, const u64 *key) noexcept nogil:
        cdef u64 at = hash_of(key) & self.mask
        while self.entries[at].state == USED:
            at = (at + 1) & self.mask
        return &self.entries[at]

    cdef int grow(self) except -1:
        """Twice as large if it is half full, else as large, without what is gone."""
        cdef Entry *old = self.entries
        cdef u64 i, count = self.mask + 1
        cdef u64 more = count * 2 if 2 * self.used >= count else count
        cdef Entry *fresh = <Entry *>calloc(more, sizeof(Entry))
        if fresh is NULL:
            raise MemoryError(f"no memory for {more} entries")
        self.entries, self.mask, self.gone = fresh, more - 1, 0
        for i in range(count):
            if old[i].state == USED:
                memcpy(self.place_for(old[i].key), &old[i], sizeof(Entry))
        free(old)
        return 0


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
