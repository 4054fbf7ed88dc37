# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# A device that takes every work request and moves nothing: what is left is what te itself costs.
# Completions are there at once, and so are the marks at the other end, which is in this process.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import os

ctypedef uint64_t u64
ctypedef uint32_t u32

cdef extern from "../plane/port.h" nogil:
    u64 load64(const u64 *p)
    void store64(u64 *p, u64 v)
    void store32(u32 *p, u32 v)
    u32 swap32(u32 *p, u32 v)
    u32 add32(u32 *p, u32 v)
    u64 now_ns()

cdef extern from "../verbs/abi.h" nogil:
    ctypedef struct VSge:
        u64 addr
        u32 length, lkey
    ctypedef struct VSendWr:
        u64 wr_id
        VSendWr *next
        VSge *sg_list
        int num_sge, opcode
        u32 send_flags, imm_data
    ctypedef struct VRecvWr:
        pass
    ctypedef struct VWc:
        u64 wr_id
        int status, opcode
        u32 imm_data
    ctypedef struct Endpoint:
        void *qp
        void *cq
        int32_t fd
        u32 qp_num, send_depth, receive_depth, max_msg_bytes
        int (*post_send)(void *, VSendWr *, VSendWr **) noexcept nogil
        int (*post_recv)(void *, VRecvWr *, VRecvWr **) noexcept nogil
        int (*poll_cq)(void *, int, VWc *) noexcept nogil
        int (*req_notify_cq)(void *, int) noexcept nogil
        void (*take_events)(Endpoint *) noexcept nogil
        int (*to_error)(Endpoint *) noexcept nogil
        void (*release)(Endpoint *) noexcept nogil
    enum: WR_RDMA_WRITE_WITH_IMM, SEND_SIGNALED, WC_SUCCESS, WC_RECV, PORT_ACTIVE

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int value, int flags)
    int eventfd_read(int fd, u64 *value)
    int eventfd_write(int fd, u64 value)
    enum: EFD_NONBLOCK, EFD_CLOEXEC

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *m, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *m)
    int pthread_mutex_unlock(pthread_mutex_t *m)

cdef extern from "<unistd.h>" nogil:
    int close(int fd)

cdef enum:
    QUEUE = 1024  # a power of two, above the depth of any send or receive queue of te
    ENOMEM = 12

cdef struct Done:
    u64 wr_id
    u32 imm_data
    int opcode

# Completions of one queue pair, from one thread to one thread: of a source, its own worker's; of a
# destination, what the source's worker puts in. It lives until both ends have let go of it.
cdef struct Queue:
    u64 head
    u64 head_line[7]
    u64 tail
    u64 tail_line[7]
    Done items[QUEUE]
    u32 armed, refs
    pthread_mutex_t lock  # of `fd` alone
    int fd

# What was posted since `expect`, by one thread.
cdef struct Posted:
    u64 requests, nbytes, expected
    u64 first_requests  # of the first chain, which was built before the time begins
    u64 begun_ns, ended_ns
    u64 interrupts_ns  # of that, what waking the threads took that a device would interrupt

cdef struct End:
    Endpoint e  # the first: whoever has its address has the end's
    Posted *posted
    Queue *near
    Queue *far


cdef void queue_drop(Queue *c) noexcept nogil:
    if c != NULL and add32(&c.refs, -1) == 0:
        free(c)


cdef inline int queue_put(
    Queue *c, Posted *p, u64 wr_id, int opcode, u32 imm_data
) noexcept nogil:
    cdef u64 head = c.head, begun
    cdef Done *item = &c.items[head % QUEUE]
    if head - load64(&c.tail) == QUEUE:
        return ENOMEM
    item.wr_id, item.opcode, item.imm_data = wr_id, opcode, imm_data
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
    cdef int errnum = 0
    if p.requests == 0:
        p.begun_ns = now_ns()
    while w != NULL and errnum == 0:
        requests += 1
        if w.num_sge:
            nbytes += w.sg_list.length
        if w.opcode == WR_RDMA_WRITE_WITH_IMM:
            errnum = queue_put(end.far, p, 0, WC_RECV, w.imm_data)
        if w.send_flags & SEND_SIGNALED and errnum == 0:
            errnum = queue_put(end.near, p, w.wr_id, 0, 0)
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
    return 0


cdef int null_poll_cq(void *cq, int n, VWc *wc) noexcept nogil:
    cdef Queue *c = (<End *>cq).near
    cdef u64 tail = c.tail, head = load64(&c.head)
    cdef int found = 0
    while found < n and tail + found < head:
        wc[found].wr_id = c.items[(tail + found) % QUEUE].wr_id
        wc[found].opcode = c.items[(tail + found) % QUEUE].opcode
        wc[found].imm_data = c.items[(tail + found) % QUEUE].imm_data
        wc[found].status = WC_SUCCESS
        found += 1
    if found:
        store64(&c.tail, tail + found)
    return found


cdef int null_req_notify_cq(void *cq, int solicited_only) noexcept nogil:
    swap32(&(<End *>cq).near.armed, 1)
    return 0


cdef void null_take_events(Endpoint *e) noexcept nogil:
    cdef u64 value
    eventfd_read(e.fd, &value)


cdef int null_to_error(Endpoint *e) noexcept nogil:
    return 0


cdef void null_release(Endpoint *e) noexcept nogil:
    cdef End *end = <End *>e
    pthread_mutex_lock(&end.near.lock)
    close(end.near.fd)
    end.near.fd = -1
    pthread_mutex_unlock(&end.near.lock)
    queue_drop(end.near)
    queue_drop(end.far)
    free(end)


cdef class Wires:
    """The queue pairs of both sides, by number."""

    cdef dict known
    cdef Posted p

    def __cinit__(self):
        self.known = {}

    def expect(self, u64 nbytes):
        memset(&self.p, 0, sizeof(Posted))
        self.p.expected = nbytes

    def posted(self):
        return (self.p.requests, self.p.nbytes, self.p.first_requests,
                self.p.ended_ns - self.p.begun_ns - self.p.interrupts_ns)


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
        if self.events_fd > 0:
            close(self.events_fd)

    def events(self):
        return []

    def port(self, int number):
        return PORT_ACTIVE, 0, 0, False, 0, 0

    def register(self, u64 address, u64 nbytes, bint relaxed):
        return MemoryRegion()

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
        q.wires = self.wires
        q.end = end
        fill(&end.e, send_depth, receive_depth, message_bytes)
        end.e.qp_num = <u32>len(self.wires.known) + 1
        end.e.fd = wire.c.fd
        self.wires.known[end.e.qp_num] = wire
        if end.e.fd < 0:
            raise OSError("no descriptor for a completion channel")
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


class MemoryRegion:
    lkey = 1
    rkey = 1

    def close(self):
        """There is nothing to take back."""


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

    def disown(self):
        self.end = NULL

    def connect(self, u32 far_number, *_of_the_wire):
        cdef Wire far = self.wires.known[far_number]
        add32(&far.c.refs, 1)
        self.end.far = far.c
