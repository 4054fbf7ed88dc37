# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# The same host, for Python; _core.pyi is the contract.

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.callers cimport send_inline
from te.core.channels cimport RINGS_BYTES
from te.core.engine cimport Engine
from te.core.connections cimport connections_free
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.landing cimport LandingProtocol, landing_protocol
from te.core.link cimport Link, Ops, PROCESS_GONE, Transfer, link_die
from te.core.plane cimport plane_private
from te.core.posix cimport *
from te.core.sections cimport quiesce
from te.core.sending cimport Sending, sending_ops, sending_prepare, sending_submit
from te.core.sync cimport *
from te.core.wire cimport OVER_RINGS, PULL, SEGMENT
from te.transports.samehost.pulling cimport *

import os

RINGS_NBYTES = RINGS_BYTES
NONCE_NBYTES = NONCE_BYTES

cdef enum:
    SENDS_INLINE = 8
    # Frames a connection is ahead of the copying: milliseconds of it, for the copying threads may
    # keep the source off the processor; few enough that a cancel has something to stop.
    PULLS_AHEAD = 16
    PULL_BLOCK_BYTES = 2048  # smaller blocks go through the ring
    MAPPINGS_MAX = 1024  # of a link; each may be looked through for each block
    MAPPED_GIB_MAX = 1 << 12  # of a link
    PLANE_MAPPED_GIB_MAX = 1 << 15  # of all; a process has 2 ** 17 to give
    QUIESCE_NS = 900000000


# What the transport keeps for an engine.
cdef struct Shared:
    u64 mapped_bytes  # atomic: of peers' memory


def read_process(int pid, u64 address, size_t nbytes):
    cdef bytearray room = bytearray(nbytes)
    cdef iovec local, remote
    local.iov_base = <void *><char *>room
    remote.iov_base = <void *>address
    local.iov_len = remote.iov_len = nbytes
    if process_vm_readv(pid, &local, 1, &remote, 1, 0) != <ssize_t>nbytes:
        raise OSError(last_errno(), os.strerror(last_errno()))
    return bytes(room)


cdef inline Shared *shared_of(Link *link) noexcept nogil:
    return <Shared *>plane_private(link.plane, &OPS, sizeof(Shared))


# -- the contract

cdef void prepare(Transfer *t, bint is_shared) noexcept nogil:
    # process_vm_readv costs 0.5 us and more for each block, and the ring a second copy.
    if is_shared or t.total >= t.n * PULL_BLOCK_BYTES:
        sending_prepare(t, PULL, PULLS_AHEAD)
    else:
        sending_prepare(t, SEGMENT, 0)


cdef void submit(Transfer *t) noexcept nogil:
    if (<Sending *>t.own).frame == PULL:
        send_inline(t.link, SENDS_INLINE)
    else:
        sending_submit(t)


cdef bint check(Link *link, bint stalled) noexcept nogil:
    if process_gone(<Samehost *>link.own):
        link_die(link, PROCESS_GONE, 0, NULL)
    return False


cdef void forget(Link *link) noexcept nogil:
    forget_jobs(<Samehost *>link.own)


cdef void release(Link *link) noexcept nogil:
    cdef Samehost *own = <Samehost *>link.own
    connections_free(link)
    unmap_all(link, own.mappings)
    unmap_all(link, own.unlinked)
    if own.pidfd >= 0:
        close(own.pidfd)
    free(own)


cdef Ops OPS = sending_ops()
OPS.prepare = prepare
OPS.submit = submit
OPS.check = check
OPS.forget = forget
OPS.release = release

cdef LandingProtocol PROTOCOL = landing_protocol(OVER_RINGS, PULL)
PROTOCOL.frames.landed = pulling_landed
PROTOCOL.frames.copy = pulling_copy
PROTOCOL.frames.take_up = pulling_take_up
PROTOCOL.frames.has_work = pulling_has_work
PROTOCOL.pull = pulling_pull


# -- mappings

cdef void unmap(Link *link, Mapping *m) noexcept nogil:
    munmap(m.here, m.mapped)
    add64(&shared_of(link).mapped_bytes, -m.mapped)
    free(m)


cdef void unmap_all(Link *link, Mapping *first) noexcept nogil:
    cdef Mapping *next
    while first != NULL:
        next = first.next
        unmap(link, first)
        first = next


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
        own.pid = pid
        own.pidfd = pidfd
        own.nonce_at = nonce_at
        memcpy(own.nonce, <char *>nonce, NONCE_BYTES)
        self.make(engine, &OPS, is_incoming, own)

    def add_rail(self, int fd, int rings_fd):
        if rings_fd < 0:
            raise OSError(EINVAL, f"cannot use the connection: {os.strerror(EINVAL)}")
        return self.add(&PROTOCOL.frames, fd, rings_fd, sizeof(Pulling), -1)

    def add_mapping(self, u64 serial, u64 start, int fd, u64 nbytes):
        cdef Samehost *own = <Samehost *>self.k.own
        cdef Mapping *m = own.mappings
        cdef u32 count = 0
        cdef u64 mapped = file_bytes(fd), total = mapped
        if nbytes == 0 or mapped < nbytes:
            raise OSError(EFAULT, "the memory file is too short, or can be made so")
        if start + nbytes < start:
            raise OSError(EINVAL, f"{nbytes} bytes at {start:#x} are not an address range")
        while m != NULL:
            count += 1
            total += m.mapped
            if m.serial == serial or (m.start < start + nbytes and start < m.end):
                raise OSError(EINVAL, f"{nbytes} bytes at {start:#x} are mapped already")
            m = m.next
        if count >= MAPPINGS_MAX or total > <u64>MAPPED_GIB_MAX << 30:
            raise OSError(ENOMEM, f"{count} mappings and {total} bytes are too many for a link")
        total = load64(&shared_of(self.k).mapped_bytes) + mapped
        if total > <u64>PLANE_MAPPED_GIB_MAX << 30:
            raise OSError(ENOMEM, f"{total} bytes of all peers are too many to be mapped")
        cdef void *here = mmap(NULL, mapped, PROT_READ, MAP_SHARED, fd, 0)
        if here == MAP_FAILED:
            raise OSError(last_errno(), os.strerror(last_errno()))
        m = <Mapping *>need(sizeof(Mapping))
        add64(&shared_of(self.k).mapped_bytes, mapped)
        m.serial, m.start, m.end, m.mapped = serial, start, start + nbytes, mapped
        m.here = <uint8_t *>here
        m.next = own.mappings
        store_pointer(&own.mappings, m)

    def remove_mapping(self, u64 serial):
        cdef Samehost *own = <Samehost *>self.k.own
        cdef Mapping *m = own.mappings
        cdef Mapping *before = NULL
        cdef bint done
        while m != NULL and m.serial != serial:
            before = m
            m = m.next
        if m == NULL:
            return True
        store_pointer(&own.mappings if before == NULL else &before.next, m.next)
        with nogil:
            done = quiesce(&self.k.plane.sections, self.k, NULL, QUIESCE_NS)
        if done:
            unmap(self.k, m)
        else:  # Somebody still copies out of it; nobody does once the connections have gone.
            m.next = own.unlinked
            own.unlinked = m
        return done
