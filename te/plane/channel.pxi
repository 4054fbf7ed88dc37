# SPDX-License-Identifier: Apache-2.0
# What a rail's bytes go through: a TCP socket; or on the same host two rings in memory that both
# sides have mapped, one for each direction, and a unix socket that wakes up who sleeps and that
# tells of the other side's end.
#
# A side keeps its own position to itself and shows it to the other; the other's is believed as far
# as it makes sense. What is read out of a ring is copied before it is looked at. Memory of the
# application goes in and out by pwritev(2) and preadv(2) on the ring's file, for the same reason
# that it goes to a socket by sendmsg(2): where it has vanished that is an error, not a crash.

cdef u64 file_bytes(int fd) noexcept nogil:
    """Size of a memory file that can never shrink; 0 if it is none: touching what another process
    has cut off is a SIGBUS. Ordinary files have no seals at all, -1."""
    cdef int seals = fcntl(fd, F_GET_SEALS)
    cdef int64_t nbytes
    if seals < 0 or not seals & F_SEAL_SHRINK:
        return 0
    nbytes = lseek(fd, 0, SEEK_END)
    return <u64>nbytes if nbytes > 0 else 0


cdef int ring_open(Rail *r, int fd) noexcept nogil:
    """Maps the rings in a memory file of RINGS_BYTES, whose side that dialled writes the first;
    0, or an errno. Takes over the descriptor when that works."""
    if file_bytes(fd) < RINGS_BYTES:
        return EINVAL
    cdef uint8_t *base = <uint8_t *>mmap(
        NULL, RINGS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    cdef bint first = not r.link.is_incoming
    if base == MAP_FAILED:
        return last_errno()
    r.rings = base
    r.rings_fd = fd
    r.ring_out = <Ring *>(base if first else base + sizeof(Ring))
    r.ring_in = <Ring *>(base + sizeof(Ring) if first else base)
    r.out_base = RINGS_HEAD_BYTES if first else RINGS_HEAD_BYTES + RING_BYTES
    r.in_base = RINGS_HEAD_BYTES + RING_BYTES if first else RINGS_HEAD_BYTES
    return 0


cdef void ring_close(Rail *r) noexcept nogil:
    if r.rings != NULL:
        munmap(r.rings, RINGS_BYTES)
        close(r.rings_fd)


# -- waking up, and being woken up

cdef inline void ring_bell(Rail *r, u32 *asleep) noexcept nogil:
    """After the other side was shown a position: wakes it up if it sleeps for that."""
    cdef uint8_t byte = 0
    if load32(asleep) and swap32(asleep, 0):
        # A full socket has bells enough in it, and of a dead one the reading side is told.
        send(r.fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL)


cdef inline void ring_later(Rail *r) noexcept nogil:
    """After something was put in for a reader that sleeps, by a worker that will not for a while.
    Mostly a thread is on its way to look by itself, as one that calls wait() after write(); a bell
    would only wake its worker up, on its processor, and it would take that for a busy machine."""
    if r.bell_due_ns == 0 and load32(&r.ring_out.reader_asleep):
        r.bell_due_ns = now_ns() + BELL_NS


cdef inline bint ring_owes(Rail *r, bint at_once) noexcept nogil:
    """Rings a bell that is due; whether there is still one to ring."""
    if r.bell_due_ns == 0:
        return False
    if not r.gone and load32(&r.ring_out.reader_asleep) and (
        load64(&r.ring_out.tail) != load64(&r.out_head)
    ):
        if not at_once and now_ns() < r.bell_due_ns:
            return True
        ring_bell(r, &r.ring_out.reader_asleep)
    r.bell_due_ns = 0
    return False


cdef void answer_bell(Rail *r) noexcept nogil:
    cdef uint8_t bells[64]
    cdef ssize_t n = recv(r.fd, bells, sizeof(bells), MSG_DONTWAIT)
    if n == 0 or (n < 0 and last_errno() != EAGAIN and last_errno() != EINTR):
        r.hung_up = True  # What it has put into the ring still counts.


cdef inline bint ring_moved(Rail *r) noexcept nogil:
    """Whether the other side has done what the rail waits for."""
    cdef u32 interest
    if r.ring_in == NULL or r.gone:
        return False
    interest = load32(&r.interest)
    if interest & EPOLLIN and load64(&r.ring_in.head) != load64(&r.in_tail):
        return True
    # Room for a few bytes is not worth a turn; the other side always gets to the ring's end.
    return interest & EPOLLOUT and (
        load64(&r.out_head) - load64(&r.ring_out.tail) <= RING_BYTES // 2
    )


cdef bint ring_arm(Rail *r) noexcept nogil:
    """Asks to be woken up; True if there is something already."""
    cdef u32 interest
    if r.ring_in == NULL:
        return False
    interest = load32(&r.interest)
    if interest & EPOLLIN:
        store32(&r.ring_in.reader_asleep, 1)
    if interest & EPOLLOUT:
        store32(&r.ring_out.writer_asleep, 1)
    return ring_moved(r)


cdef inline void ring_disarm(Rail *r) noexcept nogil:
    """Saves the other side bells that nobody needs."""
    if r.ring_in != NULL and load32(&r.ring_in.reader_asleep):
        store32(&r.ring_in.reader_asleep, 0)


# -- moving bytes; these return how many, 0 at the end of the stream, or an errno below zero

cdef u32 within(iovec *v, u32 n, u64 most, u64 *cut) noexcept nogil:
    """How many iovecs make up to `most` bytes. The last of them may be shortened for that: `cut`
    has the length that it had, or 0."""
    cdef u32 k = 0
    cut[0] = 0
    while k < n and most:
        if v[k].iov_len > most:
            cut[0] = v[k].iov_len
            v[k].iov_len = most
        most -= v[k].iov_len
        k += 1
    return k


cdef ssize_t ring_copy(Rail *r, u64 at, iovec *v, u32 n, u64 most, bint out) noexcept nogil:
    """Between one contiguous part of a ring, `at` in the file, and memory of the application."""
    cdef u64 cut
    cdef u32 k = within(v, n, most, &cut)
    cdef ssize_t moved
    if out:
        moved = pwritev(r.rings_fd, v, k, at)
    else:
        moved = preadv(r.rings_fd, v, k, at)
    if cut:
        v[k - 1].iov_len = cut
    return -last_errno() if moved < 0 else moved


cdef ssize_t ring_copy_own(Rail *r, u64 at, iovec *v, u32 n, u64 most, bint out) noexcept nogil:
    """The same with memory of the plane."""
    cdef u64 done = 0, part
    cdef u32 i = 0
    while i < n and done < most:
        part = min(<u64>v[i].iov_len, most - done)
        if out:
            memcpy(r.rings + at + done, v[i].iov_base, part)
        else:
            memcpy(v[i].iov_base, r.rings + at + done, part)
        done += part
        i += 1
    return done


cdef ssize_t ring_part(
    Rail *r, u64 base, u64 position, u64 room, iovec *v, u32 n, bint own, bint out
) noexcept nogil:
    cdef u64 at = position % RING_BYTES
    cdef u64 most = min(room, RING_BYTES - at)
    if own:
        return ring_copy_own(r, base + at, v, n, most, out)
    return ring_copy(r, base + at, v, n, most, out)


cdef ssize_t ring_move(
    Rail *r, u64 base, u64 position, u64 room, iovec *v, u32 n, bint own, bint out
) noexcept nogil:
    """As much as the room allows, around the ring's end if need be."""
    cdef ssize_t first = ring_part(r, base, position, room, v, n, own, out), more
    cdef u64 left = 0, skip
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
    more = ring_part(r, base, position + first, room - first, v + i, n - i, own, out)
    v[i] = cut
    return first + more if more > 0 else first


cdef ssize_t lost_place(Rail *r) noexcept nogil:
    link_die(r.link, VIOLATED, 0, b"a position in a ring that cannot be")
    return -EPROTO


cdef ssize_t ring_send(Rail *r, iovec *v, u32 n, bint own) noexcept nogil:
    cdef u64 used = r.out_head - load64(&r.ring_out.tail)
    cdef ssize_t moved
    if used > RING_BYTES:
        return lost_place(r)
    if used == RING_BYTES:
        return -EAGAIN
    moved = ring_move(r, r.out_base, r.out_head, RING_BYTES - used, v, n, own, True)
    if moved > 0:
        store64(&r.out_head, r.out_head + moved)
        store64(&r.ring_out.head, r.out_head)
        if r.is_patient:
            ring_later(r)
        else:
            ring_bell(r, &r.ring_out.reader_asleep)
    return moved


cdef ssize_t ring_receive(Rail *r, iovec *v, u32 n, bint own) noexcept nogil:
    cdef u64 used = load64(&r.ring_in.head) - r.in_tail
    cdef ssize_t moved
    if used > RING_BYTES:
        return lost_place(r)
    if used == 0:
        return 0 if r.hung_up else -EAGAIN
    moved = ring_move(r, r.in_base, r.in_tail, used, v, n, own, False)
    if moved > 0:
        store64(&r.in_tail, r.in_tail + moved)
        store64(&r.ring_in.tail, r.in_tail)
        if used - moved <= RING_BYTES // 2:
            ring_bell(r, &r.ring_in.writer_asleep)
    return moved


cdef ssize_t channel_send(Rail *r) noexcept nogil:
    """Of what is loaded."""
    cdef msghdr m
    cdef ssize_t n
    if r.rings != NULL:
        return ring_send(r, r.out + r.out_at, r.out_n - r.out_at, r.out_tail == 0)
    memset(&m, 0, sizeof(m))
    m.msg_iov = r.out + r.out_at
    m.msg_iovlen = r.out_n - r.out_at
    n = sendmsg(r.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL)
    return -last_errno() if n < 0 else n


cdef ssize_t channel_land(Rail *r, iovec *v, u32 n) noexcept nogil:
    """Into memory of the application."""
    cdef msghdr m
    cdef ssize_t moved
    if r.rings != NULL:
        return ring_receive(r, v, n, False)
    memset(&m, 0, sizeof(m))
    m.msg_iov = v
    m.msg_iovlen = n
    moved = recvmsg(r.fd, &m, MSG_DONTWAIT)
    return -last_errno() if moved < 0 else moved


cdef ssize_t channel_receive(Rail *r, void *p, size_t nbytes) noexcept nogil:
    """Into memory of the plane."""
    cdef iovec v
    cdef ssize_t n
    if r.rings != NULL:
        v.iov_base = p
        v.iov_len = nbytes
        return ring_receive(r, &v, 1, True)
    n = recv(r.fd, p, nbytes, MSG_DONTWAIT)
    return -last_errno() if n < 0 else n
