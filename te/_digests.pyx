# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# Digests (xxh3-64) of pieces of registered memory, and their bytes. What the processor reads is hashed where it lies; the
# rest is copied into pinned memory by its kind first, and nothing here asks a device to wait. See
# _digests.pyi for the contract.

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.engine cimport Engine
from te.core.heap cimport need
from te.core.kinds cimport Copy, Event, Kind, TO_HOST, TOUCHED_BY_CPU
from te.core.posix cimport EAGAIN, EOPNOTSUPP, ETIMEDOUT
from te.core.regions cimport Region, regions_above, regions_hold, regions_let_go, Snapshot
from te.core.sync cimport look_later, now_ns, ns_of, u32, u64

cdef extern from "xxh3.h" nogil:
    ctypedef struct xxh3_stream:
        pass
    void xxh3_open(xxh3_stream *stream)
    void xxh3_add(xxh3_stream *stream, const uint8_t *p, u64 n)
    u64 xxh3_close(xxh3_stream *stream)

cdef enum:
    COPIES_MAX = 1024  # of one batch
    NAP_NS = 30000  # between two looks at a copy, as a worker's (te.core.stager)
    SLOTS = 2  # one is hashed while the other is filled


cdef class View:
    """A buffer of u64, or of items of another size, for as long as this lives."""
    cdef Py_buffer of
    cdef bint is_open

    def __cinit__(
        self, object buffer, Py_ssize_t count, bint is_written=False, Py_ssize_t item=8
    ):
        PyObject_GetBuffer(buffer, &self.of, PyBUF_WRITABLE if is_written else PyBUF_SIMPLE)
        self.is_open = True
        if self.of.len != item * count:
            raise ValueError(f"a buffer of {self.of.len} bytes, and {item * count} are needed")

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.of)

    cdef u64 *words(self) noexcept nogil:
        return <u64 *>self.of.buf


# The pieces of a unit, which are alike in all units.
cdef struct Shape:
    const u64 *offsets
    const u64 *sizes
    u64 pieces
    u64 total
    u64 low, high  # offsets of the first byte, and of what comes after the last

cdef struct Slot:
    uint8_t *base
    u64 nbytes  # that are being copied there
    Kind *kind
    Event *event

# How far reading is: the next byte is that one of that piece of that unit.
cdef struct Walk:
    u64 unit, piece, byte

# How far hashing is, and where the next byte goes; NULL: they are hashed alone.
cdef struct Hashing:
    xxh3_stream stream
    u64 unit, done
    uint8_t *to


@cython.no_gc_clear
cdef class Bounce:
    cdef Slot slots[SLOTS]
    cdef u64 slot_nbytes
    # Regions that a copy may still read from which did not end in time.
    cdef Region **held
    cdef u32 held_n

    def __cinit__(self, u64 base, u64 nbytes):
        cdef u64 i
        self.slot_nbytes = nbytes / SLOTS
        for i in range(SLOTS):
            self.slots[i].base = <uint8_t *>base + i * self.slot_nbytes

    def settle(self, double timeout_s):
        cdef u64 i, until_ns = now_ns() + ns_of(timeout_s)
        cdef bint is_over = True
        with nogil:
            for i in range(SLOTS):
                is_over = finish(&self.slots[i], until_ns) != ETIMEDOUT and is_over
        if is_over:
            regions_let_go(self.held, self.held_n)
            self.held, self.held_n = NULL, 0
        return is_over


cdef int describe(Shape *shape, View offsets, View sizes, u64 pieces) except -1:
    cdef u64 i
    shape.offsets, shape.sizes, shape.pieces = offsets.words(), sizes.words(), pieces
    shape.total = shape.high = 0
    shape.low = <u64>-1
    for i in range(pieces):
        if shape.sizes[i] == 0:
            raise ValueError("a piece of 0 bytes")
        if shape.offsets[i] + shape.sizes[i] < shape.offsets[i]:
            raise ValueError("a piece that ends beyond all addresses")
        shape.total += shape.sizes[i]
        shape.low = min(shape.low, shape.offsets[i])
        shape.high = max(shape.high, shape.offsets[i] + shape.sizes[i])
    if pieces == 0:
        raise ValueError("units without a piece")
    return 0


cdef Region *region_around(Snapshot *s, u64 start, u64 end, uint8_t *touched) noexcept nogil:
    """The region that has all of it, which is noted; NULL if there is none."""
    cdef u32 i = regions_above(s.regions, s.count, start)
    if i == 0 or end <= start or end > s.regions[i - 1].end:
        return NULL
    touched[i - 1] = 1
    return s.regions[i - 1]


cdef u64 hashed(const Shape *shape, u64 address, uint8_t *to) noexcept nogil:
    """A unit that the processor reads, which is copied first unless `to` is NULL: the copy is what
    is hashed."""
    cdef xxh3_stream stream
    cdef const uint8_t *p
    cdef u64 i
    xxh3_open(&stream)
    for i in range(shape.pieces):
        p = <const uint8_t *>(address + shape.offsets[i])
        if to != NULL:
            memcpy(to, p, shape.sizes[i])
            p = to
            to += shape.sizes[i]
        xxh3_add(&stream, p, shape.sizes[i])
    return xxh3_close(&stream)


cdef uint8_t *at_unit(uint8_t *base, u64 unit, u64 nbytes) noexcept nogil:
    return NULL if base == NULL else base + unit * nbytes


cdef int begin(
    Slot *slot, u64 room, Kind *kind, const Shape *shape, const u64 *addresses, u64 end, Walk *at
) noexcept nogil:
    """Begins to copy what comes next, up to unit `end`, into a slot; nothing if there is no more."""
    cdef Copy copies[COPIES_MAX]
    cdef u32 n = 0
    cdef u64 some
    cdef int problem
    slot.nbytes, slot.event, slot.kind = 0, NULL, kind
    while at.unit < end and n < COPIES_MAX and slot.nbytes < room:
        some = min(shape.sizes[at.piece] - at.byte, room - slot.nbytes)
        copies[n].dst = slot.base + slot.nbytes
        copies[n].src = <const void *>(addresses[at.unit] + shape.offsets[at.piece] + at.byte)
        copies[n].nbytes = some
        slot.nbytes += some
        n += 1
        at.byte += some
        if at.byte == shape.sizes[at.piece]:
            at.byte = 0
            at.piece += 1
        if at.piece == shape.pieces:
            at.piece = 0
            at.unit += 1
    if n == 0:
        return 0
    problem = kind.ops.copy(kind.state, copies, n, TO_HOST, &slot.event)
    if problem:
        slot.nbytes, slot.event = 0, NULL
    return problem


cdef int finish(Slot *slot, u64 until_ns) noexcept nogil:
    """Waits for a slot's copies. ETIMEDOUT: the device has not ended them, and still may."""
    cdef int answer
    if slot.event == NULL:
        return 0
    while True:
        answer = slot.kind.ops.query(slot.kind.state, slot.event)
        if answer != EAGAIN:
            slot.kind.ops.release(slot.kind.state, slot.event)
            slot.event = NULL
            return answer
        if not look_later(until_ns, NAP_NS):
            return ETIMEDOUT


cdef void take(Hashing *h, const Shape *shape, Slot *slot, u64 *found) noexcept nogil:
    """Hashes what has come into a slot."""
    cdef const uint8_t *p = slot.base
    cdef u64 left = slot.nbytes, some
    while left:
        some = min(left, shape.total - h.done)
        xxh3_add(&h.stream, p, some)
        if h.to != NULL:
            memcpy(h.to, p, some)
            h.to += some
        p += some
        left -= some
        h.done += some
        if h.done == shape.total:
            found[h.unit] = xxh3_close(&h.stream)
            h.unit += 1
            h.done = 0
            xxh3_open(&h.stream)


cdef int through_slots(
    Slot *slots, u64 room, Kind *kind, const Shape *shape, const u64 *addresses, u64 first, u64 end,
    u64 *found, uint8_t *to, u64 until_ns
) noexcept nogil:
    """Digests of the units [first, end), of one kind that the processor does not read."""
    cdef Walk at
    cdef Hashing h
    cdef int problem, other
    cdef u32 i = 0
    if kind.ops == NULL:
        return EOPNOTSUPP
    at.unit, at.piece, at.byte = first, 0, 0
    h.unit, h.done, h.to = first, 0, to
    xxh3_open(&h.stream)
    slots[1].nbytes, slots[1].event = 0, NULL
    problem = begin(&slots[0], room, kind, shape, addresses, end, &at)
    while problem == 0 and slots[i].nbytes:
        problem = begin(&slots[1 - i], room, kind, shape, addresses, end, &at)
        other = finish(&slots[i], until_ns)
        if problem == 0:
            problem = other
        if problem == 0:
            take(&h, shape, &slots[i], found)
        i = 1 - i
    for i in range(SLOTS):  # After a failure the other's copy may be under way.
        other = finish(&slots[i], until_ns)
        if other == ETIMEDOUT:
            return ETIMEDOUT
    return problem


def digests(
    Engine engine, Bounce bounce, object addresses, object offsets, object sizes, object found,
    double timeout_s, object copied=None,
):
    cdef u64 i, n = len(found), end, until_ns = now_ns() + ns_of(timeout_s)
    cdef View at = View(addresses, n), begins = View(offsets, len(offsets))
    cdef View of = View(sizes, len(offsets)), to = View(found, n, True), copies = None
    cdef Snapshot *s
    cdef Region *r
    cdef Region **held
    cdef u32 held_n = 0
    cdef int problem = 0
    cdef Shape shape
    cdef u64 *words = at.words()
    cdef uint8_t *bytes_to = NULL
    describe(&shape, begins, of, len(offsets))
    if copied is not None:
        copies = View(copied, n * shape.total, True, 1)
        bytes_to = <uint8_t *>copies.words()
    if not bounce.settle(0.0):
        return ETIMEDOUT, -1
    # This thread is in no section: only the interpreter lock keeps the snapshot from being freed, so
    # nothing may give the lock away from here until the regions are held.
    s = engine.p.regions.now
    cdef uint8_t *touched = <uint8_t *>need(s.count + 1)
    cdef Kind **kinds = <Kind **>need((n + 1) * sizeof(Kind *))
    for i in range(n):
        r = region_around(s, words[i] + shape.low, words[i] + shape.high, touched)
        if r == NULL:
            free(touched)
            free(kinds)
            return 0, i
        kinds[i] = r.kind
    held = regions_hold(s, touched, &held_n)
    free(touched)
    with nogil:
        i = 0
        while i < n and problem == 0:
            end = i + 1
            if kinds[i].touched_by & TOUCHED_BY_CPU:
                to.words()[i] = hashed(&shape, words[i], at_unit(bytes_to, i, shape.total))
            else:
                while end < n and kinds[end] == kinds[i]:
                    end += 1
                problem = through_slots(
                    bounce.slots, bounce.slot_nbytes, kinds[i], &shape, words, i, end, to.words(),
                    at_unit(bytes_to, i, shape.total), until_ns)
            i = end
        free(kinds)
    # A device that hangs may still read the regions and write the slots: both are kept.
    bounce.held, bounce.held_n = held, held_n
    bounce.settle(0.0)
    return problem, -1
