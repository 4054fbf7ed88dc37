# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# Copies between slots and a client's memory, with checksums, for whole batches and without the
# interpreter's lock: a batch of 32 objects of 4 KiB takes some 15 µs. Beside them what a batch needs of
# arrays, in one pass where numpy takes ten. See _bytes.pyi for the contract.

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t, uint8_t
from libc.string cimport memcmp, memcpy

ctypedef uint8_t u8
ctypedef uint32_t u32
ctypedef uint64_t u64

cdef extern from "xxh3.h" nogil:
    ctypedef struct xxh3_state:
        pass
    ctypedef struct xxh3_stream:
        pass
    enum:
        XXH3_BLOCK, XXH3_SHORT
    void xxh3_begin(xxh3_state *state)
    void xxh3_feed(xxh3_state *state, const u8 *p, u8 *to, u64 blocks, int past_caches)
    u64 xxh3_end(xxh3_state *state, const u8 *rest, u64 n)
    u64 xxh3_short(const u8 *p, u64 n)
    void xxh3_open(xxh3_stream *stream)
    void xxh3_add(xxh3_stream *stream, const u8 *p, u64 n)
    u64 xxh3_close(xxh3_stream *stream)

cdef extern from *:
    """
    static inline void after_reads(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    static inline void after_writes(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    void after_reads() noexcept nogil
    void after_writes() noexcept nogil

cdef extern from *:
    """
    #include <errno.h>
    #include <sys/mman.h>
    /* Linux 5.14. Older ones answer EINVAL. */
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
    static inline int populate_pages(unsigned long address, unsigned long nbytes) {
        return madvise((void *)address, nbytes, MADV_POPULATE_WRITE) ? errno : 0;
    }
    """
    int populate_pages(u64 address, u64 nbytes) noexcept nogil

from libc.errno cimport EFAULT, ESRCH, errno

cdef extern from *:
    """
    #include <string.h>
    #include <sys/uio.h>
    """
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t process_vm_readv(
        int pid, const iovec *near, unsigned long near_n,
        const iovec *far, unsigned long far_n, unsigned long flags) noexcept nogil

cdef enum:
    NONCE_MAX = 64
    VECTORS = 128          # of one call into another process's memory
    AT_ONCE = 64 << 10    # bytes of it: they are in the processor's caches when they are hashed

cdef enum:
    KEY = 16
    SIGNATURE = 16
    HEADER = 64       # kvstore.objects.headers.HEADER_BYTES
    CHECKSUM_AT = 56  # of it: the last field
    CACHES = 8 << 20  # bytes: what is more in one call would only push other things out
    ADDED = 1         # kvstore.objects.changes.ADDED
    IS_RIGHT = 0      # codes of `bring`
    IS_MOVED = 1
    IS_CORRUPTED = 2

RIGHT, MOVED, CORRUPTED = IS_RIGHT, IS_MOVED, IS_CORRUPTED


cdef class View:
    """A buffer for as long as this lives."""
    cdef Py_buffer of
    cdef bint is_open

    def __cinit__(self, object buffer, Py_ssize_t nbytes, bint is_written=False):
        PyObject_GetBuffer(buffer, &self.of, PyBUF_WRITABLE if is_written else PyBUF_SIMPLE)
        self.is_open = True
        if self.of.len != nbytes:
            raise ValueError(f"a buffer of {self.of.len} bytes, and {nbytes} are needed")

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.of)

    cdef u64 *words(self) noexcept nogil:
        return <u64 *>self.of.buf


cdef struct Header:  # kvstore.objects.headers.HEADER
    u32 magic, state
    u8 key[KEY]
    u8 signature[SIGNATURE]
    u64 nbytes
    u32 generation, fingerprint
    u64 checksum

cdef struct Place:   # kvstore.objects.changes.PLACE
    u32 slot, generation
    u64 others

cdef struct Change:  # kvstore.objects.changes.CHANGE
    u8 key[KEY]
    u32 fingerprint, slot, generation, op

cdef struct Block:  # te.blocks.BLOCK
    u64 src, dst, nbytes

cdef struct Pieces:
    const u64 *sizes
    Py_ssize_t count
    u64 total
    bint past_caches


cdef struct Cursor:
    # Where a copy is within the pieces of one object.
    const u64 *addresses
    Py_ssize_t piece
    u64 offset


cdef inline u8 *here_of(const Pieces *pieces, const Cursor *at, u64 *left) noexcept nogil:
    left[0] = pieces.sizes[at.piece] - at.offset
    return <u8 *>at.addresses[at.piece] + at.offset


cdef inline void advance(const Pieces *pieces, Cursor *at, u64 n) noexcept nogil:
    at.offset += n
    if at.offset == pieces.sizes[at.piece]:
        at.piece += 1
        at.offset = 0


cdef void copy(const Pieces *pieces, Cursor *at, u8 *slot, u64 n, bint to_slot) noexcept nogil:
    """The next `n` bytes of an object."""
    cdef u64 left = 0
    cdef u8 *here
    while n:
        here = here_of(pieces, at, &left)
        left = min(n, left)
        if to_slot:
            memcpy(slot, here, left)
        else:
            memcpy(here, slot, left)
        slot += left
        n -= left
        advance(pieces, at, left)


cdef u64 copy_and_hash(
    const Pieces *pieces, const u64 *addresses, u8 *slot, bint to_slot
) noexcept nogil:
    """Copies one object; the checksum of what has come to the slot, or left it."""
    cdef xxh3_state state
    cdef Cursor at
    cdef u64 n = pieces.total, blocks = 0, left = 0
    cdef u8 *here
    at.addresses, at.piece, at.offset = addresses, 0, 0
    if n <= XXH3_SHORT:
        copy(pieces, &at, slot, n, to_slot)
        return xxh3_short(slot, n)
    xxh3_begin(&state)
    left = (n - 1) // XXH3_BLOCK
    cdef u64 todo = left
    cdef u8 *to = slot
    while todo:
        here = here_of(pieces, &at, &left)
        blocks = min(todo, left // XXH3_BLOCK)
        if blocks == 0:  # A block that lies in two pieces or more.
            copy(pieces, &at, to, XXH3_BLOCK, to_slot)
            xxh3_feed(&state, to, NULL, 1, False)
            blocks = 1
        else:
            if to_slot:
                xxh3_feed(&state, here, to, blocks, pieces.past_caches)
            else:
                xxh3_feed(&state, to, here, blocks, pieces.past_caches)
            advance(pieces, &at, blocks * XXH3_BLOCK)
        to += blocks * XXH3_BLOCK
        todo -= blocks
    copy(pieces, &at, to, n - (to - slot), to_slot)
    return xxh3_end(&state, to, n)


cdef u64 hashed(const Pieces *pieces, const u64 *addresses) noexcept nogil:
    """The checksum of one object's pieces."""
    cdef xxh3_stream stream
    cdef Py_ssize_t i
    xxh3_open(&stream)
    for i in range(pieces.count):
        xxh3_add(&stream, <const u8 *>addresses[i], pieces.sizes[i])
    return xxh3_close(&stream)


cdef struct Foreign:
    # Another process, and what lies where in its memory.
    int pid
    void *nonce_at
    const u8 *nonce
    size_t nonce_nbytes


cdef int fetch_one(
    const Foreign *of, const Pieces *pieces, const u64 *addresses, u8 *slot, u64 *checksum
) noexcept nogil:
    """Copies one object out of another process's memory; errno if it cannot be read. Each call reads the
    nonce as well, and one call looks into one address space."""
    cdef u8 seen[NONCE_MAX]
    cdef iovec near[2]
    cdef iovec far[VECTORS + 1]
    cdef xxh3_stream stream
    cdef Cursor at
    cdef u64 done = 0, wanted, left = 0
    cdef unsigned long n
    cdef u8 *here
    cdef ssize_t moved
    at.addresses, at.piece, at.offset = addresses, 0, 0
    xxh3_open(&stream)
    while done < pieces.total:
        wanted, n = 0, 1
        while n <= VECTORS and wanted < AT_ONCE and done + wanted < pieces.total:
            here = here_of(pieces, &at, &left)
            left = min(left, AT_ONCE - wanted)
            far[n].iov_base, far[n].iov_len = here, left
            advance(pieces, &at, left)
            wanted += left
            n += 1
        near[0].iov_base, near[0].iov_len = seen, of.nonce_nbytes
        near[1].iov_base, near[1].iov_len = slot + done, wanted
        far[0].iov_base, far[0].iov_len = of.nonce_at, of.nonce_nbytes
        moved = process_vm_readv(of.pid, near, 2, far, n, 0)
        if moved < 0:
            return errno
        if <u64>moved != of.nonce_nbytes + wanted:
            return EFAULT
        if memcmp(seen, of.nonce, of.nonce_nbytes) != 0:
            return ESRCH
        xxh3_add(&stream, slot + done, wanted)
        done += wanted
    checksum[0] = xxh3_close(&stream)
    return 0


cdef int describe(Pieces *pieces, View sizes, Py_ssize_t count, Py_ssize_t objects) except -1:
    cdef Py_ssize_t i
    pieces.sizes, pieces.count, pieces.total = sizes.words(), count, 0
    for i in range(count):
        if pieces.sizes[i] == 0:
            raise ValueError("a piece of 0 bytes")
        pieces.total += pieces.sizes[i]
    pieces.past_caches = pieces.total * objects > CACHES
    return 0


def checksums(object addresses, object sizes, object found):
    cdef Py_ssize_t i, n = len(found), count = len(sizes)
    cdef View at = View(addresses, 8 * n * count), of = View(sizes, 8 * count)
    cdef View to = View(found, 8 * n, True)
    cdef Pieces pieces
    describe(&pieces, of, count, n)
    with nogil:
        for i in range(n):
            to.words()[i] = hashed(&pieces, at.words() + i * count)


def take(object slots, object addresses, object sizes, object found):
    cdef Py_ssize_t i, n = len(found), count = len(sizes)
    cdef View where = View(slots, 8 * n), at = View(addresses, 8 * n * count)
    cdef View of = View(sizes, 8 * count), to = View(found, 8 * n, True)
    cdef Pieces pieces
    describe(&pieces, of, count, n)
    with nogil:
        for i in range(n):
            to.words()[i] = copy_and_hash(
                &pieces, at.words() + i * count, <u8 *>where.words()[i], True)


def fetch(
    int pid, u64 nonce_address, bytes nonce, object slots, object addresses, object sizes,
    object found, object failed,
):
    cdef Py_ssize_t i, n = len(found), count = len(sizes)
    cdef View where = View(slots, 8 * n), at = View(addresses, 8 * n * count)
    cdef View of = View(sizes, 8 * count), to = View(found, 8 * n, True)
    cdef View errors = View(failed, 4 * n, True)
    cdef u32 *error = <u32 *>errors.of.buf
    cdef Pieces pieces
    cdef Foreign foreign
    if not 0 < len(nonce) <= NONCE_MAX:
        raise ValueError(f"a nonce of {len(nonce)} bytes; it has up to {NONCE_MAX}")
    foreign.pid, foreign.nonce_at = pid, <void *>nonce_address
    foreign.nonce, foreign.nonce_nbytes = nonce, len(nonce)
    describe(&pieces, of, count, n)
    with nogil:
        for i in range(n):
            error[i] = fetch_one(
                &foreign, &pieces, at.words() + i * count, <u8 *>where.words()[i],
                &to.words()[i])


def bring(
    object slots, object headers, object wanted, object addresses, object sizes, bint verify,
    object codes,
):
    cdef Py_ssize_t i, n = len(codes), count = len(sizes)
    cdef View where = View(slots, 8 * n), heads = View(headers, 8 * n)
    cdef View right = View(wanted, HEADER * n), at = View(addresses, 8 * n * count)
    cdef View of = View(sizes, 8 * count), to = View(codes, n, True)
    cdef u8 *code = <u8 *>to.of.buf
    cdef const u8 *expected = <u8 *>right.of.buf
    cdef const u8 *header
    cdef Pieces pieces
    cdef Cursor cursor
    cdef u64 checksum = 0, said
    describe(&pieces, of, count, n)
    with nogil:
        for i in range(n):
            if verify:
                checksum = copy_and_hash(
                    &pieces, at.words() + i * count, <u8 *>where.words()[i], False)
            else:
                cursor.addresses = at.words() + i * count
                cursor.piece = cursor.offset = 0
                copy(&pieces, &cursor, <u8 *>where.words()[i], pieces.total, False)
            after_reads()  # The header is read behind the bytes: see kvstore/objects/headers.py.
            header = <const u8 *>heads.words()[i]
            memcpy(&said, header + CHECKSUM_AT, 8)
            if memcmp(header, expected + i * HEADER, CHECKSUM_AT) != 0:
                code[i] = IS_MOVED
            elif verify and checksum != said:
                code[i] = IS_CORRUPTED
            else:
                code[i] = IS_RIGHT


def judge(object found, object wanted, object addresses, object sizes, bint verify, object codes):
    cdef Py_ssize_t i, n = len(codes), count = len(sizes)
    cdef View came = View(found, HEADER * n), right = View(wanted, HEADER * n)
    cdef View at = View(addresses, 8 * n * count), of = View(sizes, 8 * count)
    cdef View to = View(codes, n, True)
    cdef u8 *code = <u8 *>to.of.buf
    cdef const Header *headers = <Header *>came.of.buf
    cdef const Header *expected = <Header *>right.of.buf
    cdef Pieces pieces
    describe(&pieces, of, count, n)
    with nogil:
        for i in range(n):
            if memcmp(&headers[i], &expected[i], CHECKSUM_AT) != 0:
                code[i] = IS_MOVED
            elif verify and hashed(&pieces, at.words() + i * count) != headers[i].checksum:
                code[i] = IS_CORRUPTED
            else:
                code[i] = IS_RIGHT


def expect(
    object keys, bytes signature, u64 nbytes, u32 fingerprint, u32 magic, u32 state,
    object places, object headers, object slots,
):
    cdef Py_ssize_t i, n = len(headers)
    cdef View names = View(keys, KEY * n), at = View(places, sizeof(Place) * n)
    cdef View to = View(headers, HEADER * n, True), numbers = View(slots, 8 * n, True)
    cdef const u8 *key = <u8 *>names.of.buf
    cdef const Place *place = <Place *>at.of.buf
    cdef Header *header = <Header *>to.of.buf
    if len(signature) != SIGNATURE:
        raise ValueError(f"a signature of {len(signature)} bytes, and {SIGNATURE} are needed")
    for i in range(n):
        header[i].magic, header[i].state = magic, state
        memcpy(header[i].key, key + i * KEY, KEY)
        memcpy(header[i].signature, <const u8 *>signature, SIGNATURE)
        header[i].nbytes, header[i].generation = nbytes, place[i].generation
        header[i].fingerprint, header[i].checksum = fingerprint, 0
        numbers.words()[i] = place[i].slot


def fill(
    object headers, object slots, object keys, bytes signature, u64 nbytes, u32 fingerprint,
    u32 magic, u32 state, object checksums, object changes,
):
    cdef Py_ssize_t i, n = len(slots), count = len(headers)
    cdef View at = View(slots, 8 * n), names = View(keys, KEY * n), sums = View(checksums, 8 * n)
    cdef View to = View(headers, HEADER * count, True)
    cdef View told = View(changes, sizeof(Change) * n, True)
    cdef Header *h
    cdef Change *change = <Change *>told.of.buf
    cdef const u8 *key = <u8 *>names.of.buf
    if len(signature) != SIGNATURE:
        raise ValueError(f"a signature of {len(signature)} bytes, and {SIGNATURE} are needed")
    for i in range(n):
        if at.words()[i] >= <u64>count:
            raise ValueError(f"slot {at.words()[i]} of {count}")
    for i in range(n):
        h = &(<Header *>to.of.buf)[at.words()[i]]
        h.state = 0
        after_writes()
        h.magic, h.nbytes, h.fingerprint = magic, nbytes, fingerprint
        memcpy(h.key, key + i * KEY, KEY)
        memcpy(h.signature, <const u8 *>signature, SIGNATURE)
        h.generation += 1
        h.checksum = sums.words()[i]
        after_writes()
        h.state = state  # Last: from here on readers believe the rest.
        memcpy(change[i].key, key + i * KEY, KEY)
        change[i].fingerprint, change[i].slot = fingerprint, <u32>at.words()[i]
        change[i].generation, change[i].op = h.generation, ADDED


def additions(
    object keys, u32 fingerprint, object slots, object generations, u32 lower_tier, object changes,
):
    cdef Py_ssize_t i, n = len(changes), made = 0
    cdef View names = View(keys, KEY * n), at = View(slots, 4 * n)
    cdef View numbers = View(generations, 4 * n), to = View(changes, sizeof(Change) * n, True)
    cdef const u8 *key = <u8 *>names.of.buf
    cdef const u32 *slot = <u32 *>at.of.buf
    cdef const u32 *generation = <u32 *>numbers.of.buf
    cdef Change *change = <Change *>to.of.buf
    for i in range(n):
        if generation[i] == 0 and slot[i] != lower_tier:
            continue
        memcpy(change[made].key, key + i * KEY, KEY)
        change[made].fingerprint, change[made].slot = fingerprint, slot[i]
        change[made].generation, change[made].op = generation[i], ADDED
        made += 1
    return made


cdef Py_ssize_t lay_one(
    Block *block, Py_ssize_t made, u64 slot, const u64 *addresses, View sizes, Py_ssize_t count,
    bint to_slot,
) noexcept:
    """The copies of one object, behind those that are made; those that touch are one. How many there are now."""
    cdef Py_ssize_t k
    cdef Block b
    for k in range(count):
        b.nbytes = sizes.words()[k]
        b.src, b.dst = addresses[k], slot
        if not to_slot:
            b.src, b.dst = b.dst, b.src
        slot += b.nbytes
        if made and (
            block[made - 1].src + block[made - 1].nbytes == b.src
            and block[made - 1].dst + block[made - 1].nbytes == b.dst
        ):
            block[made - 1].nbytes += b.nbytes
            continue
        block[made] = b
        made += 1
    return made


def lay(
    object blocks, object slots, u64 unit, u64 offset, object addresses, object sizes, bint to_slots,
    tuple behind=None,
):
    cdef Py_ssize_t i, n = len(slots), count = len(sizes), made = 0
    cdef Block *last
    cdef View of = View(sizes, 8 * count), where = View(slots, 8 * n)
    cdef View at = View(addresses, 8 * n * count), to = View(blocks, sizeof(Block) * len(blocks), True)
    if n * count + (behind is not None) > len(blocks):
        raise ValueError(f"{n * count + (behind is not None)} blocks do not fit {len(blocks)}")
    for i in range(n):
        made = lay_one(
            <Block *>to.of.buf, made, where.words()[i] * unit + offset, at.words() + i * count, of, count,
            to_slots)
    if behind is not None:
        last = &(<Block *>to.of.buf)[made]
        last.src, last.dst, last.nbytes = behind
        made += 1
    return made


def lay_reads(
    object blocks, object numbers, u64 slots, u64 unit, u64 headers, object addresses, object sizes,
    u64 room,
):
    cdef Py_ssize_t i, n = len(numbers), count = len(sizes), made = 0
    cdef View of = View(sizes, 8 * count), number = View(numbers, 8 * n)
    cdef View at = View(addresses, 8 * n * count), to = View(blocks, sizeof(Block) * len(blocks), True)
    cdef Block *block = <Block *>to.of.buf
    if n * (count + 1) > len(blocks):
        raise ValueError(f"{n * (count + 1)} blocks do not fit {len(blocks)}")
    for i in range(n):
        made = lay_one(
            block, made, slots + number.words()[i] * unit, at.words() + i * count, of, count, False)
    for i in range(n):
        block[made].src, block[made].dst = headers + number.words()[i] * HEADER, room + i * HEADER
        block[made].nbytes = HEADER
        made += 1
    return made


def covers(object starts, object ends, object addresses, object sizes):
    cdef Py_ssize_t i, k, low, high, middle, n = len(starts), objects = len(addresses)
    cdef Py_ssize_t count = len(sizes)
    cdef View begins = View(starts, 8 * n), limits = View(ends, 8 * n)
    cdef View at = View(addresses, 8 * objects * count), of = View(sizes, 8 * count)
    cdef u64 address
    for i in range(objects):
        for k in range(count):
            address = at.words()[i * count + k]
            low, high = 0, n  # ranges that begin at it or before: the last one
            while low < high:
                middle = (low + high) // 2
                if begins.words()[middle] <= address:
                    low = middle + 1
                else:
                    high = middle
            if low == 0 or of.words()[k] > limits.words()[low - 1] - min(
                address, limits.words()[low - 1]
            ):
                return False
    return True


def populate(u64 address, u64 nbytes):
    cdef int failed
    with nogil:
        failed = populate_pages(address, nbytes)
    return failed
