# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy, strerror
from te.core.frames cimport LOST, MOVED, TAKEN, WAITING, leave_to_worker, queue_frame
from te.core.heap cimport need
from te.core.inbound cimport Arriving
from te.core.kinds cimport Copy, Kind
from te.core.landing cimport *
from te.core.link cimport ENDED, PROCESS_GONE, link_die, link_kick, rails_of
from te.core.payload cimport AT_COPY, AT_HEAD, Payload
from te.core.posix cimport EFAULT, iovec, process_read, process_vm_readv
from te.core.receiving cimport receiving_read
from te.core.sections cimport enter, leave, section_within
from te.core.staged cimport (
    Part, staged_done, staged_gather, staged_gathered, staged_is_gathering, staged_is_open, staged_move,
    staged_slot, staged_slot_bytes,
)
from te.core.staging cimport Slot, SPANS_MAX
from te.core.sync cimport *
from te.core.vectors cimport advance, within
from te.core.wire cimport ACK, BLOCKS_MAX, Block, Header, PROGRESS, PULL, TEXT_MAX, header_of
from te.core.worker cimport (
    Runner, Worker, may_wait, polled_kick, runner_go_on, runner_wait, worker_give, worker_spread,
    worker_take,
)
from te.transports.samehost.alive cimport (
    ALIVE_NS, is_nonce, may_be_gone, nonce_read, source_lives,
)
from te.transports.samehost.mappings cimport (
    bytes_before_kinds, is_kinds, mapped_copies, mapping_at, mapping_has,
)
from te.transports.samehost.state cimport Job, Mapping, NONCE_BYTES, Pulling, Samehost

cdef enum:
    PULLS_TOLD = 4  # frames copied between two words of it: each may wake the source up
    PULL_BYTES = 4 << 20  # of one copy, which is one section
    SPREAD_BYTES = 256 << 10  # smaller copies are over before another thread has woken up
    JOBS_MAX = 64


cdef inline Samehost *own_of(Connection *c) noexcept nogil:
    return <Samehost *>c.link.own


cdef inline Pulling *pulling_of(Connection *c) noexcept nogil:
    return <Pulling *>c.own


# -- sharing the work among the link's workers, whichever connection it came by

cdef void pull(Connection *c, Arriving *a) noexcept nogil:
    cdef Pulling *p = pulling_of(c)
    cdef Block *blocks = <Block *>c.body
    cdef u32 i
    for i in range(c.head.count):
        p.remote[i].iov_base = <void *>blocks[i].src
        p.remote[i].iov_len = blocks[i].nbytes
    if c.head.nbytes >= SPREAD_BYTES and rails_of(c.link) > 1:
        job_put(c, a)
    else:
        begin_copy(c, a)


cdef void begin_copy(Connection *c, Arriving *a) noexcept nogil:
    cdef bint good
    landing_expect(c, a)
    landing_begin(c, &good)
    pulling_of(c).payload.stand = AT_COPY
    if not good:
        end_copy(c)


cdef void end_copy(Connection *c) noexcept nogil:
    """It is done, or must not be."""
    cdef Arriving *a = pulling_of(c).payload.arriving
    cdef u64 number = a.id
    cdef bint is_counted = not load32(&a.refused)
    landing_landed(c, True)
    if is_counted:
        tell_progress(c, number)


cdef void job_put(Connection *c, Arriving *a) noexcept nogil:
    cdef Samehost *own = own_of(c)
    cdef u32 n = c.head.count
    cdef Job *job = <Job *>need(sizeof(Job) + 2 * n * sizeof(iovec))
    job.head = c.head
    job.arriving = a
    memcpy(job.ranges, pulling_of(c).payload.local, n * sizeof(iovec))
    memcpy(job.ranges + n, pulling_of(c).remote, n * sizeof(iovec))
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


cdef bint take_up(Connection *c, bint is_idle) noexcept nogil:
    """Takes up the next copy; False if there is none. While frames come, they are read first, as
    far as there is room for what they ask."""
    cdef Samehost *own = own_of(c)
    cdef Pulling *p = pulling_of(c)
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
    memcpy(p.payload.local, job.ranges, job.head.count * sizeof(iovec))
    memcpy(p.remote, job.ranges + job.head.count, job.head.count * sizeof(iovec))
    p.payload.local_at = 0
    p.payload.local_n = job.head.count
    p.payload.left = job.head.nbytes
    begin_copy(c, job.arriving)
    free(job)
    return True


cdef void kick_other(Connection *c) noexcept nogil:
    """Has another worker look for a copy to take up. Under the link's lock."""
    cdef Connection *other
    cdef u32 i
    for i in range(rails_of(c.link)):
        other = <Connection *>c.link.connections[i]
        if other.polled.worker != c.polled.worker and not load32(&other.gone):
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

cdef ssize_t copy_mapped(Connection *c, iovec *remote, uint8_t *slot, u64 most) noexcept nogil:
    """Copies the next ranges that lie in mapped memory, so much at most, to where they belong or
    into a slot; 0 if there are none."""
    cdef Payload *p = &pulling_of(c).payload
    cdef Mapping *m
    cdef u64 done = 0, n, src
    cdef u32 i = p.local_at
    while i < p.local_n and done < most:
        src = <u64>remote[i].iov_base
        n = min(<u64>p.local[i].iov_len, most - done)
        m = mapping_at(own_of(c), src)
        if m == NULL or m.kind != NULL or n > m.end - src or not mapping_has(m, src - m.start, n):
            break
        memcpy(
            p.local[i].iov_base if slot == NULL else slot + done, m.here + (src - m.start), n)
        done += n
        if n < p.local[i].iov_len:
            break
        i += 1
    return done


cdef bint is_the_same(Samehost *own, uint8_t *seen) noexcept nogil:
    return nonce_read(own, seen) and is_nonce(own, seen)


cdef ssize_t copy_foreign(Connection *c, iovec *remote, uint8_t *slot, u64 most) noexcept nogil:
    """The same by process_vm_readv(2), of any memory; -1 and errno when none could be read; 0 if it
    is not that of the process that was greeted.

    Nothing shall land of another program (execve(2)). So the nonce is read in front of the ranges, by
    the same call, which looks into one address space: where it is not mapped the call reads nothing.
    Where something else is, that is seen by a look of its own, before; of small copies that would be a
    fifth (0.45 of 2.3 us for 4 KiB), so they do without for as long as ALIVE_NS.
    """
    cdef Samehost *own = own_of(c)
    cdef Payload *p = &pulling_of(c).payload
    cdef uint8_t *seen = pulling_of(c).seen
    cdef iovec near[BLOCKS_MAX + 1]
    cdef iovec far[BLOCKS_MAX + 1]
    cdef u64 cut, wanted, now = now_ns()
    cdef u32 i = p.local_at, n = within(p.local + i, p.local_n - i, most, &cut), near_n = n + 1
    cdef ssize_t moved
    memcpy(near + 1, p.local + i, n * sizeof(iovec))
    memcpy(far + 1, remote + i, n * sizeof(iovec))
    far[n].iov_len = near[n].iov_len
    if cut:
        p.local[i + n - 1].iov_len = cut
    wanted = nbytes_of(near + 1, n)
    if slot != NULL:
        near[1].iov_base, near[1].iov_len = slot, wanted
        near_n = 2
    near[0].iov_base, near[0].iov_len = seen, NONCE_BYTES
    far[0].iov_base, far[0].iov_len = <void *>own.nonce_at, NONCE_BYTES
    if wanted >= SPREAD_BYTES or now > load64(&own.nonce_ns) + ALIVE_NS:
        if not is_the_same(own, seen):
            return 0
    moved = process_vm_readv(own.pid, near, near_n, far, n + 1, 0)
    if moved < NONCE_BYTES or not is_nonce(own, seen):
        return 0
    store64(&own.nonce_ns, now)
    if moved == NONCE_BYTES:
        set_errno(EFAULT)
        return -1
    return moved - NONCE_BYTES


cdef inline u64 nbytes_of(iovec *v, u32 n) noexcept nogil:
    cdef u64 total = 0
    cdef u32 k
    for k in range(n):
        total += v[k].iov_len
    return total


cdef Moved copy(Connection *c) noexcept nogil:
    """One copy, inside a section, if that is still allowed."""
    cdef Pulling *p = pulling_of(c)
    cdef Arriving *a = p.payload.arriving
    cdef char reason[TEXT_MAX]
    cdef uint8_t *into = NULL
    cdef u64 most = PULL_BYTES
    cdef Runner *me = c.polled.worker.runner
    cdef Slot *slot
    cdef ssize_t n = 0
    cdef bint good
    if load32(&c.is_away):
        note_wait(c)
        return held_up(c)
    if p.has_moved:
        return moved_foreign(c)
    if staged_is_gathering(c):
        return gathered(c)
    c.is_held_up = False
    if load32(&a.refused):
        end_copy(c)
        return MOVED
    if by_kind(c):
        return copy_by_kind(c)
    if staged_is_open(c):
        slot = staged_slot(c)
        if slot == NULL:
            return WAITING
        into, most = slot.base, staged_slot_bytes(c)
    if p.payload.left >= SPREAD_BYTES:
        worker_spread(c.polled.worker)
    enter(&me.section, c.link, a.opening)
    good = landing_may_land(c, reason)
    if good:
        most = min(most, bytes_before_kinds(c, p.remote))
        if most == 0:  # A kind has just mapped it.
            leave(&me.section)
            return MOVED
        n = copy_mapped(c, p.remote, into, most)
        if n == 0:
            return wait_for_copy(c, me, into, most)
    leave(&me.section)
    if not good:
        landing_refuse(c, reason)
        end_copy(c)
        return MOVED
    return copied(c, n, into != NULL)


cdef Moved wait_for_copy(Connection *c, Runner *me, uint8_t *into, u64 most) noexcept nogil:
    """Copies out of the source's memory, which may not answer for long, or ever (userfaultfd(2), a file
    system of its own). So the worker's turn is given up meanwhile, and if it takes long another
    thread takes the worker over: TAKEN. That one has the connection then, and finds what came of the
    copy. Inside the section of this thread, which it leaves: a fence waits for it, and for it alone."""
    cdef Pulling *p = pulling_of(c)
    cdef Worker *w = c.polled.worker
    cdef bint is_patient = c.channel.is_patient, is_ours
    if load32(&own_of(c).waits) or not may_wait(c.polled.worker.all):
        leave(&me.section)
        return held_up(c)
    c.channel.is_patient = False
    store32(&c.is_away, 1)
    say_where(c, me, into, most)
    runner_wait(w.all, me)
    worker_give(w)
    p.moved = 0 if may_be_gone(own_of(c)) else copy_foreign(c, p.remote, into, most)
    if p.moved < 0:
        p.errnum = last_errno()
        p.is_own_fault = can_be_read(c)
    section_within(&me.section, 0, 0)
    leave(&me.section)
    is_ours = runner_go_on(me)
    worker_take(w)
    p.has_moved = True
    store32(&c.is_away, 0)
    if not is_ours:
        come_back(c)
        return TAKEN
    c.channel.is_patient = is_patient
    return moved_foreign(c)


cdef void say_where(Connection *c, Runner *me, uint8_t *into, u64 most) noexcept nogil:
    """What is written: some of the ranges at most, or a slot."""
    cdef Payload *p = &pulling_of(c).payload
    cdef u64 start = <u64>into, end = start + most
    cdef u32 i
    if into == NULL:
        start, end = <u64>p.local[p.local_at].iov_base, 0
        for i in range(p.local_at, p.local_n):
            start = min(start, <u64>p.local[i].iov_base)
            end = max(end, <u64>p.local[i].iov_base + p.local[i].iov_len)
    section_within(&me.section, start, end)


cdef void note_wait(Connection *c) noexcept nogil:
    """By the thread that has taken the worker over from one that waits for the source's memory."""
    cdef Pulling *p = pulling_of(c)
    cdef Samehost *own = own_of(c)
    if p.is_noted:
        return
    p.is_noted = True
    if add32(&own.waits, 1) == 1:
        store64(&own.waits_since_ns, now_ns())
        polled_kick(c.link.connections[0])  # The link's owner has a deadline now.


cdef Moved held_up(Connection *c) noexcept nogil:
    """It goes on when the source's memory has answered; but not once the source has left."""
    c.is_held_up = True
    if not c.channel.hung_up:
        return WAITING
    link_die(c.link, ENDED, 0, b" in the middle of a transfer")
    return LOST


cdef void come_back(Connection *c) noexcept nogil:
    """By the thread that has waited, as the last that it does here; gives up the worker's turn."""
    cdef Pulling *p = pulling_of(c)
    if p.is_noted:
        p.is_noted = False
        add32(&own_of(c).waits, -1)
    link_kick(c.link)
    worker_give(c.polled.worker)


cdef Moved moved_foreign(Connection *c) noexcept nogil:
    """What came of `copy_foreign`."""
    cdef Pulling *p = pulling_of(c)
    cdef char reason[TEXT_MAX]
    cdef const char *what = b"the source memory cannot be read"
    p.has_moved = c.is_held_up = False
    if p.moved == 0:
        link_die(c.link, PROCESS_GONE, 0, NULL)
        return LOST
    if p.moved < 0:
        if p.is_own_fault:
            what = b"registered memory cannot be written"
        snprintf(reason, TEXT_MAX, b"%s: %s", what, strerror(p.errnum))
        landing_refuse(c, reason)
        end_copy(c)
        return MOVED
    return copied(c, p.moved, staged_is_open(c))


cdef bint by_kind(Connection *c) noexcept nogil:
    """Whether what comes next is memory that a kind has mapped."""
    cdef bint found
    if load32(&own_of(c).has_kinds) == 0:
        return False
    enter(&c.polled.worker.section, c.link, NULL)
    found = is_kinds(own_of(c), <u64>pulling_of(c).remote[pulling_of(c).payload.local_at].iov_base)
    leave(&c.polled.worker.section)
    return found


cdef Moved copy_by_kind(Connection *c) noexcept nogil:
    """Begins one copy by the kind that has mapped the memory: at once to where it belongs, if that is
    memory of the same kind, else into a slot."""
    cdef Pulling *p = pulling_of(c)
    cdef Arriving *a = p.payload.arriving
    cdef char reason[TEXT_MAX]
    cdef bint good
    if may_be_gone(own_of(c)):
        link_die(c.link, PROCESS_GONE, 0, NULL)
        return LOST
    if not staged_is_open(c):
        landing_stage(c, a)
    if staged_slot(c) == NULL:
        return WAITING
    enter(&c.polled.worker.section, c.link, a.opening)
    good = landing_may_land(c, reason)
    if good:
        good = begin_by_kind(c, reason)
    leave(&c.polled.worker.section)
    if not good:
        landing_refuse(c, reason)
        end_copy(c)
        return MOVED
    store64(&c.link.progress_ns, now_ns())
    if staged_is_gathering(c):
        return WAITING
    if p.payload.left == 0:
        end_copy(c)
    return MOVED


cdef bint begin_by_kind(Connection *c, char *reason) noexcept nogil:
    """Inside the section; False, with a reason, if the memory is not mapped any more."""
    cdef Copy copies[SPANS_MAX]
    cdef Pulling *p = pulling_of(c)
    cdef void *opening = p.payload.arriving.opening
    cdef Kind *kind
    cdef bint is_direct
    cdef u64 nbytes
    cdef u32 n = mapped_copies(
        c, p.remote, copies, SPANS_MAX, staged_slot_bytes(c), &kind, &is_direct, &nbytes)
    if n == 0:
        snprintf(reason, TEXT_MAX, b"the source memory is mapped no more")
        return False
    if not is_direct:
        staged_gather(c, kind, copies, n, opening)
        return True
    staged_move(c, kind, copies, n, nbytes, opening)
    p.payload.left -= nbytes
    if p.payload.left:
        advance(p.remote, p.payload.local_at, nbytes)
        p.payload.local_at = advance(p.payload.local, p.payload.local_at, nbytes)
    return True


cdef Moved gathered(Connection *c) noexcept nogil:
    """Whether a slot has what was copied into it."""
    cdef char reason[TEXT_MAX]
    cdef Slot *slot = staged_gathered(c)
    if slot == NULL:
        return WAITING
    if slot.fault:
        snprintf(reason, TEXT_MAX, b"the source memory cannot be read: %s", strerror(slot.fault))
        landing_refuse(c, reason)
    if load32(&pulling_of(c).payload.arriving.refused):
        end_copy(c)
        return MOVED
    return copied(c, slot.nbytes, True)


cdef void pulling_settle(Connection *c) noexcept nogil:
    cdef Part part
    while staged_done(c, &part):
        if load32(&own_of(c).has_kinds) and part.fault == 0 and not source_lives(c):
            # As behind a copy by the processor: it may have used the memory for something else already.
            link_die(c.link, ENDED, 0, b" in the middle of a transfer")
        else:
            landing_part(c, &part)


cdef Moved copied(Connection *c, u64 n, bint is_staged) noexcept nogil:
    """So much more has landed, or is in a slot."""
    cdef Pulling *p = pulling_of(c)
    store64(&c.link.progress_ns, now_ns())
    p.payload.left -= n
    if p.payload.left:
        advance(p.remote, p.payload.local_at, n)
    if is_staged:
        if not landing_push(c, n):
            end_copy(c)
            return MOVED
    else:
        landing_moved(c, n)
        if p.payload.left:
            p.payload.local_at = advance(p.payload.local, p.payload.local_at, n)
    if p.payload.left:
        return MOVED
    if not source_lives(c):
        # It may have used the memory for something else already: this must not count.
        link_die(c.link, ENDED, 0, b" in the middle of a transfer")
        return LOST
    end_copy(c)
    return MOVED


cdef bint can_be_read(Connection *c) noexcept nogil:
    """Whether it was not the source's memory that could not be accessed."""
    cdef char byte
    cdef iovec remote = pulling_of(c).remote[pulling_of(c).payload.local_at]
    return process_read(own_of(c).pid, <u64>remote.iov_base, &byte, 1) == 1


cdef void tell_progress(Connection *c, u64 number) noexcept nogil:
    """Tells the source now and then how far the copying is, so that it sends more frames. What is
    not told when the connection turns to another transfer is less than a source is ahead."""
    cdef Pulling *p = pulling_of(c)
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


# -- the protocol

cdef Moved read(Connection *c, bint answers_only) noexcept nogil:
    """Reads on with a frame, and begins what it asks for."""
    cdef Arriving *a
    cdef Moved state = receiving_read(c, answers_only, &a)
    if a == NULL:
        return state
    pull(c, a)
    return state if pulling_of(c).payload.stand == AT_HEAD else MOVED


cdef Moved pulling_receive(Connection *c, bint answers_only) noexcept nogil:
    cdef Payload *p = &pulling_of(c).payload
    cdef Moved state
    if answers_only:
        return read(c, True) if p.stand == AT_HEAD else leave_to_worker(c)
    if p.stand == AT_COPY and c.head.kind == PULL:
        return copy(c)
    if p.stand == AT_HEAD and not c.has_head and take_up(c, False):
        return MOVED
    state = landing_receive(c) if p.stand != AT_HEAD else read(c, False)
    # Also behind the payload of a frame that came after that of a copy: nobody else would take it up.
    if state == WAITING and p.stand == AT_HEAD and not c.has_head and take_up(c, True):
        return MOVED
    return state
