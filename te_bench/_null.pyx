# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# A device that takes every work request and moves nothing: what is left is what te itself costs.
# Completions are there at once, and so are the marks at the other end, which is in this process. A
# queue pair can be broken, be held back, and be driven by hand: what tests need of a device.

from libc.stdlib cimport calloc, free
from libc.string cimport memset

import os

from te.core.posix cimport *
from te.core.sync cimport *
from te.verbs.abi cimport *

cdef enum:
    QUEUE = 1024  # a power of two, above the depth of any send or receive queue of te
    ENOTCONN = 107
    KEYS = 1 << 16  # that memory is known by; a power of two
    WC_LOC_PROT_ERR = 4  # ibv_poll_cq(3)
    WC_RETRY_EXC_ERR = 12

cdef struct Done:
    u64 wr_id
    u32 imm_data
    int opcode, status

# Completions of one queue pair, from one thread to one thread: of a source, its own worker's; of a
# destination, what the source's worker puts in. It lives until both ends have let go of it.
cdef struct Queue:
    u64 head
    u64 head_line[7]
    u64 tail
    u64 tail_line[7]
    Done items[QUEUE]
    u32 armed, refs
    u32 receives  # the reader's alone
    u32 broken  # atomic: in the error state
    pthread_mutex_t lock  # of `fd` alone
    int fd

# What was posted since `expect`, by one thread.
cdef struct Posted:
    u64 requests, nbytes, expected
    u64 first_requests  # of the first chain, which was built before the time begins
    u64 begun_ns, ended_ns
    u64 interrupts_ns  # of that, what waking the threads took that a device would interrupt
    u32 held  # atomic: no completion is given out
    u32 refused  # atomic: an errno; no work request is taken, and not said which one was not
    u32 kept  # atomic: an errno; no queue pair is destroyed

cdef struct End:
    Endpoint e  # the first: whoever has its address has the end's
    Posted *posted
    u32 *keys  # which there are now; NULL of a device that does not ask
    Queue *near
    Queue *far


cdef void queue_drop(Queue *c) noexcept nogil:
    if c != NULL and add32(&c.refs, -1) == 0:
        free(c)


cdef inline int queue_put(
    Queue *c, Posted *p, u64 wr_id, int opcode, u32 imm_data, int status
) noexcept nogil:
    cdef u64 head = c.head, begun
    cdef Done *item = &c.items[head % QUEUE]
    if head - load64(&c.tail) == QUEUE:
        return ENOMEM
    item.wr_id, item.opcode, item.imm_data, item.status = wr_id, opcode, imm_data, status
    store64(&c.head, head + 1)
    if swap32(&c.armed, 0):
        begun = now_ns()
        pthread_mutex_lock(&c.lock)
        if c.fd >= 0:
            eventfd_write(c.fd, 1)
        pthread_mutex_unlock(&c.lock)
        p.interrupts_ns += now_ns() - begun
    return 0


cdef int null_post_send(void *qp, VSendWr *first, VSendWr **bad) noexcept nogil:
    cdef End *end = <End *>qp
    cdef VSendWr *w = first
    cdef Posted *p = end.posted
    cdef u64 requests = 0, nbytes = 0
    cdef int errnum = 0, status
    if load32(&p.refused):
        return load32(&p.refused)
    if p.requests == 0:
        p.begun_ns = now_ns()
    while w != NULL and errnum == 0:
        requests += 1
        if w.num_sge:
            nbytes += w.sg_list.length
        status = WC_SUCCESS
        if end.keys != NULL and w.num_sge and not load32(&end.keys[w.sg_list.lkey % KEYS]):
            status = WC_LOC_PROT_ERR
        elif load32(&end.far.broken):
            status = WC_RETRY_EXC_ERR
        elif w.opcode == WR_RDMA_WRITE_WITH_IMM:
            errnum = queue_put(end.far, p, 0, WC_RECV, w.imm_data, WC_SUCCESS)
        if (w.send_flags & SEND_SIGNALED or status != WC_SUCCESS) and errnum == 0:
            errnum = queue_put(end.near, p, w.wr_id, 0, 0, status)
        bad[0] = w
        w = w.next
    if p.requests == 0:
        p.first_requests = requests
    p.requests += requests
    p.nbytes += nbytes
    if p.nbytes == p.expected:
        p.ended_ns = now_ns()
    return errnum


cdef int null_post_recv(void *qp, VRecvWr *first, VRecvWr **bad) noexcept nogil:
    while first != NULL:
        (<End *>qp).near.receives += 1
        first = first.next
    return 0


cdef int null_poll_cq(void *cq, int n, VWc *wc) noexcept nogil:
    cdef Queue *c = (<End *>cq).near
    cdef u64 tail = c.tail, head = load64(&c.head)
    cdef Done *item
    cdef int found = 0
    cdef bint broken = load32(&c.broken) != 0
    if not broken and load32(&(<End *>cq).posted.held):
        return 0
    while found < n and tail + found < head:
        item = &c.items[(tail + found) % QUEUE]
        if item.opcode & WC_RECV and c.receives == 0:
            break
        c.receives -= 1 if item.opcode & WC_RECV else 0
        wc[found].wr_id = item.wr_id
        wc[found].opcode = item.opcode
        wc[found].imm_data = item.imm_data
        wc[found].status = item.status
        found += 1
    if found:
        store64(&c.tail, tail + found)
    while broken and found < n and c.receives:
        c.receives -= 1
        wc[found].opcode = WC_RECV
        wc[found].status = WC_WR_FLUSH_ERR
        found += 1
    return found


cdef int null_req_notify_cq(void *cq, int solicited_only) noexcept nogil:
    swap32(&(<End *>cq).near.armed, 1)
    return 0


cdef void null_take_events(Endpoint *e) noexcept nogil:
    cdef u64 value
    eventfd_read(e.fd, &value)


cdef int null_to_error(Endpoint *e) noexcept nogil:
    store32(&(<End *>e).near.broken, 1)
    return 0


cdef int null_release(Endpoint *e) noexcept nogil:
    cdef End *end = <End *>e
    if load32(&end.posted.kept):
        return load32(&end.posted.kept)
    store32(&end.near.broken, 1)
    pthread_mutex_lock(&end.near.lock)
    close(end.near.fd)
    end.near.fd = -1
    pthread_mutex_unlock(&end.near.lock)
    queue_drop(end.near)
    queue_drop(end.far)
    free(end)
    return 0


cdef class Wires:
    """The queue pairs of both sides, by number."""

    cdef dict known
    cdef u32 made, keys_made
    cdef Posted p
    cdef u32 *keys

    def __cinit__(self, bint checks_keys=False):
        self.known = {}
        if checks_keys:
            self.keys = <u32 *>calloc(KEYS, sizeof(u32))
            if self.keys == NULL:
                raise MemoryError

    def __dealloc__(self):
        free(self.keys)

    def expect(self, u64 nbytes):
        memset(&self.p, 0, sizeof(Posted))
        self.p.expected = nbytes

    def posted(self):
        return (self.p.requests, self.p.nbytes, self.p.first_requests,
                self.p.ended_ns - self.p.begun_ns - self.p.interrupts_ns)

    def hold(self, bint held):
        cdef Wire wire
        store32(&self.p.held, held)
        for wire in self.known.values():
            pthread_mutex_lock(&wire.c.lock)
            if wire.c.fd >= 0:
                eventfd_write(wire.c.fd, 1)
            pthread_mutex_unlock(&wire.c.lock)

    def keep(self, u32 errnum):
        store32(&self.p.kept, errnum)

    def refuse(self, u32 errnum):
        store32(&self.p.refused, errnum)

    cdef u32 add(self, Wire wire):
        """A number for it; forgets those whose ends have been released."""
        self.known = {
            number: one for number, one in self.known.items() if (<Wire>one).c.fd >= 0
        }
        self.made += 1
        self.known[self.made] = wire
        return self.made


cdef class Wire:
    cdef Queue *c

    def __dealloc__(self):
        queue_drop(self.c)


cdef class Device:
    cdef Wires wires
    cdef readonly int events_fd

    def __init__(self, Wires wires):
        self.wires = wires
        self.events_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if self.events_fd < 0:
            raise OSError("no descriptor for the events of a device")

    def __dealloc__(self):
        self.close()

    def close(self):
        if self.events_fd > 0:
            close(self.events_fd)
        self.events_fd = -1

    def events(self):
        return []

    def port(self, int number):
        return PORT_ACTIVE, 0, 0, False, 0, 0

    def register(
        self, u64 address, u64 nbytes, bint relaxed, bint remote_read, bint remote_write
    ):
        self.wires.keys_made = self.wires.keys_made % (KEYS - 1) + 1
        return MemoryRegion(self.wires, self.wires.keys_made)

    def queue_pair(self, int port, u32 send_depth, u32 receive_depth, u32 message_bytes):
        cdef QueuePair q = QueuePair.__new__(QueuePair)
        cdef Wire wire = Wire.__new__(Wire)
        cdef End *end = <End *>calloc(1, sizeof(End))
        wire.c = <Queue *>calloc(1, sizeof(Queue))
        if end == NULL or wire.c == NULL:
            free(end)
            raise MemoryError
        pthread_mutex_init(&wire.c.lock, NULL)
        wire.c.refs = 2
        wire.c.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        end.near = wire.c
        end.posted = &self.wires.p
        end.keys = self.wires.keys
        q.wires = self.wires
        q.end = end
        fill(&end.e, send_depth, receive_depth, message_bytes)
        end.e.fd = wire.c.fd
        if end.e.fd < 0:
            raise OSError("no descriptor for a completion channel")
        end.e.qp_num = self.wires.add(wire)
        return q


cdef void fill(Endpoint *e, u32 send_depth, u32 receive_depth, u32 message_bytes) noexcept:
    e.qp = e.cq = e
    e.send_depth, e.receive_depth, e.max_msg_bytes = send_depth, receive_depth, message_bytes
    e.post_send = null_post_send
    e.post_recv = null_post_recv
    e.poll_cq = null_poll_cq
    e.req_notify_cq = null_req_notify_cq
    e.take_events = null_take_events
    e.to_error = null_to_error
    e.release = null_release


cdef class MemoryRegion:
    cdef Wires wires
    cdef readonly u32 lkey, rkey

    def __init__(self, Wires wires, u32 key):
        self.wires = wires
        self.lkey = self.rkey = key
        if wires.keys != NULL:
            store32(&wires.keys[key], 1)

    def close(self):
        if self.wires.keys != NULL:
            store32(&self.wires.keys[self.lkey], 0)


cdef class QueuePair:
    cdef End *end
    cdef Wires wires

    def __dealloc__(self):
        if self.end != NULL:
            null_release(&self.end.e)

    @property
    def number(self):
        return self.end.e.qp_num

    @property
    def address(self):
        return <u64>self.end

    @property
    def fd(self):
        return self.end.e.fd

    def disown(self):
        self.end = NULL

    def connect(self, u32 far_number, *_of_the_wire, bint is_target=False):
        cdef Wire far = self.wires.known.get(far_number)
        if far is None:
            raise OSError(ENOTCONN, f"the queue pair {far_number} has been released")
        add32(&far.c.refs, 1)
        self.end.far = far.c

    def receive(self, u32 count):
        """Room for so many more marks."""
        self.end.near.receives += count

    def send_marks(self, marks):
        """Whether the other end took all of them; it need not have agreed to any."""
        cdef VSendWr w
        cdef VSendWr *bad = NULL
        memset(&w, 0, sizeof(w))
        w.opcode = WR_RDMA_WRITE_WITH_IMM
        for mark in marks:
            w.imm_data = htonl(<u32>mark)
            if null_post_send(self.end, &w, &bad):
                return False
        return True

    def poll(self):
        """What has completed: pairs of a status and the mark of a receive, or None of a send."""
        cdef VWc wc[64]
        cdef int i, n = null_poll_cq(self.end, 64, wc)
        return [(wc[i].status, ntohl(wc[i].imm_data) if wc[i].opcode & WC_RECV else None)
                for i in range(n)]

    def to_error(self):
        null_to_error(&self.end.e)
