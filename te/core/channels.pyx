# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memset
from te.core.posix cimport *
from te.core.encryption cimport encrypted_free, encrypted_receive, encrypted_send
from te.core.sync cimport last_errno, load32, load64, now_ns, store64, swap32, u32, u64
from te.core.vectors cimport within


def ring_limits():
    return {
        "RING_BYTES": RING_BYTES, "RINGS_HEAD_BYTES": RINGS_HEAD_BYTES,
        "RING_HEAD_BYTES": sizeof(Ring),
    }


def ring_layout():
    cdef Ring r
    return {
        "head": <char *>&r.head - <char *>&r,
        "tail": <char *>&r.tail - <char *>&r,
        "reader_asleep": <char *>&r.reader_asleep - <char *>&r,
        "writer_asleep": <char *>&r.writer_asleep - <char *>&r,
    }


cdef int channel_open(Channel *c, int fd, int rings_fd, bint dialled) noexcept nogil:
    cdef uint8_t *base
    c.fd = fd
    c.rings_fd = rings_fd
    if rings_fd < 0:
        return 0
    if file_bytes(rings_fd) < RINGS_BYTES:
        return EINVAL
    base = <uint8_t *>mmap(NULL, RINGS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, rings_fd, 0)
    if base == MAP_FAILED:
        return last_errno()
    c.rings = base
    c.out = <Ring *>(base if dialled else base + sizeof(Ring))
    c.into = <Ring *>(base + sizeof(Ring) if dialled else base)
    c.out_base = RINGS_HEAD_BYTES if dialled else RINGS_HEAD_BYTES + RING_BYTES
    c.in_base = RINGS_HEAD_BYTES + RING_BYTES if dialled else RINGS_HEAD_BYTES
    return 0


cdef void channel_close(Channel *c) noexcept nogil:
    close(c.fd)
    c.fd = -1


cdef void channel_free(Channel *c) noexcept nogil:
    encrypted_free(c.encrypted)
    c.encrypted = NULL
    if c.rings != NULL:
        munmap(c.rings, RINGS_BYTES)
        close(c.rings_fd)
        c.rings = NULL


# -- waking up, and being woken up

cdef inline void wake_other(Channel *c, u32 *asleep) noexcept nogil:
    """After the other side was shown a position: wakes it up if it sleeps for that."""
    cdef uint8_t byte = 0
    if load32(asleep) and swap32(asleep, 0):
        # A full socket has wake-ups enough in it, and of a dead one the reading side is told.
        send(c.fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL)


cdef inline void wake_later(Channel *c) noexcept nogil:
    """After something was put in for a reader that sleeps, by a worker that will not for a while.
    Mostly a thread is on its way to look by itself, as one that calls wait() after write(); a wake-up
    would only wake its worker up, on its processor, and it would take that for a busy machine."""
    if c.wake_due_ns == 0 and load32(&c.out.reader_asleep):
        c.wake_due_ns = now_ns() + WAKE_NS


cdef bint channel_owes(Channel *c, bint at_once) noexcept nogil:
    if c.wake_due_ns == 0:
        return False
    if c.fd >= 0 and load32(&c.out.reader_asleep) and (
        load64(&c.out.tail) != load64(&c.out_head)
    ):
        if not at_once and now_ns() < c.wake_due_ns:
            return True
        wake_other(c, &c.out.reader_asleep)
    c.wake_due_ns = 0
    return False


cdef void take_wakeups(Channel *c) noexcept nogil:
    cdef uint8_t taken[64]
    cdef ssize_t n = recv(c.fd, taken, sizeof(taken), MSG_DONTWAIT)
    if n == 0 or (n < 0 and last_errno() != EAGAIN and last_errno() != EINTR):
        c.hung_up = True  # What it has put into the ring still counts.


# -- moving bytes

cdef ssize_t ring_copy(Channel *c, u64 at, iovec *v, u32 n, u64 most, bint out) noexcept nogil:
    """Between one contiguous part of a ring, `at` in the file, and memory of the application."""
    cdef u64 cut
    cdef u32 k = within(v, n, most, &cut)
    cdef ssize_t moved
    if out:
        moved = pwritev(c.rings_fd, v, k, at)
    else:
        moved = preadv(c.rings_fd, v, k, at)
    if cut:
        v[k - 1].iov_len = cut
    return -last_errno() if moved < 0 else moved


cdef ssize_t ring_copy_own(Channel *c, u64 at, iovec *v, u32 n, u64 most, bint out) noexcept nogil:
    """The same with memory of the plane."""
    cdef u64 done = 0, part
    cdef u32 i = 0
    while i < n and done < most:
        part = min(<u64>v[i].iov_len, most - done)
        if out:
            memcpy(c.rings + at + done, v[i].iov_base, part)
        else:
            memcpy(v[i].iov_base, c.rings + at + done, part)
        done += part
        i += 1
    return done


cdef ssize_t ring_part(
    Channel *c, u64 base, u64 position, u64 room, iovec *v, u32 n, bint own, bint out
) noexcept nogil:
    cdef u64 at = position % RING_BYTES
    cdef u64 most = min(room, RING_BYTES - at)
    if own:
        return ring_copy_own(c, base + at, v, n, most, out)
    return ring_copy(c, base + at, v, n, most, out)


cdef ssize_t ring_move(
    Channel *c, u64 base, u64 position, u64 room, iovec *v, u32 n, bint own, bint out
) noexcept nogil:
    """As much as the room allows, around the ring's end if need be."""
    cdef ssize_t first = ring_part(c, base, position, room, v, n, own, out), more
    cdef u64 skip
    cdef u32 i
    cdef iovec cut
    if first <= 0 or (position + first) % RING_BYTES or <u64>first == room:
        return first
    skip = first
    i = 0
    while i < n and skip >= v[i].iov_len:
        skip -= v[i].iov_len
        i += 1
    if i == n:
        return first
    cut = v[i]
    v[i].iov_base = <uint8_t *>cut.iov_base + skip
    v[i].iov_len = cut.iov_len - skip
    more = ring_part(c, base, position + first, room - first, v + i, n - i, own, out)
    v[i] = cut
    return first + more if more > 0 else first


cdef ssize_t ring_send(Channel *c, iovec *v, u32 n, bint own) noexcept nogil:
    cdef u64 used = c.out_head - load64(&c.out.tail)
    cdef ssize_t moved
    if used > RING_BYTES:
        return -EPROTO
    if used == RING_BYTES:
        return -EAGAIN
    moved = ring_move(c, c.out_base, c.out_head, RING_BYTES - used, v, n, own, True)
    if moved > 0:
        store64(&c.out_head, c.out_head + moved)
        store64(&c.out.head, c.out_head)
        if c.is_patient:
            wake_later(c)
        else:
            wake_other(c, &c.out.reader_asleep)
    return moved


cdef ssize_t ring_receive(Channel *c, iovec *v, u32 n, bint own) noexcept nogil:
    cdef u64 used = load64(&c.into.head) - c.in_tail
    cdef ssize_t moved
    if used > RING_BYTES:
        return -EPROTO
    if used == 0:
        return 0 if c.hung_up else -EAGAIN
    moved = ring_move(c, c.in_base, c.in_tail, used, v, n, own, False)
    if moved > 0:
        store64(&c.in_tail, c.in_tail + moved)
        store64(&c.into.tail, c.in_tail)
        if used - moved <= RING_BYTES // 2:
            wake_other(c, &c.into.writer_asleep)
    return moved


cdef inline msghdr message_of(iovec *v, u32 n) noexcept nogil:
    cdef msghdr m
    memset(&m, 0, sizeof(m))
    m.msg_iov = v
    m.msg_iovlen = n
    return m


cdef ssize_t channel_send(Channel *c, iovec *v, u32 n, bint own) noexcept nogil:
    cdef msghdr m
    cdef ssize_t moved
    if c.rings != NULL:
        return ring_send(c, v, n, own)
    if c.encrypted != NULL:
        return encrypted_send(c.encrypted, c.fd, v, n, own)
    m = message_of(v, n)
    moved = sendmsg(c.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL)
    return -last_errno() if moved < 0 else moved


cdef ssize_t channel_land(Channel *c, iovec *v, u32 n) noexcept nogil:
    cdef msghdr m
    cdef ssize_t moved
    if c.rings != NULL:
        return ring_receive(c, v, n, False)
    if c.encrypted != NULL:
        return encrypted_receive(c.encrypted, c.fd, v, n, False)
    m = message_of(v, n)
    moved = recvmsg(c.fd, &m, MSG_DONTWAIT)
    return -last_errno() if moved < 0 else moved


cdef ssize_t channel_receive(Channel *c, void *p, size_t nbytes) noexcept nogil:
    cdef iovec v
    cdef ssize_t n
    v.iov_base = p
    v.iov_len = nbytes
    if c.rings != NULL:
        return ring_receive(c, &v, 1, True)
    if c.encrypted != NULL:
        return encrypted_receive(c.encrypted, c.fd, &v, 1, True)
    n = recv(c.fd, p, nbytes, MSG_DONTWAIT)
    return -last_errno() if n < 0 else n
