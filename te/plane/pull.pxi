# SPDX-License-Identifier: Apache-2.0
# The same host: the destination copies, out of the source's memory, so that its consent, bounds
# and fence hold whatever the source does.

cdef Mapping *mapping_of(Link *link, u64 address, u64 nbytes) noexcept nogil:
    """The mapping that has the range, if this process has mapped that memory of the source."""
    cdef Mapping *m = <Mapping *>load_pointer(&link.mappings)
    while m != NULL:
        if m.start <= address and address < m.end and nbytes <= m.end - address:
            return m
        m = m.next
    return NULL


cdef ssize_t copy_mapped(Rail *r) noexcept nogil:
    """Copies the next ranges that lie in mapped memory, up to PULL_BYTES; 0 if there are none."""
    cdef Mapping *m
    cdef u64 done = 0, n, src
    cdef u32 i = r.near_at
    while i < r.near_n and done < PULL_BYTES:
        src = <u64>r.far[i].iov_base
        n = min(<u64>r.near[i].iov_len, PULL_BYTES - done)
        m = mapping_of(r.link, src, n)
        if m == NULL:
            break
        memcpy(r.near[i].iov_base, m.near + (src - m.start), n)
        done += n
        if n < r.near[i].iov_len:
            break
        i += 1
    return done


cdef ssize_t copy_foreign(Rail *r) noexcept nogil:
    """process_vm_readv(2) of the next ranges, up to PULL_BYTES; -1 and errno when none could."""
    cdef u32 i = r.near_at, n = 0
    cdef u64 left = PULL_BYTES, cut = 0
    while i + n < r.near_n and left:
        if r.near[i + n].iov_len > left:
            cut = r.near[i + n].iov_len
            r.near[i + n].iov_len = r.far[i + n].iov_len = left
        left -= r.near[i + n].iov_len
        n += 1
    cdef ssize_t moved = process_vm_readv(r.link.pid, r.near + i, n, r.far + i, n, 0)
    if cut:
        r.near[i + n - 1].iov_len = r.far[i + n - 1].iov_len = cut
    return moved


cdef bint source_lives(Rail *r) noexcept nogil:
    """Whether the source has kept the rail open until now, and so its memory as it was."""
    cdef pollfd p
    p.fd = r.fd
    p.events = POLLRDHUP
    p.revents = 0
    return poll(&p, 1, 0) == 0


cdef Moved pull(Rail *r) noexcept nogil:
    """One copy, inside the mark, if that is still allowed."""
    cdef char reason[TEXT_MAX]
    cdef ssize_t n = 0
    cdef bint revoked
    if load32(&r.arriving.refused):
        throw_away(r)
        return MOVED
    enter(r.worker)
    revoked = is_revoked(r, r.arriving, reason)
    if not revoked:
        n = copy_mapped(r)
        if n == 0:
            n = copy_foreign(r)
    leave(r.worker)
    if not revoked and n <= 0:
        revoked = True
        say_fault(r, last_errno(), reason)
    if revoked:
        revoke(r, r.arriving, reason)
        return MOVED
    add64(&r.plane.bytes_received, n)
    store64(&r.link.progress_ns, now_ns())
    r.payload_left -= n
    if r.payload_left:
        advance(r.far, r.near_at, n)
        r.near_at = advance(r.near, r.near_at, n)
        return MOVED
    if not source_lives(r):
        # It may have used the memory for something else already: this must not count.
        link_die(r.link, ENDED, 0, b" in the middle of a transfer")
        return LOST
    frame_landed(r, True)
    return MOVED


cdef void say_fault(Rail *r, int errnum, char *reason) noexcept nogil:
    """Which side's memory it was that could not be accessed."""
    cdef char byte
    cdef iovec near
    cdef iovec far = r.far[r.near_at]
    near.iov_base = &byte
    near.iov_len = far.iov_len = 1
    if process_vm_readv(r.link.pid, &near, 1, &far, 1, 0) == 1:
        snprintf(reason, TEXT_MAX, b"registered memory cannot be written: %s", strerror(errnum))
    else:
        snprintf(reason, TEXT_MAX, b"the source memory cannot be read: %s", strerror(errnum))


cdef void count_pull(Rail *r, u64 number) noexcept nogil:
    """Tells the source now and then how far the copying is, so that it sends more frames. What is
    not told when the rail turns to another transfer is less than a source is ahead."""
    if r.pulled_of != number:
        r.pulled_of = number
        r.pulled_nbytes = r.pulled = 0
    r.pulled_nbytes += r.head.nbytes
    r.pulled += 1
    if r.pulled == PULLS_TOLD:
        queue_progress(r, number, r.pulled_nbytes)
        r.pulled_nbytes = r.pulled = 0
