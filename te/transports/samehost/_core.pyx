# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# The same host, for Python; _core.pyi is the contract.

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.callers cimport send_now
from te.core.channels cimport Channel
from te.core.engine cimport Engine
from te.core.connections cimport connections_free
from te.core.frames cimport Protocol
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.kinds cimport Kind, TOUCHED_BY_KERNEL, kind_of
from te.core.link cimport (
    Link, Ops, PROCESS_GONE, STALLED, Transfer, is_too_silent, link_die,
)
from te.core.maps cimport map_free, map_get, map_put, map_take
from te.core.plane cimport plane_quiesce, plane_stages
from te.core.posix cimport *
from te.core.receiving cimport receiving_protocol
from te.core.sending cimport (
    Sending, sending_ops, sending_prepare, sending_pull, sending_submit,
)
from te.core.sync cimport *
from te.core.wire cimport OVER_RINGS, PULL, SEGMENT
from te.core.worker cimport workers_watch
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
    LEFT_MAX = 16  # threads that look into processes which do not answer


# -- one look into a process, whose memory may not answer

cdef enum:  # states of a look
    LOOKING = 0
    HAS_LOOKED = 1
    IS_LEFT = 2  # nobody waits for it any more

cdef struct Look:
    u32 refs, state  # atomic
    int pid
    u64 address
    size_t nbytes
    ssize_t moved
    int errnum
    # The bytes follow.

cdef u32 LEFT = 0  # atomic: threads that look and were left


cdef void look_drop(Look *l) noexcept nogil:
    if add32(&l.refs, -1) == 0:
        free(l)


cdef void *look(void *of) noexcept nogil:
    cdef Look *l = <Look *>of
    l.moved = process_read(l.pid, l.address, l + 1, l.nbytes)
    l.errnum = last_errno()
    if swap32(&l.state, HAS_LOOKED) == IS_LEFT:
        add32(&LEFT, -1)
    futex_wake_all(&l.state)
    look_drop(l)
    return NULL


cdef bint await_look(Look *l, u64 until) noexcept nogil:
    """False if it is left."""
    cdef u32 looking = LOOKING, left = IS_LEFT
    cdef u64 now = now_ns()
    while load32(&l.state) == looking and now < until:
        futex_wait(&l.state, looking, until - now)
        now = now_ns()
    add32(&LEFT, 1)
    if swap_if(&l.state, looking, left) == looking:
        return False
    add32(&LEFT, -1)
    return True


def read_process(int pid, u64 address, size_t nbytes, double timeout_s=LOOK_TIMEOUT_S):
    cdef Look *l
    cdef u64 until = now_ns() + ns_of(timeout_s)
    cdef int errnum
    cdef bint has_looked
    if load32(&LEFT) >= LEFT_MAX:
        raise OSError(EAGAIN, "the memory of too many processes does not answer")
    l = <Look *>need(sizeof(Look) + nbytes)
    l.refs, l.pid, l.address, l.nbytes = 2, pid, address, nbytes
    errnum = start_thread(look, l)
    if errnum:
        free(l)
        raise OSError(errnum, f"no thread: {os.strerror(errnum)}")
    with nogil:
        has_looked = await_look(l, until)
    try:
        if not has_looked:
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
    if plane_stages(t.link.plane) and not t.is_read and is_mapped(t):
        sending_pull(t, PULLS_AHEAD)
        return
    # process_vm_readv costs 0.5 us and more for each block, and the ring a second copy.
    if is_shared or t.total >= t.n * PULL_BLOCK_BYTES:
        sending_prepare(t, PULL, PULLS_AHEAD)
    else:
        sending_prepare(t, SEGMENT, 0)


cdef void submit(Transfer *t) noexcept nogil:
    if (<Sending *>t.own).frame == PULL:
        send_now(t.link, SENDS_INLINE, t.total)
    else:
        sending_submit(t)


cdef bint check(Link *link, bint stalled) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    cdef u64 since_ns = load64(&own.waits_since_ns) if load32(&own.waits) else 0
    if process_gone(own):
        link_die(link, PROCESS_GONE, 0, NULL)
    elif is_too_silent(link, &own.silence, since_ns, now_ns()):
        link_die(link, STALLED, 0, NULL)  # Its peer may never notice, and its memory never answer.
    return False


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
OPS.submit = submit
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
        return self.add(&PROTOCOL, channel, sizeof(Pulling))

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
