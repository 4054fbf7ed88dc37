# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdlib cimport free
from libc.string cimport memset
from te.core.heap cimport need
from te.core.posix cimport *
from te.core.sync cimport last_errno, u32


cdef Channel *channel_new(const ChannelOps *ops, int fd, size_t nbytes) noexcept nogil:
    cdef Channel *c = <Channel *>need(nbytes)
    c.ops = ops
    c.fd = fd
    return c


cdef void channel_close(Channel *c) noexcept nogil:
    close(c.fd)
    c.fd = -1


# -- a socket

cdef inline msghdr message_of(iovec *v, u32 n) noexcept nogil:
    cdef msghdr m
    memset(&m, 0, sizeof(m))
    m.msg_iov = v
    m.msg_iovlen = n
    return m


cdef ssize_t send_some(Channel *c, iovec *v, u32 n, bint own) noexcept nogil:
    cdef msghdr m = message_of(v, n)
    cdef ssize_t moved = sendmsg(c.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL)
    return -last_errno() if moved < 0 else moved


cdef ssize_t receive(Channel *c, iovec *v, u32 n, bint own) noexcept nogil:
    cdef msghdr m
    cdef ssize_t moved
    if n == 1:
        moved = recv(c.fd, v.iov_base, v.iov_len, MSG_DONTWAIT)
    else:
        m = message_of(v, n)
        moved = recvmsg(c.fd, &m, MSG_DONTWAIT)
    return -last_errno() if moved < 0 else moved


cdef void drop(Channel *c) noexcept nogil:
    free(c)


cdef ChannelOps socket_ops() noexcept:
    cdef ChannelOps ops
    memset(&ops, 0, sizeof(ops))
    ops.send = send_some
    ops.receive = receive
    ops.free = drop
    return ops
