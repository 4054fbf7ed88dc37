# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, strerror
from te.core.frames cimport AT_COPY, AT_HEAD, LOST, MOVED, WAITING, queue_frame
from te.core.heap cimport need
from te.core.landing cimport *
from te.core.link cimport ENDED, PROCESS_GONE, link_die
from te.core.posix cimport POLLIN, POLLRDHUP, poll, pollfd, process_vm_readv
from te.core.sections cimport enter, leave
from te.core.staged cimport (
    staged_is_open, staged_push, staged_receive, staged_slot, staged_slot_bytes,
)
from te.core.staging cimport Slot
from te.core.sync cimport *
from te.core.vectors cimport advance, within
from te.core.wire cimport ACK, Block, PROGRESS, PULL, TEXT_MAX, header_of
from te.core.worker cimport polled_kick, worker_spread

cdef enum:
    PULLS_TOLD = 4  # frames copied between two words of it: each may wake the source up
    PULL_BYTES = 4 << 20  # of one copy, which is one section
    SPREAD_BYTES = 256 << 10  # smaller copies are over before another thread has woken up
    JOBS_MAX = 64
    # How long a process that was seen alive is copied from unasked (to ask costs 2 us, and 0.5 us
    # for its nonce): before its number is given out again, 32,768 others are made and end, at 15 us
    # each at best.
    ALIVE_NS = 1000000


cdef inline Samehost *own_of(Connection *c) noexcept nogil:
    return <Samehost *>c.link.own


# -- sharing the work among the link's workers, whichever connection it came by

cdef void pulling_pull(Connection *c, Arriving *a) noexcept nogil:
    cdef Pulling *p = <Pulling *>c.own
    cdef Block *blocks = <Block *>c.body
    cdef u32 i
    for i in range(c.head.count):
        p.remote[i].iov_base = <void *>blocks[i].src
        p.remote[i].iov_len = blocks[i].nbytes
    if c.head.nbytes >= SPREAD_BYTES and c.link.connections_n > 1:
        job_put(c, a)
    else:
        begin_copy(c, a)


cdef void begin_copy(Connection *c, Arriving *a) noexcept nogil:
    c.place = AT_COPY
    if not landing_begin(c, a):
        end_copy(c)


cdef void end_copy(Connection *c) noexcept nogil:
    """It is done, or must not be."""
    c.place = AT_HEAD
    pulling_landed(c, True)


cdef void job_put(Connection *c, Arriving *a) noexcept nogil:
    cdef Samehost *own = own_of(c)
    cdef u32 n = c.head.count
    cdef Job *job = <Job *>need(sizeof(Job) + 2 * n * sizeof(iovec))
    job.head = c.head
    job.arriving = a
    memcpy(job.ranges, c.local, n * sizeof(iovec))
    memcpy(job.ranges + n, (<Pulling *>c.own).remote, n * sizeof(iovec))
    pthread_mutex_lock(&c.link.lock)
    if own.jobs == NULL:
        own.jobs = job
    else:
        own.jobs_last.next = job
    own.jobs_last = job
    if add32(&own.jobs_n, 1) > 1:
        kick_other(c)
    pthread_mutex_unlock(&c.link.lock)


cdef bint pulling_has_work(Connection *c) noexcept nogil:
    return load32(&own_of(c).jobs_n) != 0


cdef bint pulling_take_up(Connection *c, bint is_idle) noexcept nogil:
    """Takes up the next copy; False if there is none. While frames come, they are read first, as
    far as there is room for what they ask."""
    cdef Samehost *own = own_of(c)
    cdef Job *job
    if load32(&own.jobs_n) < (1 if is_idle else <u32>JOBS_MAX):
        return False
    pthread_mutex_lock(&c.link.lock)
    job = own.jobs
    if job != NULL:
        own.jobs = job.next
        if add32(&own.jobs_n, -1):
            kick_other(c)
    pthread_mutex_unlock(&c.link.lock)
    if job == NULL:
        return False
    c.head = job.head
    memcpy(c.local, job.ranges, job.head.count * sizeof(iovec))
    memcpy((<Pulling *>c.own).remote, job.ranges + job.head.count, job.head.count * sizeof(iovec))
    c.local_at = 0
    c.local_n = job.head.count
    c.payload_left = job.head.nbytes
    begin_copy(c, job.arriving)
    free(job)
    return True


cdef void kick_other(Connection *c) noexcept nogil:
    """Has another worker look for a copy to take up. Under the link's lock."""
    cdef Connection *other
    cdef u32 i
    for i in range(c.link.connections_n):
        other = <Connection *>c.link.connections[i]
        if other.polled.worker != c.polled.worker and not other.gone:
            polled_kick(&other.polled)
            return


cdef void forget_jobs(Samehost *own) noexcept nogil:
    cdef Job *job
    while own.jobs != NULL:
        job = own.jobs
        own.jobs = job.next
        free(job)
    store32(&own.jobs_n, 0)


# -- copying

cdef Mapping *mapping_of(Samehost *own, u64 address, u64 nbytes) noexcept nogil:
    """The mapping that has the range, if this process has mapped that memory of the source."""
    cdef Mapping *m = <Mapping *>load_pointer(&own.mappings)
    while m != NULL:
        if m.start <= address and address < m.end and nbytes <= m.end - address:
            return m
        m = m.next
    return NULL


cdef ssize_t copy_mapped(Connection *c, iovec *remote, uint8_t *slot, u64 most) noexcept nogil:
    """Copies the next ranges that lie in mapped memory, so much at most, to where they belong or
    into a slot; 0 if there are none."""
    cdef Mapping *m
    cdef u64 done = 0, n, src
    cdef u32 i = c.local_at
    while i < c.local_n and done < most:
        src = <u64>remote[i].iov_base
        n = min(<u64>c.local[i].iov_len, most - done)
        m = mapping_of(own_of(c), src, n)
        if m == NULL:
            break
        memcpy(
            c.local[i].iov_base if slot == NULL else slot + done, m.here + (src - m.start), n)
        done += n
        if n < c.local[i].iov_len:
            break
        i += 1
    return done


cdef ssize_t copy_foreign(Connection *c, iovec *remote, uint8_t *slot, u64 most) noexcept nogil:
    """The same by process_vm_readv(2), of any memory; -1 and errno when none could be read; 0 if it
    is not that of the process that was greeted.

    The nonce is read behind them by the same call, which looks into one address space: that of the
    number has changed if the process has run another program (execve(2)). Of small copies that is
    a fifth (0.45 of 2.3 us for 4 KiB), so they are believed for as long as ALIVE_NS.
    """
    cdef Samehost *own = own_of(c)
    cdef uint8_t *seen = (<Pulling *>c.own).seen
    cdef u64 cut, wanted, now = now_ns()
    cdef u32 i = c.local_at, n = within(c.local + i, c.local_n - i, most, &cut), local_n = n
    cdef iovec *local = c.local + i
    cdef iovec *local_end = local + n
    cdef iovec *remote_end = remote + i + n
    cdef iovec local_kept = local_end[0], remote_kept = remote_end[0]
    cdef iovec room[2]
    cdef ssize_t moved
    cdef bint looks
    (remote_end - 1).iov_len = (local_end - 1).iov_len
    wanted = nbytes_of(local, n)
    looks = wanted >= SPREAD_BYTES or now > load64(&own.nonce_ns) + ALIVE_NS
    if slot != NULL:
        room[0].iov_base, room[0].iov_len = slot, wanted
        local, local_n = room, 1
    local[local_n].iov_base, local[local_n].iov_len = seen, NONCE_BYTES
    remote_end.iov_base, remote_end.iov_len = <void *>own.nonce_at, NONCE_BYTES
    moved = process_vm_readv(own.pid, local, local_n + looks, remote + i, n + looks, 0)
    local_end[0], remote_end[0] = local_kept, remote_kept
    if cut:
        (local_end - 1).iov_len = (remote_end - 1).iov_len = cut
    if moved < 0 or not looks:
        return moved
    if <u64>moved < wanted:  # It stopped in the middle.
        return moved if nonce_read(own, seen) and is_nonce(own, seen) else 0
    if <u64>moved != wanted + NONCE_BYTES or not is_nonce(own, seen):
        return 0
    store64(&own.nonce_ns, now)
    return <ssize_t>wanted


cdef inline u64 nbytes_of(iovec *v, u32 n) noexcept nogil:
    cdef u64 total = 0
    cdef u32 k
    for k in range(n):
        total += v[k].iov_len
    return total


cdef inline bint is_nonce(Samehost *own, uint8_t *seen) noexcept nogil:
    return memcmp(seen, own.nonce, NONCE_BYTES) == 0


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


cdef inline bint may_be_gone(Samehost *own) noexcept nogil:
    """The same, without a call to the kernel where the number cannot be another's yet."""
    return now_ns() > load64(&own.alive_ns) + ALIVE_NS and process_gone(own)


cdef bint source_lives(Connection *c) noexcept nogil:
    """Whether the source has lived and kept the connection open until now, and so its memory as it
    was."""
    cdef pollfd p
    p.fd = c.channel.fd
    p.events = POLLRDHUP
    p.revents = 0
    return poll(&p, 1, 0) == 0 and not may_be_gone(own_of(c))


cdef Moved pulling_copy(Connection *c) noexcept nogil:
    """One copy, inside a section, if that is still allowed."""
    cdef Pulling *p = <Pulling *>c.own
    cdef Arriving *a = p.landings.arriving
    cdef char reason[TEXT_MAX]
    cdef uint8_t *into = NULL
    cdef u64 most = PULL_BYTES
    cdef Slot *slot
    cdef ssize_t n = 0
    cdef bint good, gone = False
    if c.head.kind != PULL:
        return staged_receive(c)
    if load32(&a.refused):
        end_copy(c)
        return MOVED
    if staged_is_open(c):
        slot = staged_slot(c)
        if slot == NULL:
            return WAITING
        into, most = slot.base, staged_slot_bytes(c)
    if c.payload_left >= SPREAD_BYTES:
        worker_spread(c.polled.worker)
    enter(&c.polled.worker.section, c.link, a.opening)
    good = landing_may_land(c, reason)
    if good:
        n = copy_mapped(c, p.remote, into, most)
        if n == 0:
            gone = may_be_gone(own_of(c))
            if not gone:
                n = copy_foreign(c, p.remote, into, most)
                gone = n == 0
    leave(&c.polled.worker.section)
    if gone:
        link_die(c.link, PROCESS_GONE, 0, NULL)
        return LOST
    if good and n <= 0:
        good = False
        say_fault(c, last_errno(), reason)
    if not good:
        landing_refuse(c, reason)
        end_copy(c)
        return MOVED
    return copied(c, n, into != NULL)


cdef Moved copied(Connection *c, u64 n, bint is_staged) noexcept nogil:
    """So much more has landed, or is in a slot."""
    store64(&c.link.progress_ns, now_ns())
    c.payload_left -= n
    if c.payload_left:
        advance((<Pulling *>c.own).remote, c.local_at, n)
    if is_staged:
        if not staged_push(c, n):
            end_copy(c)
            return MOVED
    else:
        add64(&c.link.plane.bytes_received, n)
        landing_moved(c, n)
        if c.payload_left:
            c.local_at = advance(c.local, c.local_at, n)
    if c.payload_left:
        return MOVED
    if not source_lives(c):
        # It may have used the memory for something else already: this must not count.
        link_die(c.link, ENDED, 0, b" in the middle of a transfer")
        return LOST
    end_copy(c)
    return MOVED


cdef void say_fault(Connection *c, int errnum, char *reason) noexcept nogil:
    """Which side's memory it was that could not be accessed."""
    cdef char byte
    cdef iovec local
    cdef iovec remote = (<Pulling *>c.own).remote[c.local_at]
    local.iov_base = &byte
    local.iov_len = remote.iov_len = 1
    if process_vm_readv(own_of(c).pid, &local, 1, &remote, 1, 0) == 1:
        snprintf(reason, TEXT_MAX, b"registered memory cannot be written: %s", strerror(errnum))
    else:
        snprintf(reason, TEXT_MAX, b"the source memory cannot be read: %s", strerror(errnum))


cdef void pulling_landed(Connection *c, bint is_good) noexcept nogil:
    cdef Arriving *a = (<Pulling *>c.own).landings.arriving
    cdef u64 number = a.id
    cdef bint is_counted = c.head.kind == PULL and not load32(&a.refused)
    landing_landed(c, is_good)
    if is_counted:
        tell_progress(c, number)


cdef void tell_progress(Connection *c, u64 number) noexcept nogil:
    """Tells the source now and then how far the copying is, so that it sends more frames. What is
    not told when the connection turns to another transfer is less than a source is ahead."""
    cdef Pulling *p = <Pulling *>c.own
    cdef Header h
    if p.told_of != number:
        p.told_of = number
        p.told_nbytes = p.told_n = 0
    p.told_nbytes += c.head.nbytes
    p.told_n += 1
    if p.told_n == PULLS_TOLD:
        h = header_of(ACK, number, 0, 0)
        h.status = PROGRESS
        h.nbytes = p.told_nbytes
        queue_frame(c, &h, NULL, 0)
        p.told_nbytes = p.told_n = 0
