# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy, strerror
from te.core.channels cimport channel_receive
from te.core.frames cimport LOST, MOVED, WAITING, frame_begin, leave_to_worker, on_received, queue_answer
from te.core.inbound cimport *
from te.core.kinds cimport TOUCHED_BY_KERNEL
from te.core.link cimport *
from te.core.payload cimport (
    AT_COPY, AT_DISCARD, AT_HEAD, AT_PAYLOAD, AT_PLACE, AT_TRAILER, Payload, payload_of, Stand,
)
from te.core.plane cimport plane_stages
from te.core.posix cimport EFAULT
from te.core.regions cimport *
from te.core.sections cimport enter, leave
from te.core.sending cimport fail_read, read_returned
from te.core.staged cimport *
from te.core.staging cimport Slot, SLOT_HELD
from te.core.sync cimport *
from te.core.tally cimport count
from te.core.vectors cimport advance
from te.core.wire cimport *


# -- what becomes of transfers

cdef void refuse(Connection *c, Arriving *a, const char *reason) noexcept nogil:
    if arriving_refuse(a):
        tell_refused(c, a, reason)


cdef void tell_refused(Connection *c, Arriving *a, const char *reason) noexcept nogil:
    """The reply to a read ends the read here, too."""
    queue_answer(c, a.id, REFUSED, reason)
    if a.is_reply:
        fail_read(c.link, a.tag, reason)


cdef bint landing_refuse(Connection *c, const char *reason) noexcept nogil:
    if not link_lock(c.link, c.polled.worker):
        return False
    refuse(c, payload_of(c).arriving, reason)
    pthread_mutex_unlock(&c.link.lock)
    return True


cdef void landing_finish(Connection *c, Arriving *a) noexcept nogil:
    cdef char reason[TEXT_MAX]
    cdef bint is_good = not a.spoiled and not a.abandoned
    if a.refused:
        pass
    elif not is_good:
        queue_answer(c, a.id, ABANDONED, b"")
    elif not arriving_count(c.link, &c.polled.worker.section, a, reason):
        refuse(c, a, reason)
    else:
        queue_answer(c, a.id, LANDED, b"")
    if a.is_reply and not a.refused:
        read_returned(c, a.tag, a.arrived, is_good)
    arriving_forget(c.link, a)


cdef void landing_moved(Connection *c, u64 nbytes) noexcept nogil:
    cdef Arriving *a = payload_of(c).arriving
    count(&c.flow.received_nbytes, nbytes)
    if a.is_reply:
        store64(&a.opening.progress_ns, load64(&c.link.progress_ns))


cdef bint landing_landed(Connection *c, bint is_good) noexcept nogil:
    cdef Payload *p = payload_of(c)
    cdef Arriving *a = p.arriving
    cdef u64 nbytes = c.head.nbytes
    if not link_lock(c.link, c.polled.worker):
        return False
    p.stand = AT_HEAD
    p.arriving = NULL
    if staged_is_open(c):
        nbytes -= staged_end(c)
        a.staged_frames -= 1
    a.arrived += nbytes
    if not is_good:
        a.spoiled = True
    if a.is_reply:
        store64(&c.link.progress_ns, now_ns())
    if is_whole(a):
        landing_finish(c, a)
    pthread_mutex_unlock(&c.link.lock)
    return True


cdef void landing_part(Connection *c, Part *part) noexcept nogil:
    cdef Arriving *a = <Arriving *>part.of
    cdef char reason[TEXT_MAX]
    if part.fault == 0:
        count(&c.flow.received_nbytes, part.nbytes)
    store64(&c.link.progress_ns, now_ns())
    pthread_mutex_lock(&c.link.lock)
    a.arrived += part.nbytes
    if part.fault:
        snprintf(
            reason, TEXT_MAX, b"registered memory cannot be written: %s", strerror(part.fault))
        refuse(c, a, reason)
    elif a.is_reply:
        store64(&a.opening.progress_ns, load64(&c.link.progress_ns))
    if is_whole(a):
        landing_finish(c, a)
    pthread_mutex_unlock(&c.link.lock)


# -- a payload begins

cdef bint must_stage(Connection *c) noexcept nogil:
    """Whether some of the ranges, all registered, are none that the kernel can write."""
    cdef Payload *p = payload_of(c)
    cdef Snapshot *s = <Snapshot *>load_pointer(&c.link.plane.regions.now)
    cdef u64 end
    cdef u32 i, k
    for i in range(p.local_n):
        end = <u64>p.local[i].iov_base + p.local[i].iov_len
        k = regions_above(s.regions, s.count, <u64>p.local[i].iov_base) - 1
        while k < s.count and s.regions[k].start < end:
            if not s.regions[k].kind.touched_by & TOUCHED_BY_KERNEL:
                return True
            k += 1
    return False


cdef void landing_expect(Connection *c, Arriving *a) noexcept nogil:
    payload_of(c).arriving = a
    payload_of(c).stand = AT_PLACE


cdef bint landing_begin(Connection *c, bint *is_good) noexcept nogil:
    cdef Payload *p = payload_of(c)
    cdef Arriving *a = p.arriving
    cdef char reason[TEXT_MAX]
    cdef bint is_staged = False
    is_good[0] = False
    if load32(&a.refused):
        return True
    enter(&c.polled.worker.section, c.link, NULL)
    is_good[0] = is_placed(c.link, a, &p.place, p.local, p.local_n, reason)
    if is_good[0] and plane_stages(c.link.plane):
        is_staged = must_stage(c)
    leave(&c.polled.worker.section)
    if not is_good[0]:
        return landing_refuse(c, reason)
    if is_staged:
        landing_stage(c, a)
    p.stand = AT_COPY if is_staged else AT_PAYLOAD
    return True


cdef void landing_stage(Connection *c, Arriving *a) noexcept nogil:
    staged_expect(c, a)
    pthread_mutex_lock(&c.link.lock)
    a.staged_frames += 1
    pthread_mutex_unlock(&c.link.lock)


cdef bint landing_may_land(Connection *c, char *reason) noexcept nogil:
    cdef Payload *p = payload_of(c)
    return may_land(
        c.link, p.arriving, &p.place, p.local + p.local_at, p.local_n - p.local_at, reason)


# -- it comes

cdef void throw_away(Connection *c) noexcept nogil:
    cdef Payload *p = payload_of(c)
    p.discard_left = p.left
    p.left = 0
    p.tail_have = 0
    p.stand = AT_DISCARD


cdef void expect_trailer(Connection *c) noexcept nogil:
    cdef Payload *p = payload_of(c)
    p.tail_have = 0
    p.drained = False
    p.stand = AT_TRAILER


cdef Moved land(Connection *c) noexcept nogil:
    """One call that writes registered memory, inside the worker's section, if that is still allowed.
    It also takes the trailer and the next header, which saves two calls a frame."""
    cdef Payload *p = payload_of(c)
    cdef char reason[TEXT_MAX]
    cdef ssize_t n = 0
    cdef u64 landed, wanted = p.left + sizeof(p.tail)
    cdef Moved state
    cdef bint good
    p.local[p.local_n].iov_base = p.tail
    p.local[p.local_n].iov_len = sizeof(p.tail)
    enter(&c.polled.worker.section, c.link, p.arriving.opening)
    good = landing_may_land(c, reason)
    if good:
        n = c.channel.ops.receive(
            c.channel, p.local + p.local_at, p.local_n + 1 - p.local_at, False)
    leave(&c.polled.worker.section)
    if n == -EFAULT:
        good = False
        snprintf(reason, TEXT_MAX, b"registered memory cannot be written: Bad address")
    if not good:
        if not landing_refuse(c, reason):
            return leave_to_worker(c)
        throw_away(c)
        return MOVED
    state = on_received(c, n, wanted)
    if n <= 0:
        return state
    landed = min(<u64>n, p.left)
    p.left -= landed
    landing_moved(c, landed)
    if p.left:
        p.local_at = advance(p.local, p.local_at, landed)
        return state
    p.stand = AT_TRAILER
    p.tail_have = <u32>(n - landed)
    p.drained = state == WAITING
    return MOVED


cdef Moved read_trailer(Connection *c) noexcept nogil:
    """Takes the trailer of a frame, and the next header if that has come with it."""
    cdef Payload *p = payload_of(c)
    cdef ssize_t n
    cdef Moved state = WAITING if p.drained else MOVED
    cdef u64 fault
    if p.tail_have < TRAILER_BYTES:
        n = channel_receive(c.channel, p.tail + p.tail_have, sizeof(p.tail) - p.tail_have)
        state = on_received(c, n, sizeof(p.tail) - p.tail_have)
        if n <= 0:
            return state
        p.tail_have += <u32>n
        if p.tail_have < TRAILER_BYTES:
            return state
    memcpy(&fault, p.tail, TRAILER_BYTES)
    if not landing_landed(c, fault == 0):
        return leave_to_worker(c)
    frame_begin(c, p.tail + TRAILER_BYTES, p.tail_have - TRAILER_BYTES)
    return MOVED if c.lead_have >= sizeof(Header) else state


cdef Moved discard(Connection *c) noexcept nogil:
    cdef Payload *p = payload_of(c)
    cdef uint8_t scratch[16384]
    cdef u64 wanted = min(p.discard_left, sizeof(scratch))
    cdef ssize_t n = channel_receive(c.channel, scratch, wanted)
    if n > 0:
        p.discard_left -= n
        if p.discard_left == 0:
            expect_trailer(c)
    return on_received(c, n, wanted)


# -- through slots

cdef bint landing_push(Connection *c, u64 nbytes) noexcept nogil:
    cdef Payload *p = payload_of(c)
    cdef char reason[TEXT_MAX]
    cdef void *opening = p.arriving.opening
    cdef bint good
    p.staged.have += nbytes
    nbytes = p.staged.have
    enter(&c.polled.worker.section, c.link, opening)
    good = landing_may_land(c, reason)
    if good:
        staged_scatter(c, p.local + p.local_at, opening)
    leave(&c.polled.worker.section)
    if not good:
        staged_return(c)
        landing_refuse(c, reason)
    elif p.left:
        p.local_at = advance(p.local, p.local_at, nbytes)
    return good


cdef bint give_way(Connection *c) noexcept nogil:
    """Nothing comes just now: if others wait for a slot, this one goes; False if what is in it must not
    land."""
    cdef Payload *p = payload_of(c)
    cdef Slot *slot = p.staged.into.last
    if slot == NULL or load32(&slot.state) != SLOT_HELD or not staged_is_scarce(c):
        return True
    if p.staged.have:
        return landing_push(c, 0)
    staged_return(c)
    return True


cdef Moved receive_staged(Connection *c) noexcept nogil:
    cdef Payload *p = payload_of(c)
    cdef Slot *slot = staged_slot(c)
    cdef Moved state
    cdef ssize_t n
    cdef size_t wanted
    cdef bint good = True
    if slot == NULL:
        return WAITING
    wanted = min(staged_slot_bytes(c) - p.staged.have, p.left)
    n = channel_receive(c.channel, slot.base + p.staged.have, wanted)
    state = on_received(c, n, wanted)
    if state == LOST:
        return LOST
    if n > 0:
        p.left -= n
        if <size_t>n == wanted:
            good = landing_push(c, n)
        else:
            p.staged.have += n
    if good and p.left and state == WAITING:
        good = give_way(c)
    if p.left == 0:
        expect_trailer(c)
    elif not good:
        throw_away(c)
    else:
        return state
    return MOVED


cdef Moved place(Connection *c) noexcept nogil:
    cdef bint is_good
    if not landing_begin(c, &is_good):
        return leave_to_worker(c)
    if not is_good:
        throw_away(c)
    return land(c) if payload_of(c).stand == AT_PAYLOAD else MOVED


cdef Moved landing_receive(Connection *c) noexcept nogil:
    cdef Stand stand = payload_of(c).stand
    if stand == AT_PLACE:
        return place(c)
    if stand == AT_PAYLOAD:
        return land(c)
    if stand == AT_TRAILER:
        return read_trailer(c)
    if stand == AT_DISCARD:
        return discard(c)
    return receive_staged(c)
