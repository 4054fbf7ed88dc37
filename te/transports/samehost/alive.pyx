# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection
from te.core.posix cimport POLLIN, POLLRDHUP, poll_one, process_read
from te.core.sync cimport load64, now_ns, store64, u64
from te.transports.samehost.state cimport NONCE_BYTES, Samehost


cdef bint nonce_read(Samehost *own, uint8_t *seen) noexcept nogil:
    return process_read(own.pid, own.nonce_at, seen, NONCE_BYTES) == NONCE_BYTES


cdef bint process_gone(Samehost *own) noexcept nogil:
    cdef u64 now = now_ns()
    if poll_one(own.pidfd, POLLIN, 0) != 0:
        return True
    store64(&own.alive_ns, now)
    return False


cdef bint may_be_gone(Samehost *own) noexcept nogil:
    return now_ns() > load64(&own.alive_ns) + ALIVE_NS and process_gone(own)


cdef bint source_lives(Connection *c) noexcept nogil:
    return poll_one(c.channel.fd, POLLRDHUP, 0) == 0 and not may_be_gone(<Samehost *>c.link.own)
