# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# The same host, for Python; _core.pyi is the contract.

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.channels cimport Channel
from te.core.engine cimport Engine
from te.core.connections cimport connections_free
from te.core.frames cimport Protocol
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.kinds cimport Kind, TOUCHED_BY_KERNEL, kind_of
from te.core.link cimport (
    CHECK_AGAIN, Link, Ops, PROCESS_GONE, STALLED, Transfer, is_too_silent, link_die,
)
from te.core.maps cimport map_free, map_get, map_put, map_take
from te.core.plane cimport plane_quiesce, plane_stages
from te.core.posix cimport *
from te.core.receiving cimport receiving_protocol
from te.core.sending cimport Sending, sending_ops, sending_prepare
from te.core.sync cimport *
from te.core.wire cimport OVER_RINGS, PULL, SEGMENT
from te.core.worker cimport worker_checks_at, workers_watch
from te.transports.samehost.alive cimport process_gone
from te.transports.samehost.mappings cimport (
    mapped_bytes, mapping_put, mapping_undo, mapping_watch_holes, mappings_drop, mappings_free,
    mappings_keep, mappings_take,
)
from te.transports.samehost.pulling cimport *
from te.transports.samehost.rings cimport RINGS_BYTES, rings_new
from te.transports.samehost.state cimport Mapping, NONCE_BYTES, Pulling, Samehost

import os

RINGS_NBYTES = RINGS_BYTES
NONCE_NBYTES = NONCE_BYTES
LOOK_TIMEOUT_S = 1.0

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    PIDFD_GETFD = 438  # pidfd_getfd(2) has this number everywhere; C libraries have no name for it
    SENDS_INLINE = 8
    # Frames a connection is ahead of the copying: milliseconds of it, for the copying threads may
    # keep the source off the processor; few enough that a cancel has something to stop.
    PULLS_AHEAD = 16
    PULL_BLOCK_BYTES = 2048  # smaller blocks go through the ring
    MAPPINGS_MAX = 1024  # of a link; each may be looked through for each block
    MAPPED_GIB_MAX = 1 << 12  # of a link
    PLANE_MAPPED_GIB_MAX = 1 << 15  # of all; a process has 2 ** 17 to give
    QUIESCE_NS = 900000000
    LOOKED_AT_MAX = 64  # processes at once
    LEFT_MAX = 4  # looks into one process that nobody waits for any more: there are no others then
    LOOK_PARTS = 20  # of the time that one may take
    BEGINS_IN_PARTS = 200  # at most, where its thread waits for a processor


# -- one look into a process, whose memory may not answer

# A process into which threads look, while there are any.
cdef struct LookedAt:
    u32 pid
    u32 looks, left  # atomic: those that have not returned; how many of them took too long

cdef struct Look:
    u32 refs, has_begun, has_looked  # atomic
    LookedAt *process
    u64 address
    size_t nbytes
    ssize_t moved
    int errnum
    # The bytes follow.

cdef LookedAt LOOKED_AT[LOOKED_AT_MAX]  # changed with the interpreter lock, but for what is atomic


cdef void look_drop(Look *l) noexcept nogil:
    if add32(&l.refs, -1) == 0:
        free(l)


cdef void *look(void *of) noexcept nogil:
    cdef Look *l = <Look *>of
    store32(&l.has_begun, 1)
    l.moved = process_read(l.process.pid, l.address, l + 1, l.nbytes)
    l.errnum = last_errno()
    add32(&l.process.looks, -1)
    store32(&l.has_looked, 1)
    futex_wake_all(&l.has_looked)
    look_drop(l)
    return NULL


cdef void await_part(Look *l, u64 part_ns) noexcept nogil:
    cdef u64 now = now_ns(), until = now + part_ns
    while not load32(&l.has_looked) and now < until:
        futex_wait(&l.has_looked, 0, until - now)
        now = now_ns()


cdef bint await_look(Look *l, u64 timeout_ns) noexcept nogil:
    """False if it is left. Time in which this process stood still is no silence of the other one: of the parts of the
    time-out, each counts once, however long it was, and none before the thread that looks has a processor."""
    cdef u32 parts = 0, before = 0
    while not load32(&l.has_looked) and parts < LOOK_PARTS and before < BEGINS_IN_PARTS:
        await_part(l, timeout_ns / LOOK_PARTS)
        if load32(&l.has_begun):
            parts += 1
        else:
            before += 1
    return load32(&l.has_looked) != 0


cdef LookedAt *looked_at(u32 pid) except NULL:
    """Counts one look more. A process of which too many have not returned is looked at by no other thread."""
    cdef LookedAt *found = NULL
    cdef u32 i
    for i in range(LOOKED_AT_MAX):
        if load32(&LOOKED_AT[i].looks) == 0:
            found = &LOOKED_AT[i] if found == NULL else found
        elif LOOKED_AT[i].pid == pid:
            found = &LOOKED_AT[i]
            break
    if found == NULL:
        raise OSError(EAGAIN, "the memory of too many processes does not answer")
    if load32(&found.looks) == 0:
        found.pid, found.left = pid, 0
    elif load32(&found.left) >= LEFT_MAX:
        raise OSError(EAGAIN, "its memory does not answer, nor did it before")
    add32(&found.looks, 1)
    return found


def read_process(int pid, u64 address, size_t nbytes, double timeout_s=LOOK_TIMEOUT_S):
    cdef Look *l
    cdef LookedAt *process = looked_at(pid)
    cdef u64 timeout_ns = ns_of(timeout_s)
    cdef int errnum
    cdef bint has_looked
    l = <Look *>need(sizeof(Look) + nbytes)
    l.refs, l.process, l.address, l.nbytes = 2, process, address, nbytes
    errnum = start_thread(look, l)
    if errnum:
        add32(&process.looks, -1)
        free(l)
        raise OSError(errnum, f"no thread: {os.strerror(errnum)}")
    with nogil:
        has_looked = await_look(l, timeout_ns)
    try:
        if not has_looked:
            add32(&process.left, 1)
            raise OSError(ETIMEDOUT, "its memory does not answer")
        if l.moved != <ssize_t>nbytes:
            raise OSError(l.errnum, os.strerror(l.errnum))
        return (<char *>(l + 1))[:nbytes]
    finally:
        look_drop(l)


# -- the contract

cdef bint is_mapped(Transfer *t) noexcept nogil:
    """Whether the peer has mapped what it reads that only a kind of memory can copy; False if there is
    no such memory."""
    cdef Samehost *own = <Samehost *>t.link.own
    cdef bint found = False
    cdef u32 i
    if pthread_mutex_trylock(&own.mapped_lock):
        return False  # It changes just now: as if the peer had not mapped it yet.
    for i in range(t.held_n):
        if t.held[i].kind.touched_by & TOUCHED_BY_KERNEL:
            continue
        found = map_get(&own.mapped_by_peer, t.held[i].serial) != NULL
        if not found:
            break
    pthread_mutex_unlock(&own.mapped_lock)
    return found


cdef void prepare(Transfer *t, bint is_shared) noexcept nogil:
    cdef Sending *s = <Sending *>t.own
    # process_vm_readv costs 0.5 us and more for each block, and the ring a second copy.
    if plane_stages(t.link.plane) and not t.is_read and is_mapped(t):
        s.frame = PULL
        s.ahead = PULLS_AHEAD
    elif is_shared or t.total >= t.n * PULL_BLOCK_BYTES:
        sending_prepare(t, PULL, PULLS_AHEAD)
    else:
        sending_prepare(t, SEGMENT, 0)
    if s.frame == PULL:
        t.sends_at_once = SENDS_INLINE


cdef u32 check(Link *link, bint stalled) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    cdef u64 since_ns = load64(&own.waits_since_ns) if load32(&own.waits) else 0
    if process_gone(own):
        link_die(link, PROCESS_GONE, 0, NULL)
    elif is_too_silent(link, &own.silence, since_ns, now_ns()):
        link_die(link, STALLED, 0, NULL)  # Its peer may never notice, and its memory never answer.
    return CHECK_AGAIN if since_ns or not load32(&own.tells_of_end) else 0


cdef void forget(Link *link) noexcept nogil:
    forget_jobs(<Samehost *>link.own)


cdef void release(Link *link) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    connections_free(link)
    mappings_free(link)
    map_free(&own.mapped_by_peer)
    pthread_mutex_destroy(&own.mapped_lock)
    if own.pidfd >= 0:
        close(own.pidfd)
    free(own)


cdef Ops OPS = sending_ops()
OPS.name = b"samehost"
OPS.prepare = prepare
OPS.check = check
OPS.forget = forget
OPS.release = release

cdef Protocol PROTOCOL = receiving_protocol(OVER_RINGS)
PROTOCOL.receive = pulling_receive
PROTOCOL.settle = pulling_settle
PROTOCOL.has_work = pulling_has_work


cdef class SamehostLink(LinkHandle):
    def __cinit__(
        self, Engine engine, bint is_incoming, int pid, int pidfd, u64 nonce_at, bytes nonce
    ):
        cdef Samehost *own
        if pidfd < 0:
            raise ValueError(f"a link that copies from process {pid} needs its descriptor")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce of {len(nonce)} bytes, which must be {NONCE_BYTES}")
        own = <Samehost *>need(sizeof(Samehost))
        pthread_mutex_init(&own.mapped_lock, NULL)
        own.pid = pid
        own.pidfd = pidfd
        own.nonce_at = nonce_at
        memcpy(own.nonce, <char *>nonce, NONCE_BYTES)
        self.make(engine, &OPS, is_incoming, own)
        workers_watch(&engine.p.workers)  # Copying out of a process may have them wait for it.

    def add_rail(self, int fd, int rings_fd):
        cdef int errnum
        cdef Channel *channel = rings_new(fd, rings_fd, not self.k.is_incoming, &errnum)
        if channel == NULL:
            raise OSError(errnum, f"cannot use the connection: {os.strerror(errnum)}")
        if not self.add(&PROTOCOL, channel, sizeof(Pulling)):
            return False
        self.watch_process()
        return True

    cdef void watch_process(self):
        """Has the link's owner look at it when the process ends, whoever keeps its connections. Where that cannot be,
        it looks now and then."""
        cdef Samehost *own = <Samehost *>self.k.own
        if not load32(&own.tells_of_end):
            store32(&own.tells_of_end, not worker_checks_at(self.k.connections[0].worker, own.pidfd))

    def take_descriptor(self, int number):
        cdef Samehost *own = <Samehost *>self.k.own
        cdef int fd = <int>syscall(PIDFD_GETFD, own.pidfd, number, 0)
        if fd < 0:
            raise OSError(last_errno(), f"pidfd_getfd: {os.strerror(last_errno())}")
        return fd

    def check_mapping(self, u64 start, u64 nbytes, u64 mapped):
        cdef Mapping *m = (<Samehost *>self.k.own).mappings
        cdef u32 count = 0
        cdef u64 total = mapped
        if nbytes == 0 or start + nbytes < start:
            raise OSError(EINVAL, f"{nbytes} bytes at {start:#x} are not an address range")
        while m != NULL:
            count += 1
            total += m.nbytes
            if m.start < start + nbytes and start < m.end:
                raise OSError(EINVAL, f"{nbytes} bytes at {start:#x} are mapped already")
            m = m.next
        if count >= MAPPINGS_MAX or total > <u64>MAPPED_GIB_MAX << 30:
            raise OSError(ENOMEM, f"{count} mappings and {total} bytes are too many for a link")
        total = load64(mapped_bytes(self.k)) + mapped
        if total > <u64>PLANE_MAPPED_GIB_MAX << 30:
            raise OSError(ENOMEM, f"{total} bytes of all peers are too many to be mapped")

    def add_mapping(self, u64 serial, u64 start, int fd, u64 nbytes):
        cdef u64 mapped = file_bytes(fd)
        if mapped < nbytes:
            raise OSError(EFAULT, "the memory file is too short, or can be made so,"
                          " or is of huge pages that can be taken out of it")
        if not keeps_pages(fd):
            raise OSError(EFAULT, "pages can be taken out of the memory file (before Linux 5.1 nobody"
                          " can forbid that)")
        self.check_mapping(start, nbytes, mapped)
        cdef void *here = mmap(NULL, mapped, PROT_READ, MAP_SHARED, fd, 0)
        if here == MAP_FAILED:
            raise OSError(last_errno(), os.strerror(last_errno()))
        cdef Mapping *m = <Mapping *>need(sizeof(Mapping))
        m.serial, m.start, m.end, m.nbytes = serial, start, start + nbytes, mapped
        m.here = <uint8_t *>here
        if not is_of_huge_pages(fd):  # Those were set aside when its first user mapped it.
            mapping_watch_holes(m)
        mapping_put(self.k, m)

    def add_mapped(
        self, u64 serial, u64 start, u64 nbytes, object kind, u64 here, u64 number, u64 mapped
    ):
        cdef Kind *compiled = kind_of(kind)
        cdef Mapping *m = <Mapping *>need(sizeof(Mapping))
        m.serial, m.start, m.end, m.nbytes = serial, start, start + nbytes, mapped
        m.here, m.kind, m.number = <uint8_t *>here, compiled, number
        self.engine.kinds.add(kind)  # It has to unmap what it has mapped.
        try:
            self.check_mapping(start, nbytes, mapped)
        except OSError:
            with nogil:
                mapping_undo(m)
            raise
        mapping_put(self.k, m)

    def remove_mapping(self, u64 serial):
        cdef Mapping *taken = mappings_take(self.k, serial)
        cdef bint done
        if taken == NULL:
            return True
        with nogil:
            done = plane_quiesce(self.k.plane, self.k, NULL, 0, 0, now_ns() + QUIESCE_NS)
            if done:
                mappings_drop(self.k, taken)
        if not done:  # Somebody still copies out of it; nobody does once the connections have gone.
            mappings_keep(self.k, taken)
        return done

    def mapped_by_peer(self, u64 serial, bint is_mapped):
        cdef Samehost *own = <Samehost *>self.k.own
        with nogil:
            pthread_mutex_lock(&own.mapped_lock)
            map_take(&own.mapped_by_peer, serial)
            if is_mapped:
                map_put(&own.mapped_by_peer, serial, own)
            pthread_mutex_unlock(&own.mapped_lock)
