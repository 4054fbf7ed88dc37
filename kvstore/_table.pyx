# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# A hash table from key digests to where objects are said to lie. Open addressing with linear
# probing: one entry is 32 bytes beside each other, where a dict of Python objects takes 300. The
# interpreter's lock guards it; a look-up of 1,000 keys takes 30 µs. See _table.pyi for the contract.
#
# It is cut into shards, which grow one by one. A table in one piece kept other threads, such as
# SGLang's scheduler, from running for up to 1.9 s while it grew to 7 million entries; with shards
# they wait no longer than beside a thread that does something else (30 ms on two busy cores).
#
# It lies in a memory file, from where other processes read it (Mirror). Behind a head with the ranks
# and the shards comes a heap of entries; the file is as large as a table can ever be, or as the limits
# of the process allow (ulimit), and has pages only where something was written. A shard's number is odd
# while the shard changes: who reads takes what he has found only if the number is even, and the same
# before and after.

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_Check
from libc.stdint cimport int8_t, int64_t, uint16_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcpy, memset

import fcntl
import mmap
import os
import resource

ctypedef uint8_t u8
ctypedef uint16_t u16
ctypedef uint32_t u32
ctypedef uint64_t u64
ctypedef int64_t i64

cdef extern from *:
    """
    #include <sched.h>
    #include <string.h>
    #include <sys/mman.h>
    static inline void look_ahead(const void *p) { __builtin_prefetch(p); }
    static inline unsigned long load_number(const unsigned long *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline unsigned long load_relaxed(const unsigned long *p) {
        return __atomic_load_n(p, __ATOMIC_RELAXED);
    }
    static inline void begin_change(unsigned long *p) {
        __atomic_store_n(p, *p + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    }
    static inline void end_change(unsigned long *p) { __atomic_store_n(p, *p + 1, __ATOMIC_RELEASE); }
    static inline void after_reads(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    static inline void wait_a_little(int is_long) { if (is_long) sched_yield(); }
    /* They read as zeros from now on. Memory that is locked (mlockall) cannot be freed. */
    static inline void free_pages(void *p, unsigned long n) {
        if (madvise(p, n, MADV_REMOVE)) memset(p, 0, n);
    }
    """
    void look_ahead(const void *p) noexcept nogil
    u64 load_number(const u64 *p) noexcept nogil
    u64 load_relaxed(const u64 *p) noexcept nogil
    void begin_change(u64 *p) noexcept nogil
    void end_change(u64 *p) noexcept nogil
    void after_reads() noexcept nogil
    void wait_a_little(int is_long) noexcept nogil
    void free_pages(void *p, u64 n) noexcept nogil

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
    PAGE = 4096
    RANKS_AT = 4096      # in the file; before them, what kind of file it is
    SHARDS_AT = 8192
    HEAP_AT = 131072
    CLASSES = 40         # of blocks of the heap: each is twice as large as the one before
    LOOKS = 200          # at a shard that changes; behind them, each look gives the processor up
    LOOKS_MAX = 400      # then what is there is not found: whoever changed the shard may have ended

cdef u64 MAGIC = 0x31656c6261547653  # and the version of all that is laid out here
cdef u64 FILE_BYTES = <u64>1 << 36   # 2 thousand million entries
cdef u64 LIMITED_PART = 16           # of the address space, where that is limited (ulimit -v)

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
    u64 number       # see above
    u64 entries      # where they begin in the file; 0 before the first one
    u64 mask
    u64 used         # never fewer than there are
    u64 gone         # for who writes
    u64[3] unused

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
    """0 if the owner cannot be used; memory comes before the lower tier."""
    cdef u8 rank = ranks[e.owner]
    return rank | IN_MEMORY if rank and e.slot != LOWER_TIER else rank


cdef inline Entry *entries_of(u8 *base, const Shard *shard) noexcept nogil:
    """Only if there are any."""
    return <Entry *>(base + shard.entries)


cdef void probe(
    const Entry *entries, u64 mask, u64 hashed, const u64 *key, u32 fingerprint, const u8 *ranks,
    Place *place,
) noexcept nogil:
    """What is known of a key, into zeros. Ends with the entries, whatever is in them."""
    cdef const Entry *e
    cdef u8 best = 0, rank
    cdef u64 i
    for i in range(mask + 1):
        e = &entries[(hashed + i) & mask]
        if e.state == FREE:
            return
        if e.state == USED and e.owner < OWNERS and same(e.key, key):
            rank = rank_of(e, ranks) if e.fingerprint == fingerprint else 0
            if e.fingerprint != fingerprint and place.found == MISSING:
                place.found = OTHER
            place.copies += rank > 0 and place.copies < 255
            if rank > best:
                best = rank
                place.slot, place.generation = e.slot, e.generation
                place.owner, place.found = e.owner, FOUND


cdef i64 copy_keys(
    const Entry *entries, u64 mask, const u8 *ranks, char *to, u64 room
) noexcept nogil:
    """How many these are; -1 if there is room for fewer, since the shard has changed."""
    cdef const Entry *e
    cdef u64 i, found = 0
    for i in range(mask + 1):
        e = &entries[i]
        if e.state == USED and e.owner < OWNERS and ranks[e.owner]:
            if found == room:
                return -1
            memcpy(to + found * KEY, e.key, KEY)
            found += 1
    return found


cdef class Reader:
    """What reads a table, in the process that writes it or in another one."""
    cdef Py_buffer memory
    cdef bint is_open
    cdef u8 *base
    cdef u64 nbytes_mapped

    cdef int open(self, object memory, bint is_written) except -1:
        PyObject_GetBuffer(memory, &self.memory, PyBUF_WRITABLE if is_written else PyBUF_SIMPLE)
        self.is_open = True
        if self.memory.len < HEAP_AT:
            raise ValueError(f"{self.memory.len} bytes are no table")
        self.base, self.nbytes_mapped = <u8 *>self.memory.buf, self.memory.len
        return 0

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.memory)

    cdef inline Shard *shards(self) noexcept nogil:
        return <Shard *>(self.base + SHARDS_AT)

    def __len__(self):
        return (<u64 *>self.base)[1]

    @property
    def ranks(self):
        return PyBytes_FromStringAndSize(<char *>self.base + RANKS_AT, OWNERS)

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
                later = shard_of(self.shards(), hashed)
                look_ahead(&entries_of(self.base, later)[hashed & later.mask])
            self.find_one(&keys[2 * i], fingerprint, ranks, &places[i])
            found += places[i].found == FOUND
        return found

    cdef void find_one(
        self, const u64 *key, u32 fingerprint, const u8 *ranks, Place *place
    ) noexcept nogil:
        cdef u64 hashed = hash_of(key), number, at, mask
        cdef Shard *shard = shard_of(self.shards(), hashed)
        cdef int look
        for look in range(LOOKS_MAX):
            number = load_number(&shard.number)
            if number & 1 == 0:
                at, mask = load_relaxed(&shard.entries), load_relaxed(&shard.mask)
                memset(place, 0, sizeof(Place))
                if at != 0 and self.has(at, mask):
                    probe(<Entry *>(self.base + at), mask, hashed, key, fingerprint, ranks, place)
                after_reads()
                if load_relaxed(&shard.number) == number:
                    return
            wait_a_little(look > LOOKS)
        memset(place, 0, sizeof(Place))

    @property
    def changes(self):
        cdef u64 changes = 0
        cdef int i
        for i in range(SHARDS):
            changes += load_relaxed(&self.shards()[i].number)
        return changes

    def keys(self, object ranks):
        cdef Py_buffer view
        cdef list parts = []
        cdef object part
        cdef int i
        PyObject_GetBuffer(ranks, &view, PyBUF_SIMPLE)
        try:
            if view.len != OWNERS:
                raise ValueError(f"{view.len} ranks, and {OWNERS} are needed")
            for i in range(SHARDS):
                if i % SHARDS_AT_ONCE == 0:
                    with nogil:
                        pass
                part = self.keys_of(&self.shards()[i], <u8 *>view.buf)
                if part is None:
                    return None
                parts.append(part)
        finally:
            PyBuffer_Release(&view)
        return b"".join(parts)

    cdef object keys_of(self, Shard *shard, const u8 *ranks):
        """None if the shard changes all the time."""
        cdef u64 number, at, mask, used
        cdef i64 found
        cdef bytes packed
        cdef int look
        for look in range(LOOKS_MAX):
            number = load_number(&shard.number)
            if number & 1 == 0:
                at, mask = load_relaxed(&shard.entries), load_relaxed(&shard.mask)
                used = load_relaxed(&shard.used)
                if at == 0:
                    return b""
                if self.has(at, mask) and used <= mask + 1:
                    packed = PyBytes_FromStringAndSize(NULL, used * KEY)
                    found = copy_keys(
                        <Entry *>(self.base + at), mask, ranks, PyBytes_AsString(packed), used
                    )
                    after_reads()
                    if found >= 0 and load_relaxed(&shard.number) == number:
                        return packed[: found * KEY]
            wait_a_little(look > LOOKS)
        return None

    cdef inline bint has(self, u64 at, u64 mask) noexcept nogil:
        """Whether entries can be there: what is read while it changes may be anything."""
        return (
            mask & (mask + 1) == 0
            and mask < self.nbytes_mapped // sizeof(Entry)
            and HEAP_AT <= at <= self.nbytes_mapped - (mask + 1) * sizeof(Entry)
        )


cdef class Mirror(Reader):
    def __init__(self, object memory):
        self.open(memory, False)
        if (<u64 *>self.base)[0] != MAGIC:
            raise ValueError("this is no table of the store, or one of another release")


cdef class Table(Reader):
    cdef u64 places, top
    cdef u64 *used  # in the file
    cdef u64 counts[OWNERS]
    cdef u64 free_blocks[CLASSES]  # where the first one of each class begins, and has the next
    cdef readonly int fd

    def __cinit__(self):
        self.fd = -1
        self.places = 0
        memset(self.counts, 0, sizeof(self.counts))
        memset(self.free_blocks, 0, sizeof(self.free_blocks))
        fd = os.memfd_create("kvstore-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            nbytes = file_bytes()
            os.ftruncate(fd, nbytes)
            # Who has it mapped must never find it shorter.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = mmap.mmap(fd, nbytes)
            # A core dump would give each of its holes a page: 64 GiB.
            mapped.madvise(mmap.MADV_DONTDUMP)
            self.open(mapped, True)
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self.top = HEAP_AT
        self.used = <u64 *>self.base + 1
        (<u64 *>self.base)[0] = MAGIC

    def __dealloc__(self):
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def nbytes(self):
        return self.places * sizeof(Entry) + HEAP_AT

    def count(self, u32 owner):
        if owner >= OWNERS:
            raise ValueError(f"owner {owner} must be below {OWNERS}")
        return self.counts[owner]

    def set_rank(self, u32 owner, u8 rank):
        if owner >= OWNERS or rank >= IN_MEMORY:
            raise ValueError(f"owner {owner} must be below {OWNERS}, rank {rank} below {IN_MEMORY}")
        self.base[RANKS_AT + owner] = rank

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
            dropped += self.drop_in(&self.shards()[i], owner)
        return dropped

    cdef u64 drop_in(self, Shard *shard, u32 owner) noexcept nogil:
        cdef u64 i, dropped = 0
        cdef Entry *entries = entries_of(self.base, shard)
        if shard.entries == 0:
            return 0
        begin_change(&shard.number)
        for i in range(shard.mask + 1):
            if entries[i].state == USED and entries[i].owner == owner:
                entries[i].state = GONE
                dropped += 1
        end_change(&shard.number)
        shard.used -= dropped
        shard.gone += dropped
        self.used[0] -= dropped
        self.counts[owner] -= dropped
        return dropped

    cdef int add(self, u32 owner, Change *c) except -1:
        cdef u64 hashed = hash_of(c.key)
        cdef Shard *shard = shard_of(self.shards(), hashed)
        cdef Entry *e = self.entry_of(shard, hashed, owner, c)
        if e is NULL:
            if 4 * (shard.used + shard.gone + 1) > 3 * (shard.mask + 1) or shard.entries == 0:
                self.grow(shard)
            e = place_for(entries_of(self.base, shard), shard.mask, hashed)
            shard.gone -= e.state == GONE
            shard.used += 1
            self.used[0] += 1
            self.counts[owner] += 1
        begin_change(&shard.number)
        e.key[0], e.key[1] = c.key[0], c.key[1]
        e.fingerprint, e.owner, e.state = c.fingerprint, owner, USED
        e.slot, e.generation = c.slot, c.generation
        end_change(&shard.number)
        return 0

    cdef void remove(self, u32 owner, Change *c) noexcept:
        """Of this generation: what came to the same key since then stays."""
        cdef u64 hashed = hash_of(c.key)
        cdef Shard *shard = shard_of(self.shards(), hashed)
        cdef Entry *e = self.entry_of(shard, hashed, owner, c)
        if e is not NULL and e.generation == c.generation and e.slot == c.slot:
            begin_change(&shard.number)
            e.state = GONE
            end_change(&shard.number)
            shard.used -= 1
            shard.gone += 1
            self.used[0] -= 1
            self.counts[owner] -= 1

    cdef Entry *entry_of(self, Shard *shard, u64 hashed, u32 owner, Change *c) noexcept nogil:
        cdef Entry *entries = entries_of(self.base, shard)
        cdef Entry *e
        cdef u64 at = hashed & shard.mask
        if shard.entries == 0:
            return NULL
        while True:
            e = &entries[at]
            if e.state == FREE:
                return NULL
            if e.state == USED and e.owner == owner and e.fingerprint == c.fingerprint and same(e.key, c.key):
                return e
            at = (at + 1) & shard.mask

    cdef int grow(self, Shard *shard) except -1:
        """Twice as large if it is half full, else as large, without what is gone."""
        cdef u64 former = shard.entries
        cdef Entry *old = entries_of(self.base, shard)
        cdef u64 i, count = shard.mask + 1 if former else 0
        cdef u64 more = max(count * 2 if 2 * shard.used >= count else count, <u64>SMALLEST)
        cdef u64 at = self.allocate(more)
        cdef Entry *fresh = <Entry *>(self.base + at)
        for i in range(count):
            if old[i].state == USED:
                memcpy(place_for(fresh, more - 1, hash_of(old[i].key)), &old[i], sizeof(Entry))
        begin_change(&shard.number)
        shard.entries, shard.mask = at, more - 1
        end_change(&shard.number)
        shard.gone = 0
        self.places += more - count
        if former:
            self.give_back(former, count)
        return 0

    cdef u64 allocate(self, u64 count) except 0:
        """A block of so many entries, a power of two; of zeros."""
        cdef u64 nbytes = count * sizeof(Entry), at
        cdef int kind = class_of(count)
        at = self.free_blocks[kind]
        if at:
            self.free_blocks[kind] = (<u64 *>(self.base + at))[0]
        else:
            # Of whole pages, if it has some, so that they can be freed.
            at = (self.top + min(nbytes, <u64>PAGE) - 1) // min(nbytes, <u64>PAGE) * min(nbytes, <u64>PAGE)
            if nbytes > self.nbytes_mapped - at:
                raise MemoryError(
                    f"no room in the table for {count} entries: it can have {self.nbytes_mapped} bytes"
                    " (less where ulimit -v or -f is set)"
                )
            self.top = at + nbytes
        memset(self.base + at, 0, min(nbytes, <u64>PAGE) if is_freed(nbytes) else nbytes)
        return at

    cdef void give_back(self, u64 at, u64 count) noexcept:
        """Nobody uses this block any more, but who has read where it is, and looks again."""
        cdef u64 nbytes = count * sizeof(Entry)
        cdef int kind = class_of(count)
        (<u64 *>(self.base + at))[0] = self.free_blocks[kind]
        self.free_blocks[kind] = at
        if is_freed(nbytes):
            free_pages(self.base + at + PAGE, nbytes - PAGE)


cdef u64 file_bytes() except 0:
    """Of a table's file."""
    cdef u64 nbytes = FILE_BYTES
    space, file = (resource.getrlimit(one)[0] for one in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    if space != resource.RLIM_INFINITY:
        nbytes = min(nbytes, <u64>space // LIMITED_PART)
    if file != resource.RLIM_INFINITY:
        nbytes = min(nbytes, <u64>file)
    return max(nbytes // PAGE * PAGE, <u64>2 * HEAP_AT)


cdef inline bint is_freed(u64 nbytes) noexcept nogil:
    """Whether the pages of a block are freed when it is given back, but for the first one."""
    return nbytes >= 16 * PAGE


cdef inline int class_of(u64 count) noexcept nogil:
    cdef int kind = 0
    while <u64>1 << kind < count:
        kind += 1
    return kind


cdef Entry *place_for(Entry *entries, u64 mask, u64 hashed) noexcept nogil:
    cdef u64 at = hashed & mask
    while entries[at].state == USED:
        at = (at + 1) & mask
    return &entries[at]


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
