# SPDX-License-Identifier: Apache-2.0
# What a rail's bytes go through: a TCP socket, as they are or in encrypted records; or on the same host two rings in memory that both
# sides have mapped, one for each direction, and a unix socket that wakes up who sleeps and that
# tells of the other side's end.
#
# One thread at a time uses a channel, but for what is marked. A side keeps its own position to
# itself and shows it to the other; the other's is believed as far as it makes sense. What is read
# out of a ring is copied before it is looked at.

from libc.stdint cimport uint8_t
from te.core.posix cimport EPOLLIN, EPOLLOUT, iovec
from te.core.encryption cimport Encrypted, encrypted_ready
from te.core.sync cimport load32, load64, store32, u32, u64

cdef enum:
    RING_BYTES = 128 << 10
    RINGS_HEAD_BYTES = 4096
    RINGS_BYTES = 4096 + 2 * (128 << 10)  # a file of it: the head, then the two rings
    WAKE_NS = 10000  # from the return of write() to the look that wait() takes

# One direction between two processes, in memory that both have mapped: each position by itself in
# a line of the cache. `head` is how many bytes were ever written, `tail` how many were read.
cdef struct Ring:
    u64 head
    u64 head_line[7]
    u64 tail
    u64 tail_line[7]
    u32 reader_asleep
    u32 reader_line[15]
    u32 writer_asleep
    u32 writer_line[15]

cdef struct Channel:
    int fd
    Encrypted *encrypted  # NULL: what goes through the socket is as it is; the channel's
    uint8_t *rings  # NULL: the socket alone
    int rings_fd
    Ring *into
    Ring *out
    u64 in_tail, out_head  # atomic: this side's positions
    u64 in_base, out_base  # where the rings begin in the file
    bint hung_up
    bint is_patient  # wake-ups may wait for `channel_owes`
    u64 wake_due_ns  # 0: no wake-up is owed

# Takes over the descriptors, of which the one of the rings' file (RINGS_BYTES, sealed) is for the
# same host alone: the side that dialled writes the first ring. 0, or an errno; then they are the
# caller's.
cdef int channel_open(Channel *c, int fd, int rings_fd, bint dialled) noexcept nogil
# Closes the socket. What the other side has put into the ring can still be looked at.
cdef void channel_close(Channel *c) noexcept nogil
cdef void channel_free(Channel *c) noexcept nogil

# These return how many bytes, 0 at the end of the stream, or an errno below zero: -EAGAIN when the
# call would have to wait, -EPROTO when the other side's position cannot be, -EBADMSG or (from the
# kernel's TLS) -EMSGSIZE for an encrypted record that is not the other side's.

# Memory of the application, or with `own` of the plane. It goes through pwritev(2) and preadv(2) on
# the ring's file, as to a socket by sendmsg(2): where it has vanished that is -EFAULT, not a crash.
cdef ssize_t channel_send(Channel *c, iovec *v, u32 n, bint own) noexcept nogil
# Into memory of the application.
cdef ssize_t channel_land(Channel *c, iovec *v, u32 n) noexcept nogil
# Into memory of the plane.
cdef ssize_t channel_receive(Channel *c, void *p, size_t nbytes) noexcept nogil

# Takes in what has come through the socket beside the rings: wake-ups, or the other side's end.
cdef void take_wakeups(Channel *c) noexcept nogil
# Sends a wake-up that is due; whether there is still one to send.
cdef bint channel_owes(Channel *c, bint at_once) noexcept nogil


cdef inline bint has_input(Channel *c) noexcept nogil:
    """Whether something has come through the rings. Any thread."""
    return load64(&c.into.head) != load64(&c.in_tail)


cdef inline bint channel_moved(Channel *c, u32 interest) noexcept nogil:
    """Whether the other side has done what is waited for, as its rings show, or as has been taken out
    of the socket already; False of a plain socket. Any thread."""
    if c.encrypted != NULL:
        return interest & EPOLLIN != 0 and encrypted_ready(c.encrypted)
    if c.rings == NULL:
        return False
    if interest & EPOLLIN and has_input(c):
        return True
    # Room for a few bytes is not worth a turn; the other side always gets to the ring's end.
    return interest & EPOLLOUT and (
        load64(&c.out_head) - load64(&c.out.tail) <= RING_BYTES // 2
    )


cdef inline bint channel_arm(Channel *c, u32 interest) noexcept nogil:
    """Asks the other side to ring; True if there is something already. Any thread."""
    if c.rings == NULL:
        return channel_moved(c, interest)
    if interest & EPOLLIN:
        store32(&c.into.reader_asleep, 1)
    if interest & EPOLLOUT:
        store32(&c.out.writer_asleep, 1)
    return channel_moved(c, interest)


cdef inline void channel_disarm(Channel *c) noexcept nogil:
    """Saves the other side wake-ups that nobody needs."""
    if c.rings != NULL and load32(&c.into.reader_asleep):
        store32(&c.into.reader_asleep, 0)
