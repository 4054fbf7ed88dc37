# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from te.core.channels cimport ChannelOps, channel_new, socket_ops
from te.core.posix cimport *
from te.core.sync cimport last_errno, load32, load64, now_ns, store32, store64, swap32, u32, u64
from te.core.vectors cimport behind, file_copy

cdef enum:
    WAKE_NS = 10000  # from the return of write() to the look that wait() takes

cdef struct Rings:
    Channel channel  # first
    uint8_t *base
    int file
    Ring *into
    Ring *out
    u64 in_tail, out_head  # atomic: this side's positions
    u64 in_base, out_base  # where the rings begin in the file
    u64 wake_due_ns  # 0: no wake-up is owed


# -- waking up, and being woken up

cdef inline void wake_other(Rings *c, u32 *asleep) noexcept nogil:
    """After the other side was shown a position: wakes it up if it sleeps for that."""
    cdef uint8_t byte = 0
    if load32(asleep) and swap32(asleep, 0):
        # A full socket has wake-ups enough in it, and of a dead one the reading side is told.
        send(c.channel.fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL)


cdef inline void wake_later(Rings *c) noexcept nogil:
    """After something was put in for a reader that sleeps, by a worker that will not for a while.
    Mostly a thread is on its way to look by itself, as one that calls wait() after write(); a wake-up
    would only wake its worker up, on its processor, and it would take that for a busy machine."""
    if c.wake_due_ns == 0 and load32(&c.out.reader_asleep):
        c.wake_due_ns = now_ns() + WAKE_NS


cdef bint send_wakeup(Channel *of, bint at_once) noexcept nogil:
    cdef Rings *c = <Rings *>of
    if c.wake_due_ns == 0:
        return False
    if of.fd >= 0 and load32(&c.out.reader_asleep) and (
        load64(&c.out.tail) != load64(&c.out_head)
    ):
        if not at_once and now_ns() < c.wake_due_ns:
            return True
        wake_other(c, &c.out.reader_asleep)
    c.wake_due_ns = 0
    return False


cdef void rung(Channel *c) noexcept nogil:
    cdef uint8_t taken[64]
    cdef ssize_t n = recv(c.fd, taken, sizeof(taken), MSG_DONTWAIT)
    if n == 0 or (n < 0 and last_errno() != EAGAIN and last_errno() != EINTR):
        c.hung_up = True  # What it has put into the ring still counts.


cdef bint moved(Channel *of, u32 interest) noexcept nogil:
    cdef Rings *c = <Rings *>of
    if interest & EPOLLIN and load64(&c.into.head) != load64(&c.in_tail):
        return True
    # Room for a few bytes is not worth a turn; the other side always gets to the ring's end.
    return interest & EPOLLOUT and (
        load64(&c.out_head) - load64(&c.out.tail) <= RING_BYTES // 2
    )


cdef void arm(Channel *of, u32 interest) noexcept nogil:
    cdef Rings *c = <Rings *>of
    if interest & EPOLLIN:
        store32(&c.into.reader_asleep, 1)
    if interest & EPOLLOUT:
        store32(&c.out.writer_asleep, 1)
    if interest == 0 and load32(&c.into.reader_asleep):
        store32(&c.into.reader_asleep, 0)  # Saves the other side a wake-up.


# -- moving bytes

cdef ssize_t move_part(
    Rings *c, u64 base, u64 position, u64 room, iovec *v, u32 n, bint own, bint out
) noexcept nogil:
    cdef u64 at = position % RING_BYTES
    return file_copy(c.file, c.base, base + at, v, n, min(room, RING_BYTES - at), own, out)


cdef ssize_t move(
    Rings *c, u64 base, u64 position, u64 room, iovec *v, u32 n, bint own, bint out
) noexcept nogil:
    """As much as the room allows, around the ring's end if need be."""
    cdef ssize_t first = move_part(c, base, position, room, v, n, own, out), more
    cdef iovec was
    if first <= 0 or (position + first) % RING_BYTES or <u64>first == room:
        return first
    v = behind(v, &n, first, &was)
    if n == 0:
        return first
    more = move_part(c, base, position + first, room - first, v, n, own, out)
    v[0] = was
    return first + more if more > 0 else first


cdef ssize_t send_some(Channel *of, iovec *v, u32 n, bint own) noexcept nogil:
    cdef Rings *c = <Rings *>of
    cdef u64 used = c.out_head - load64(&c.out.tail)
    cdef ssize_t done
    if used > RING_BYTES:
        return -EBADMSG
    if used == RING_BYTES:
        return -EAGAIN
    done = move(c, c.out_base, c.out_head, RING_BYTES - used, v, n, own, True)
    if done > 0:
        store64(&c.out_head, c.out_head + done)
        store64(&c.out.head, c.out_head)
        if of.is_patient:
            wake_later(c)
        else:
            wake_other(c, &c.out.reader_asleep)
    return done


cdef ssize_t receive(Channel *of, iovec *v, u32 n, bint own) noexcept nogil:
    cdef Rings *c = <Rings *>of
    cdef u64 used = load64(&c.into.head) - c.in_tail
    cdef ssize_t done
    if used > RING_BYTES:
        return -EBADMSG
    if used == 0:
        return 0 if of.hung_up else -EAGAIN
    done = move(c, c.in_base, c.in_tail, used, v, n, own, False)
    if done > 0:
        store64(&c.in_tail, c.in_tail + done)
        store64(&c.into.tail, c.in_tail)
        if used - done <= RING_BYTES // 2:
            wake_other(c, &c.into.writer_asleep)
    return done


# -- making and freeing

cdef void drop(Channel *of) noexcept nogil:
    cdef Rings *c = <Rings *>of
    munmap(c.base, RINGS_BYTES)
    if of.is_taken:
        close(c.file)
    free(c)


cdef ChannelOps OPS = socket_ops()
OPS.is_in_memory = True
OPS.violation = b"a position in a ring that cannot be"
OPS.send = send_some
OPS.receive = receive
OPS.moved = moved
OPS.arm = arm
OPS.rung = rung
OPS.send_wakeup = send_wakeup
OPS.free = drop


cdef Channel *rings_new(int fd, int rings_fd, bint dialled, int *errnum) noexcept nogil:
    cdef Rings *c
    cdef void *base = MAP_FAILED
    errnum[0] = EINVAL
    if file_bytes(rings_fd) >= RINGS_BYTES:
        base = mmap(NULL, RINGS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, rings_fd, 0)
        errnum[0] = last_errno()
    if base == MAP_FAILED:
        return NULL
    c = <Rings *>channel_new(&OPS, fd, sizeof(Rings))
    c.file = rings_fd
    c.base = <uint8_t *>base
    c.out = <Ring *>(c.base if dialled else c.base + sizeof(Ring))
    c.into = <Ring *>(c.base + sizeof(Ring) if dialled else c.base)
    c.out_base = RINGS_HEAD_BYTES if dialled else RINGS_HEAD_BYTES + RING_BYTES
    c.in_base = RINGS_HEAD_BYTES + RING_BYTES if dialled else RINGS_HEAD_BYTES
    return &c.channel
