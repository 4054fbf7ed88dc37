# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.callers cimport AWAITED_BYTES, INLINE_BYTES, await_answer, call_off, submit
from te.core.engine cimport death_of, outcomes_of
from te.core.connections cimport connection_add
from te.core.heap cimport need
from te.core.link cimport *
from te.core.notes cimport lane_put
from te.core.plane cimport PENDING, Plane
from te.core.posix cimport EPIPE, ESHUTDOWN
from te.core.regions cimport *
from te.core.sync cimport *
from te.core.tags cimport Identity
from te.core.transfer cimport *
from te.core.wire cimport Block, RAILS_MAX
from te.core.worker cimport Spin, Worker, polled_kick, worker_wake

import os


cdef enum:
    # Above it checking and copying blocks (5 ns each) takes so long that others get the interpreter
    # meanwhile; below, getting it back beside a busy thread would cost more (5 ms).
    KEEP_LOCK_BLOCKS = 1 << 17
    KEEP_LOCK_NS = 300000
    AWAIT_NS = 3000000
    CANCEL_READ_NS = 1200000000


cdef struct Scan:
    bint may_merge
    Snapshot *snapshot
    uint8_t *touched
    Block *out
    u64 asked, out_n, bad, begun_ns


@cython.no_gc_clear
cdef class LinkHandle:
    def __dealloc__(self):
        if self.k != NULL:
            with nogil:  # What a kind of memory has mapped is unmapped with it, which may take a while.
                if not load32(&self.k.dead) and load32(&self.k.connections_n):
                    link_die(self.k, PEER_CLOSED, 0, NULL)
                link_drop(self.k)

    cdef void make(self, Engine engine, const Ops *ops, bint is_incoming, void *own):
        self.engine = engine
        self.k = link_new(engine.p, ops, is_incoming, own)

    cdef bint add(
        self, const Protocol *protocol, Channel *channel, size_t own_nbytes, int worker=-1
    ) except -1:
        cdef Link *k = self.k
        cdef Plane *p = k.plane
        cdef Worker *w
        cdef int errnum
        if worker < 0:
            worker = (k.number + load32(&k.connections_n)) % p.workers.n
        w = &p.workers.of[worker]
        errnum = connection_add(k, protocol, w, channel, own_nbytes)
        if errnum == EPIPE or errnum == ESHUTDOWN:
            return False
        if errnum:
            raise OSError(errnum, f"cannot use the connection: {os.strerror(errnum)}")
        worker_wake(w)
        return True

    @property
    def number(self):
        return self.k.number

    @property
    def alive(self):
        return not load32(&self.k.dead)

    def name_peer(self, bytes peer):
        memcpy(&self.k.peer, <char *>peer, min(<size_t>len(peer), sizeof(Identity)))

    @property
    def rails(self):
        return load32(&self.k.connections_alive)

    def tally(self):
        cdef Link *k = self.k
        return (
            [(load64(&k.flows[i].sent_nbytes), load64(&k.flows[i].received_nbytes))
             for i in range(RAILS_MAX)],
            outcomes_of(&k.outcomes), load32(&k.unfinished))

    @property
    def death(self):
        """(code, errno, text)"""
        return death_of(self.k)

    def die(self, int code):
        link_die(self.k, code, 0, NULL)

    def send_note(self, bytes data):
        cdef Link *k = self.k
        cdef bint fits = lane_put(k.notes, <const uint8_t *><char *>data, <u64>len(data))
        if fits and load32(&k.connections_n):
            polled_kick(k.connections[0])
        return fits

    def submit(
        self, object blocks, u64 total, u64 tag, bint is_read, u32 unfinished_max, bint is_awaited=False
    ):
        cdef Py_buffer view
        PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
        try:
            return submit_blocks(
                self, <Block *>view.buf, view.len / sizeof(Block), total, tag, is_read,
                unfinished_max, is_awaited)
        finally:
            PyBuffer_Release(&view)


cdef void scan_blocks(Scan *scan, Block *blocks, u64 n, bint is_read) noexcept nogil:
    """One pass: are the local sides registered, and which blocks touch so that they can be one."""
    cdef Snapshot *s = scan.snapshot
    cdef Region *hit = NULL
    cdef Block b
    cdef Block *last = NULL
    cdef u64 i, address
    scan.out_n = 0
    scan.bad = n
    for i in range(n):
        b = blocks[i]
        address = b.dst if is_read else b.src
        if hit == NULL or address < hit.start or address + b.nbytes > hit.end:
            if not is_registered(s, address, b.nbytes, s.newest, OWN_USE, scan.touched):
                scan.bad = i
                return
            hit = s.regions[regions_above(s.regions, s.count, address) - 1]
        if scan.may_merge and last != NULL and last.src + last.nbytes == b.src and (
            last.dst + last.nbytes == b.dst
        ):
            last.nbytes += b.nbytes
            continue
        last = &scan.out[scan.out_n]
        scan.out_n += 1
        last[0] = b


cdef object submit_blocks(
    LinkHandle link, Block *blocks, u64 n, u64 total, u64 tag, bint is_read, u32 unfinished_max,
    bint is_awaited
):
    cdef Plane *p = link.k.plane
    cdef Link *k = link.k
    cdef Scan scan
    cdef Snapshot *s
    scan.begun_ns = now_ns()
    scan.may_merge = not k.ops.lands_by_device
    scan.asked = n
    while True:
        s = p.regions.now
        scan.snapshot = s
        scan.touched = <uint8_t *>need(s.count + 1)
        scan.out = blocks_new(k, n)
        if scan.out == NULL:
            free(scan.touched)
            raise MemoryError(f"no memory for the descriptors of {n} blocks")
        if n <= KEEP_LOCK_BLOCKS:
            scan_blocks(&scan, blocks, n, is_read)
            break
        # Inside no section: the regions' own references keep the snapshot's regions, and a
        # copy of the snapshot is what is looked at.
        s = scan.snapshot = snapshot_copy(s)
        with nogil:
            scan_blocks(&scan, blocks, n, is_read)
        if s.version == p.regions.now.version:
            snapshot_free(s)
            scan.snapshot = s = p.regions.now
            break
        snapshot_free(s)
        free(scan.touched)
        blocks_free(k, scan.out)
    if scan.bad < n:
        free(scan.touched)
        blocks_free(k, scan.out)
        return scan.bad
    return enqueue(link, &scan, total, tag, is_read, unfinished_max, is_awaited)


cdef object enqueue(
    LinkHandle link, Scan *scan, u64 total, u64 tag, bint is_read, u32 unfinished_max,
    bint is_awaited
):
    cdef Link *k = link.k
    cdef Transfer *t
    cdef bint is_shared = True
    cdef u32 i, held_n = 0
    cdef Region **held = NULL
    if not is_read or k.ops.lands_by_device:
        held = regions_hold(scan.snapshot, scan.touched, &held_n)
        for i in range(held_n):
            is_shared &= held[i].is_shared
    free(scan.touched)
    t = transfer_new(k, is_read, tag, scan.out, scan.out_n, total, held, held_n)
    t.submitted_ns = scan.begun_ns
    t.asked = scan.asked
    t.is_awaited |= is_awaited
    k.ops.prepare(t, is_shared)
    if add32(&k.unfinished, 1) > unfinished_max:
        add32(&k.unfinished, -1)
        transfer_discard(t)
        return None
    submit(t)
    cdef TransferHandle handle = TransferHandle.__new__(TransferHandle)
    handle.t = t
    handle.link = link
    return handle


@cython.no_gc_clear
cdef class TransferHandle:
    def __dealloc__(self):
        if self.t != NULL:
            transfer_drop(self.t)

    @property
    def name(self):
        return <u64>self.t

    def status(self):
        return load32(&self.t.status)

    def failure(self):
        """(code, errno, text), once the status is FAILED."""
        if self.t.code == LINK_DIED:
            return self.link.death
        text = "" if self.t.text == NULL else (<bytes>self.t.text).decode("ascii", "replace")
        return self.t.code, self.t.fault, text

    def cancel_requested(self):
        return load32(&self.t.cancel) != 0

    def duration_s(self):
        cdef u64 end = self.t.settled_ns if load32(&self.t.status) else now_ns()
        return (end - self.t.submitted_ns) * 1e-9

    def subscribe(self):
        cdef u32 none = 0
        return swap_if(&self.t.notify, none, 1) == 2

    def cancel(self):
        cdef Transfer *t = self.t
        cdef bint done = True
        cdef bint is_new = not load32(&t.status) and not swap32(&t.cancel, 1)
        if t.is_read:
            with nogil:
                done = t.link.ops.cancel_read(t, now_ns() + CANCEL_READ_NS)
        elif is_new:
            call_off(t)
        return done

    def wait(self, double timeout_s):
        cdef Transfer *t = self.t
        cdef u64 now = now_ns()
        cdef u64 until = now + ns_of(timeout_s), until_locked
        cdef Spin spin
        # A read lands in this thread, perhaps, and its memory may be long in coming: nobody else waits for that.
        if load32(&t.status) == PENDING and t.total <= INLINE_BYTES and not t.is_read:
            # Taking the interpreter lock back costs up to 5 ms beside a busy thread; an answer to
            # a small write comes in less time than anybody else would be let in. It counts from the
            # submission, so that who waits again and again keeps the lock no longer.
            until_locked = min(until, t.submitted_ns + KEEP_LOCK_NS)
            if now < until_locked:
                await_answer(t, &t.link.spin, until_locked)
        if load32(&t.status) == PENDING and t.total <= (AWAITED_BYTES if t.is_awaited else INLINE_BYTES):
            spin = t.link.spin  # That one is for who has the interpreter lock.
            with nogil:
                await_answer(t, &spin, min(until, now_ns() + AWAIT_NS))
        while load32(&t.status) == PENDING:
            now = now_ns()
            if now >= until:
                return False
            with nogil:
                add32(&t.waiters, 1)
                futex_wait(&t.status, PENDING, min(until - now, <u64>100000000))
                add32(&t.waiters, -1)
            PyErr_CheckSignals()
        return True
