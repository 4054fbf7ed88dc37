# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection
from te.core.posix cimport iovec, POLLIN, POLLRDHUP, poll, pollfd, process_vm_readv
from te.core.sync cimport load64, now_ns, store64, u64
from te.transports.samehost.state cimport NONCE_BYTES, Samehost


cdef bint nonce_read(Samehost *own, uint8_t *seen) noexcept nogil:
    cdef iovec local, remote
    local.iov_base = seen
    remote.iov_base = <void *>own.nonce_at
    local.iov_len = remote.iov_len = NONCE_BYTES
    return process_vm_readv(own.pid, &local, 1, &remote, 1, 0) == NONCE_BYTES


cdef bint process_gone(Samehost *own) noexcept nogil:
    cdef u64 now = now_ns()
    cdef pollfd p
    p.fd = own.pidfd
    p.events = POLLIN
    p.revents = 0
    if poll(&p, 1, 0) != 0:
        return True
    store64(&own.alive_ns, now)
    return False


cdef bint may_be_gone(Samehost *own) noexcept nogil:
    return now_ns() > load64(&own.alive_ns) + ALIVE_NS and process_gone(own)


cdef bint source_lives(Connection *c) noexcept nogil:
    cdef pollfd p
    p.fd = c.channel.fd
    p.events = POLLRDHUP
    p.revents = 0
    return poll(&p, 1, 0) == 0 and not may_be_gone(<Samehost *>c.link.own)
