# SPDX-License-Identifier: Apache-2.0
# The same host: the destination copies, out of the source's memory, so that its consent, bounds
# and fence hold whatever the source does.

# -- sharing the work among the link's workers, whichever rail it came by

cdef void job_put(Rail *r, Arriving *a) noexcept nogil:
    cdef Link *link = r.link
    cdef u32 n = r.head.count
    cdef Job *job = <Job *>need(sizeof(Job) + 2 * n * sizeof(iovec))
    job.head = r.head
    job.arriving = a
    memcpy(job.ranges, r.near, n * sizeof(iovec))
    memcpy(job.ranges + n, r.far, n * sizeof(iovec))
    pthread_mutex_lock(&link.lock)
    if link.jobs == NULL:
        link.jobs = job
    else:
        link.jobs_last.next = job
    link.jobs_last = job
    if add32(&link.jobs_n, 1) > 1:
        kick_other(r)
    pthread_mutex_unlock(&link.lock)


cdef bint job_take(Rail *r) noexcept nogil:
    """Takes up the next copy on a rail between two frames; False if there is none."""
    cdef Link *link = r.link
    cdef Job *job
    if load32(&link.jobs_n) == 0:
        return False
    pthread_mutex_lock(&link.lock)
    job = link.jobs
    if job != NULL:
        link.jobs = job.next
        if add32(&link.jobs_n, -1):
            kick_other(r)
    pthread_mutex_unlock(&link.lock)
    if job == NULL:
        return False
    r.head = job.head
    memcpy(r.near, job.ranges, job.head.count * sizeof(iovec))
    memcpy(r.far, job.ranges + job.head.count, job.head.count * sizeof(iovec))
    r.near_at = 0
    r.near_n = job.head.count
    r.payload_left = job.head.nbytes
    r.arriving = job.arriving
    free(job)
    receive_payload(r, r.arriving)
    return True


cdef void kick_other(Rail *r) noexcept nogil:
    """Has another worker look for a copy to take up. Under the link's lock."""
    cdef Link *link = r.link
    cdef u32 i
    for i in range(link.rails_n):
        if link.rails[i].worker != r.worker and not link.rails[i].gone:
            kick(link.rails[i])
            return


# -- copying

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
    cdef u64 cut
    cdef u32 i = r.near_at, n = within(r.near + i, r.near_n - i, PULL_BYTES, &cut)
    r.far[i + n - 1].iov_len = r.near[i + n - 1].iov_len
    cdef ssize_t moved = process_vm_readv(r.link.pid, r.near + i, n, r.far + i, n, 0)
    if cut:
        r.near[i + n - 1].iov_len = r.far[i + n - 1].iov_len = cut
    return moved


cdef void spread(Worker *w) noexcept nogil:
    """Has the workers copy on different processors: woken up by one source they start on one."""
    cdef u32 here = <u32>(sched_getcpu() + 1), i
    cdef u64 now = now_ns()
    store32(&w.processor, here)
    if now < w.spin.moved_ns + MOVE_NS:
        return
    for i in range(w.index):
        if load32(&w.plane.workers[i].processor) == here:
            w.spin.moved_ns = now
            change_processor()
            store32(&w.processor, <u32>(sched_getcpu() + 1))
            return


cdef bint process_gone(Link *link) noexcept nogil:
    """Whether the process whose memory is copied has ended: its number may be another one's soon,
    while somebody else may have kept its connection (fork(2))."""
    cdef u64 now = now_ns()
    cdef pollfd p
    p.fd = link.pidfd
    p.events = POLLIN
    p.revents = 0
    if poll(&p, 1, 0) != 0:
        return True
    store64(&link.alive_ns, now)
    return False


cdef inline bint may_be_gone(Link *link) noexcept nogil:
    """The same, without a call to the kernel where the number cannot be another's yet."""
    return now_ns() > load64(&link.alive_ns) + ALIVE_NS and process_gone(link)


cdef bint source_lives(Rail *r) noexcept nogil:
    """Whether the source has lived and kept the rail open until now, and so its memory as it
    was."""
    cdef pollfd p
    p.fd = r.channel.fd
    p.events = POLLRDHUP
    p.revents = 0
    return poll(&p, 1, 0) == 0 and not may_be_gone(r.link)


cdef Moved pull(Rail *r) noexcept nogil:
    """One copy, inside the mark, if that is still allowed."""
    cdef char reason[TEXT_MAX]
    cdef ssize_t n = 0
    cdef bint revoked, gone = False
    if load32(&r.arriving.refused):
        throw_away(r)
        return MOVED
    if r.payload_left >= SPREAD_BYTES:
        spread(r.worker)
    enter(&r.worker.section, r.link, r.arriving.opening)
    revoked = is_revoked(r, r.arriving, reason)
    if not revoked:
        n = copy_mapped(r)
        if n == 0:
            gone = may_be_gone(r.link)
            if not gone:
                n = copy_foreign(r)
    leave(&r.worker.section)
    if gone:
        link_die(r.link, PROCESS_GONE, 0, NULL)
        return LOST
    if not revoked and n <= 0:
        revoked = True
        say_fault(r, last_errno(), reason)
    if revoked:
        revoke(r, r.arriving, reason)
        return MOVED
    add64(&r.plane.bytes_received, n)
    store64(&r.link.progress_ns, now_ns())
    read_moved(r)
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
