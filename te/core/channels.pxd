# SPDX-License-Identifier: Apache-2.0
# What the bytes of a connection go through. A transport makes its channels: the plain socket is here,
# others are in the folders of their transports. Each is a struct that begins with a `Channel`.
#
# One thread at a time uses a channel, but for what is marked.

from te.core.posix cimport iovec
from te.core.sync cimport u32

cdef struct Channel

cdef struct ChannelOps:
    # The bytes go through memory that both sides see. Its descriptor only wakes up who sleeps, and tells
    # of the other side's end.
    bint is_in_memory
    # What the other side has done where -EBADMSG or -EMSGSIZE is returned; NULL where neither can be.
    const char *violation
    # These return how many bytes, 0 at the end of the stream, or an errno below zero: -EAGAIN when the
    # call would have to wait. The memory is the application's, which may vanish: that is -EFAULT, not a
    # crash. With `own` it is the plane's. Of bytes that are not returned as sent the next call must
    # offer the same again.
    ssize_t (*send)(Channel *c, iovec *v, u32 n, bint own) noexcept nogil
    ssize_t (*receive)(Channel *c, iovec *v, u32 n, bint own) noexcept nogil
    # The next four are NULL where the descriptor tells all (epoll(7)).
    # Whether what is waited for (EPOLLIN, EPOLLOUT) is there, as far as the descriptor does not tell.
    # Any thread.
    bint (*moved)(Channel *c, u32 interest) noexcept nogil
    # Has the descriptor tell of that, too; 0: of nothing that `moved` tells. Any thread.
    void (*arm)(Channel *c, u32 interest) noexcept nogil
    # Takes in what has come through the descriptor.
    void (*rung)(Channel *c) noexcept nogil
    # Sends a wake-up that is due, or `at_once`; whether there is still one to send.
    bint (*send_wakeup)(Channel *c, bint at_once) noexcept nogil
    # Gives back its memory, and descriptors beside `fd` that are its own.
    void (*free)(Channel *c) noexcept nogil

cdef struct Channel:
    const ChannelOps *ops
    int fd  # of a socket
    bint is_taken  # its descriptors are its own; before that they are whose they were
    bint hung_up  # the other side has ended; what it has sent until then can still be received
    bint is_patient  # wake-ups may wait for `send_wakeup`

# A channel that is a socket and no more; others have their own functions in place of some.
cdef ChannelOps socket_ops() noexcept
# One of such a kind, of `nbytes` in all.
cdef Channel *channel_new(const ChannelOps *ops, int fd, size_t nbytes) noexcept nogil
# Closes the socket. What the other side has put into memory can still be received.
cdef void channel_close(Channel *c) noexcept nogil


cdef inline ssize_t channel_receive(Channel *c, void *p, size_t nbytes) noexcept nogil:
    """Into memory of the plane."""
    cdef iovec v
    v.iov_base = p
    v.iov_len = nbytes
    return c.ops.receive(c, &v, 1, True)


cdef inline bint channel_moved(Channel *c, u32 interest) noexcept nogil:
    return c.ops.moved != NULL and c.ops.moved(c, interest)


cdef inline bint channel_arm(Channel *c, u32 interest) noexcept nogil:
    """Asks the other side to ring; True if there is something already."""
    if c.ops.arm != NULL and interest:
        c.ops.arm(c, interest)
    return channel_moved(c, interest)


cdef inline void channel_disarm(Channel *c) noexcept nogil:
    """Saves the other side wake-ups that nobody needs."""
    if c.ops.arm != NULL:
        c.ops.arm(c, 0)


cdef inline bint channel_send_wakeup(Channel *c, bint at_once) noexcept nogil:
    return c.ops.send_wakeup != NULL and c.ops.send_wakeup(c, at_once)
