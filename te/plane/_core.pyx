# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# Python's view of the plane; see _core.pyi for the contract. Methods keep the interpreter lock
# unless they say otherwise: it is what makes callers one at a time.

include "structs.pxi"
include "wire.pxi"
include "news.pxi"
include "fences.pxi"
include "source.pxi"
include "landing.pxi"
include "pull.pxi"
include "rails.pxi"
include "far.pxi"
include "posting.pxi"
include "marks.pxi"
include "pairs.pxi"
include "worker.pxi"

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals

import os

KIND_WRITE = SEGMENT
KIND_READ = READ
FRAME_BLOCKS_MAX = BLOCKS_MAX
RAILS_LIMIT = RAILS_MAX
WORKERS_LIMIT = WORKERS_MAX
RINGS_NBYTES = RINGS_BYTES
NICS_LIMIT = NICS_MAX
PIECES_LIMIT = PIECES_MAX
RECEIVE_DEPTH = RECEIVES
RANGES_LIMIT = TABLE_RANGES_MAX
MAY_READ = RIGHT_READ
MAY_WRITE_TAGGED = RIGHT_TAGGED
MAY_WRITE_UNTAGGED = RIGHT_UNTAGGED

cdef enum:
    # Above it checking and copying blocks (5 ns each) takes so long that others get the interpreter
    # meanwhile; below, getting it back beside a busy thread would cost more (5 ms).
    KEEP_LOCK_BLOCKS = 1 << 17
    INLINE_BYTES = 64 << 10
    KEEP_LOCK_NS = 300000
    DRIVE_NS = 3000000


cdef struct Scan:
    bint may_merge
    Snapshot *snapshot
    uint8_t *touched
    Block *out
    u64 out_n, bad, begun_ns


def read_process(int pid, u64 address, size_t nbytes):
    cdef bytearray room = bytearray(nbytes)
    cdef iovec near, far
    near.iov_base = <void *><char *>room
    far.iov_base = <void *>address
    near.iov_len = far.iov_len = nbytes
    if process_vm_readv(pid, &near, 1, &far, 1, 0) != <ssize_t>nbytes:
        raise OSError(last_errno(), os.strerror(last_errno()))
    return bytes(room)


def numa_node(u64 address):
    return max(page_node(address), -1)


cdef int descriptor(int fd) except -1:
    """What a call returned that makes one."""
    if fd < 0:
        raise OSError(last_errno(), f"no descriptor for an engine: {os.strerror(last_errno())}")
    return fd


cdef void close_open(int fd) noexcept:
    if fd >= 0:
        close(fd)


cdef class Engine:
    cdef Plane *p

    def __cinit__(
        self, u32 workers, double stall_s, double rail_s, double spin_s, u64 segment_bytes,
        u32 segment_blocks
    ):
        cdef Plane *p = <Plane *>need(sizeof(Plane))
        cdef Worker *w
        cdef epoll_event e
        cdef u32 i
        self.p = p
        # Before anything that can fail: what is not open must not be closed.
        p.events_eventfd = p.notices_eventfd = -1
        for i in range(workers):
            p.workers[i].epoll = p.workers[i].eventfd = -1
            pthread_mutex_init(&p.workers[i].lock, NULL)
        p.workers_n = workers
        p.stall_ns = <u64>(stall_s * 1e9)
        p.rail_ns = <u64>(rail_s * 1e9)
        p.suspect_ns = min(p.rail_ns / 4, <u64>SUSPECT_NS)
        p.spin_ns = <u64>(spin_s * 1e9)
        p.segment_bytes = segment_bytes
        p.segment_blocks = segment_blocks
        p.zeros = <uint8_t *>need(SCRATCH_BYTES)
        tags_init(&p.tags)
        pthread_mutex_init(&p.notices_lock, NULL)
        pthread_mutex_init(&p.events_lock, NULL)
        p.sections.n = workers
        for i in range(workers):
            p.sections.of[i] = &p.workers[i].section
        regions_open(&p.regions, &p.sections)
        p.events_eventfd = descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC))
        p.notices_eventfd = descriptor(eventfd(0, EFD_CLOEXEC))
        for i in range(workers):
            w = &p.workers[i]
            w.plane = p
            w.index = i
            w.spin.most_ns = p.spin_ns
            w.spin.may_move = True
            w.scratch = <uint8_t *>need(SCRATCH_BYTES)
            w.epoll = descriptor(epoll_create1(EPOLL_CLOEXEC))
            w.eventfd = descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC))
            e.events = EPOLLIN
            e.data.ptr = NULL
            if epoll_ctl(w.epoll, EPOLL_CTL_ADD, w.eventfd, &e) < 0:
                descriptor(-1)

    def __dealloc__(self):
        cdef Plane *p = self.p
        cdef u32 i
        if p == NULL:
            return
        for i in range(p.workers_n):
            close_open(p.workers[i].epoll)
            close_open(p.workers[i].eventfd)
            free(p.workers[i].scratch)
            pthread_mutex_destroy(&p.workers[i].lock)
        while p.notices != NULL:
            take_notice(p)
        self.events()
        regions_close(&p.regions)
        tags_close(&p.tags)
        close_open(p.events_eventfd)
        close_open(p.notices_eventfd)
        free(p.zeros)
        free(p)

    def work(self, u32 index):
        name_thread(f"te-worker-{index}".encode())
        with nogil:
            worker_run(&self.p.workers[index])

    def stop(self):
        cdef u32 i
        store32(&self.p.stop, 1)
        for i in range(self.p.workers_n):
            store32(&self.p.workers[i].kicked, 1)
            eventfd_write(self.p.workers[i].eventfd, 1)

    # -- memory

    def add_region(
        self, u64 start, u64 end, u64 serial, u32 rights, bint is_shared, bytes keys=b""
    ):
        region_put(
            &self.p.regions,
            region_new(start, end, serial, rights, is_shared, <char *>keys, len(keys)))

    def remove_region(self, u64 serial, double timeout_s):
        cdef u64 until = now_ns() + <u64>(max(timeout_s, 0.0) * 1e9)
        cdef Region *r = region_of(&self.p.regions, serial)
        cdef bint done, is_first = r != NULL and not r.is_leaving
        if r == NULL:
            return 0
        with nogil:
            await_readers(r, until)
        if load32(&r.readers):
            return load32(&r.readers)
        region_take(&self.p.regions, r)
        with nogil:
            done = quiesce(&self.p.sections, NULL, NULL, until - min(until, now_ns()))
            if done:  # A peer's read may have begun: it looked before the region was gone.
                await_readers(r, until)
        if not done:
            return -1
        readers = load32(&r.readers)
        if readers and not is_first:
            return readers
        if readers:
            region_put(&self.p.regions, r)
        else:
            region_forget(&self.p.regions, r)
        return readers

    # -- tags

    def open_tag(self, u64 value, bytes peer=b"", ranges=None):
        cdef bint is_open = False, is_new
        cdef Identity identity
        cdef Range *kept = NULL
        cdef u64 n = 0
        if ranges is not None:
            n = len(<bytes>ranges) // sizeof(Range)
            kept = <Range *>need((n + 1) * sizeof(Range))
            memcpy(kept, <char *><bytes>ranges, n * sizeof(Range))
            n = ranges_normalise(kept, n)
            if n > RANGES_MAX:
                free(kept)
                raise ValueError(
                    f"a tag for {n} separate ranges; at most {RANGES_MAX} are allowed: give larger"
                    " ones, or none")
        cdef Opening *o = opening_new(value, kept, n)
        if peer:
            memset(&identity, 0, sizeof(identity))
            memcpy(&identity, <char *>peer, min(<size_t>len(peer), sizeof(identity)))
            opening_bind(o, &identity, <size_t>len(peer) == sizeof(identity))
        is_new = tag_open(&self.p.tags, o, &is_open)
        return is_new, is_open

    def arrived(self, u64 value):
        cdef Opening *o = opening_get(&self.p.tags, value)
        cdef u64 count = 0 if o == NULL else load64(&o.count)
        opening_drop(o)
        return count

    def arrived_nbytes(self, u64 value):
        cdef Opening *o = opening_get(&self.p.tags, value)
        cdef u64 nbytes = 0 if o == NULL else load64(&o.nbytes)
        opening_drop(o)
        return nbytes

    def revoke_tag(self, u64 value):
        cdef Opening *o = opening_get(&self.p.tags, value)
        if o == NULL:
            return None
        store32(&o.is_open, 0)
        cdef Revocation revocation = Revocation.__new__(Revocation)
        revocation.o = o
        revocation.engine = self
        return revocation

    # -- links, and what happens to them

    def link(
        self, bint is_incoming, bint is_pull, int pid, bint is_direct=False, int pidfd=-1
    ):
        if is_pull and pidfd < 0:
            raise ValueError(f"a link that copies from process {pid} needs its descriptor")
        cdef Link *k = <Link *>need(sizeof(Link))
        pthread_mutex_init(&k.lock, NULL)
        self.p.links += 1
        k.plane = self.p
        k.spin.most_ns = self.p.spin_ns
        k.number = self.p.links
        k.is_incoming = is_incoming
        k.is_pull = is_pull
        k.is_direct = is_direct
        k.worker = &self.p.workers[k.number % self.p.workers_n]
        k.pid = pid
        k.pidfd = pidfd
        k.refs = 1
        cdef LinkHandle handle = LinkHandle.__new__(LinkHandle)
        handle.k = k
        handle.engine = self
        return handle

    def nic_failed(self, u32 nic, u32 code):
        """Has every rail by the device given up, for that reason, both those that come and go."""
        store32(&self.p.nic_reasons[nic], code)
        add32(&self.p.nic_faults[nic], 1)
        self.look_at_pairs()

    def look_at_pairs(self):
        cdef u32 i
        add32(&self.p.kicks, 1)
        for i in range(self.p.workers_n):
            wake(&self.p.workers[i])

    @property
    def events_fd(self):
        return self.p.events_eventfd

    def events(self):
        cdef u64 value
        cdef u32 i
        cdef Link *k
        cdef News news[RAILS_MAX]
        cdef bint has_died
        cdef list found = []
        eventfd_read(self.p.events_eventfd, &value)
        while True:
            pthread_mutex_lock(&self.p.events_lock)
            k = self.p.news
            if k != NULL:
                self.p.news = k.next_news
                memcpy(news, k.news, sizeof(news))
                memset(k.news, 0, sizeof(news))
                has_died = k.has_died
                k.has_news = k.has_died = False
            pthread_mutex_unlock(&self.p.events_lock)
            if k == NULL:
                return found
            for i in range(RAILS_MAX):
                if news[i].is_new:
                    found.append((k.number, i, news[i].epoch, news[i].code, news[i].errnum, ""))
            if has_died:
                text = (<bytes>k.text).decode("ascii", "replace")
                found.append((k.number, -1, 0, k.code, k.errnum, text))
            link_drop(k)

    def wait_notices(self):
        cdef u64 value
        cdef list found = []
        with nogil:
            eventfd_read(self.p.notices_eventfd, &value)
        while self.p.notices != NULL:
            found.append(<u64>take_notice(self.p))
        return found

    def wake_notices(self):
        eventfd_write(self.p.notices_eventfd, 1)

    def counters(self):
        cdef Plane *p = self.p
        return (
            load64(&p.bytes_sent), load64(&p.bytes_received),
            load64(&p.rails_out), load64(&p.rails_in),
            load64(&p.outcomes[DONE]), load64(&p.outcomes[FAILED]), load64(&p.outcomes[CANCELLED]),
        )


cdef class Revocation:
    cdef Opening *o
    cdef Engine engine

    def __dealloc__(self):
        opening_drop(self.o)

    def await_landings(self, double timeout_s):
        cdef bint done
        with nogil:
            done = quiesce(
                &self.engine.p.sections, NULL, self.o, <u64>(max(timeout_s, 0.0) * 1e9))
        return done

    @property
    def granted(self):
        return load32(&self.o.granted)

    def await_grants(self, double timeout_s):
        cdef u64 until = now_ns() + <u64>(max(timeout_s, 0.0) * 1e9)
        cdef timespec pause
        pause.tv_sec = 0
        pause.tv_nsec = 200000
        with nogil:
            while load32(&self.o.granted) and now_ns() < until:
                nanosleep(&pause, NULL)
        return load32(&self.o.granted) == 0

    def forget(self):
        opening_forget(&self.engine.p.tags, self.o)
        return load64(&self.o.count)


cdef void *take_notice(Plane *p) noexcept:
    """The first transfer on the list, whose address is its name; its reference is dropped."""
    pthread_mutex_lock(&p.notices_lock)
    cdef Transfer *t = p.notices
    p.notices = t.next_notice
    pthread_mutex_unlock(&p.notices_lock)
    transfer_drop(t)
    return t


include "handles.pxi"
