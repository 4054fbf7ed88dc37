# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.string cimport memset
from te.core.kinds cimport Copy, Direction, FROM_HOST, Kind, KINDS_MAX, TO_HOST, WITHIN
from te.core.posix cimport E2BIG, EAGAIN, EINVAL, EMSGSIZE, EOPNOTSUPP
from te.core.sync cimport (
    add32, load32, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock, store32, u32, u64,
)


cdef int staging_open(Staging *s, void *base, u64 nbytes, u64 slot_bytes) noexcept nogil:
    cdef u64 n = 0 if slot_bytes == 0 else nbytes / slot_bytes
    cdef u32 i
    if not 0 < n <= SLOTS_MAX:
        return EINVAL
    memset(s, 0, sizeof(Staging))
    pthread_mutex_init(&s.lock, NULL)
    s.slot_bytes = slot_bytes
    s.slots_n = s.free_n = <u32>n
    for i in range(s.slots_n):
        s.slots[i].base = <uint8_t *>base + i * slot_bytes
    return 0


cdef bint staging_close(Staging *s) noexcept nogil:
    staging_poll(s)
    if load32(&s.copying):
        return False
    pthread_mutex_destroy(&s.lock)
    return True


# -- slots and lanes

cdef void set_free(Staging *s, Slot *slot) noexcept nogil:
    """Under the lock."""
    slot.is_orphan = False
    store32(&slot.state, SLOT_FREE)
    s.free_n += 1


cdef void stop_waiting(Staging *s, Lane *lane) noexcept nogil:
    """Under the lock."""
    cdef Lane **at = &s.waiting
    cdef Lane *before = NULL
    if not lane.is_waiting:
        return
    while at[0] != lane:
        before = at[0]
        at = &before.after
    at[0] = lane.after
    if s.waiting_last == lane:
        s.waiting_last = before
    lane.after = NULL
    lane.is_waiting = False


cdef void start_waiting(Staging *s, Lane *lane) noexcept nogil:
    """Under the lock."""
    if lane.is_waiting:
        return
    lane.is_waiting = True
    if s.waiting == NULL:
        s.waiting = lane
    else:
        s.waiting_last.after = lane
    s.waiting_last = lane


cdef Slot *find_free(Staging *s) noexcept nogil:
    """Under the lock, when there is one."""
    cdef u32 i = 0
    while load32(&s.slots[i].state) != SLOT_FREE:
        i += 1
    return &s.slots[i]


cdef Slot *lane_take(Staging *s, Lane *lane) noexcept nogil:
    cdef Slot *slot = NULL
    pthread_mutex_lock(&s.lock)
    if s.free_n and (s.waiting == NULL or s.waiting == lane):
        stop_waiting(s, lane)
        slot = find_free(s)
        s.free_n -= 1
        slot.nbytes = 0
        slot.fault = 0
        slot.next = NULL
        slot.is_foreign = False
        store32(&slot.state, SLOT_HELD)
    else:
        start_waiting(s, lane)
    pthread_mutex_unlock(&s.lock)
    if slot == NULL:
        return NULL
    if lane.first == NULL:
        lane.first = slot
    else:
        lane.last.next = slot
    lane.last = slot
    lane.held += 1
    return slot


cdef void lane_leave(Staging *s, Lane *lane) noexcept nogil:
    pthread_mutex_lock(&s.lock)
    stop_waiting(s, lane)
    pthread_mutex_unlock(&s.lock)


cdef void lane_give(Staging *s, Lane *lane) noexcept nogil:
    cdef Slot *slot = lane.first
    lane.first = slot.next
    if lane.first == NULL:
        lane.last = NULL
    lane.held -= 1
    pthread_mutex_lock(&s.lock)
    set_free(s, slot)
    pthread_mutex_unlock(&s.lock)


cdef void lane_return(Staging *s, Lane *lane) noexcept nogil:
    cdef Slot *slot = lane.last
    cdef Slot *before = lane.first
    if before == slot:
        lane_give(s, lane)
        return
    while before.next != slot:
        before = before.next
    before.next = NULL
    lane.last = before
    lane.held -= 1
    pthread_mutex_lock(&s.lock)
    set_free(s, slot)
    pthread_mutex_unlock(&s.lock)


cdef void lane_drop(Staging *s, Lane *lane) noexcept nogil:
    cdef Slot *slot = lane.first
    pthread_mutex_lock(&s.lock)
    stop_waiting(s, lane)
    while slot != NULL:
        if load32(&slot.state) == SLOT_COPYING:
            slot.is_orphan = True
        else:
            set_free(s, slot)
        slot = slot.next
    pthread_mutex_unlock(&s.lock)
    lane.first = lane.last = NULL
    lane.held = 0


cdef void *staging_next(Staging *s) noexcept nogil:
    cdef void *owner = NULL
    pthread_mutex_lock(&s.lock)
    if s.free_n and s.waiting != NULL:
        owner = s.waiting.owner
    pthread_mutex_unlock(&s.lock)
    return owner


cdef void staging_skip(Staging *s) noexcept nogil:
    pthread_mutex_lock(&s.lock)
    if s.waiting != NULL:
        stop_waiting(s, s.waiting)
    pthread_mutex_unlock(&s.lock)


cdef bint staging_is_scarce(Staging *s) noexcept nogil:
    cdef bint is_scarce
    pthread_mutex_lock(&s.lock)
    is_scarce = s.free_n == 0 and s.waiting != NULL
    pthread_mutex_unlock(&s.lock)
    return is_scarce


# -- copies

cdef int check_spans(Staging *s, const Span *spans, u32 n, u64 *total) noexcept nogil:
    cdef u32 i
    total[0] = 0
    if n > SPANS_MAX:
        return E2BIG
    for i in range(n):
        if spans[i].nbytes > s.slot_bytes - total[0]:
            return EMSGSIZE
        total[0] += spans[i].nbytes
        if spans[i].kind.ops == NULL:
            return EOPNOTSUPP
    return 0 if total[0] else EINVAL


cdef int begin_batch(
    Slot *slot, Kind *kind, const Copy *copies, u32 n, Direction direction
) noexcept nogil:
    cdef Batch *batch = &slot.batches[slot.batches_n]
    cdef int problem
    if slot.batches_n == KINDS_MAX:
        return E2BIG
    problem = kind.ops.copy(kind.state, copies, n, direction, &batch.event)
    if problem == 0:
        batch.kind = kind
        slot.batches_n += 1
    return problem


cdef int begin_copies(
    Slot *slot, const Span *spans, u32 n, Kind *kind, Direction direction
) noexcept nogil:
    """Begins the copies between the slot and those spans that are of the kind."""
    cdef Copy copies[SPANS_MAX]
    cdef uint8_t *at = slot.base
    cdef u32 i, k = 0
    for i in range(n):
        if spans[i].kind == kind and spans[i].nbytes:
            copies[k].dst = at if direction == TO_HOST else spans[i].at
            copies[k].src = spans[i].at if direction == TO_HOST else at
            copies[k].nbytes = spans[i].nbytes
            k += 1
        at += spans[i].nbytes
    if k == 0:
        return 0
    return begin_batch(slot, kind, copies, k, direction)


cdef bint is_first_of_kind(const Span *spans, u32 i) noexcept nogil:
    cdef u32 k
    for k in range(i):
        if spans[k].kind == spans[i].kind:
            return False
    return True


cdef void set_copying(Staging *s, Slot *slot, u64 nbytes, void *link, void *opening) noexcept nogil:
    pthread_mutex_lock(&s.lock)
    s.begun += 1
    slot.number = s.begun
    slot.link, slot.opening = link, opening
    slot.nbytes = nbytes
    slot.batches_n = 0
    slot.is_begun = False
    store32(&slot.state, SLOT_COPYING)
    add32(&s.copying, 1)
    pthread_mutex_unlock(&s.lock)


cdef void set_begun(Staging *s, Slot *slot, int problem) noexcept nogil:
    pthread_mutex_lock(&s.lock)
    slot.fault = problem
    slot.is_begun = True
    end_copy(s, slot)
    pthread_mutex_unlock(&s.lock)


cdef void begin_copy(
    Staging *s, Slot *slot, const Span *spans, u32 n, void *link, void *opening, Direction direction
) noexcept nogil:
    cdef u64 total
    cdef int problem = check_spans(s, spans, n, &total)
    cdef u32 i = 0
    set_copying(s, slot, total, link, opening)
    # Without the lock: a driver may take its time to accept a batch, and who fences must not wait
    # for that longer than it wants to.
    while problem == 0 and i < n:
        if is_first_of_kind(spans, i):
            problem = begin_copies(slot, spans, n, spans[i].kind, direction)
        i += 1
    set_begun(s, slot, problem)


cdef void slot_gather(
    Staging *s, Slot *slot, const Span *spans, u32 n, void *link, void *opening
) noexcept nogil:
    begin_copy(s, slot, spans, n, link, opening, TO_HOST)


cdef void slot_scatter(
    Staging *s, Slot *slot, const Span *spans, u32 n, void *link, void *opening
) noexcept nogil:
    begin_copy(s, slot, spans, n, link, opening, FROM_HOST)


cdef void slot_move(
    Staging *s, Slot *slot, Kind *kind, const Copy *copies, u32 n, u64 nbytes, void *link, void *opening
) noexcept nogil:
    set_copying(s, slot, nbytes, link, opening)
    set_begun(s, slot, begin_batch(slot, kind, copies, n, WITHIN))


cdef bint end_copy(Staging *s, Slot *slot) noexcept nogil:
    """Ends a slot's copy if all batches of it are over, also when one has failed: until then the
    others still touch the memory. Under the lock."""
    cdef Batch *batch
    cdef u32 i = 0
    cdef int answer
    if load32(&slot.state) != SLOT_COPYING or not slot.is_begun:
        return False
    while i < slot.batches_n:
        batch = &slot.batches[i]
        answer = batch.kind.ops.query(batch.kind.state, batch.event)
        if answer == EAGAIN:
            i += 1
            continue
        batch.kind.ops.release(batch.kind.state, batch.event)
        if slot.fault == 0:
            slot.fault = answer
        slot.batches_n -= 1
        batch[0] = slot.batches[slot.batches_n]
    if slot.batches_n:
        return False
    if slot.is_orphan:
        set_free(s, slot)
    else:
        store32(&slot.state, SLOT_COPIED)
    add32(&s.ended, 1)
    add32(&s.copying, -1)
    return True


cdef u32 staging_copying(Staging *s) noexcept nogil:
    return load32(&s.copying)


cdef u32 staging_count_ended(Staging *s) noexcept nogil:
    return load32(&s.ended)


cdef u32 staging_poll(Staging *s) noexcept nogil:
    cdef u32 i, ended = 0
    if load32(&s.copying) == 0:
        return 0
    pthread_mutex_lock(&s.lock)
    for i in range(s.slots_n):
        ended += end_copy(s, &s.slots[i])
    pthread_mutex_unlock(&s.lock)
    return ended


cdef u64 staging_mark(Staging *s) noexcept nogil:
    pthread_mutex_lock(&s.lock)
    cdef u64 mark = s.begun
    pthread_mutex_unlock(&s.lock)
    return mark


cdef bint staging_ended(Staging *s, u64 mark, void *link, void *opening) noexcept nogil:
    cdef Slot *slot
    cdef bint ended = True
    cdef u32 i
    pthread_mutex_lock(&s.lock)
    for i in range(s.slots_n):
        slot = &s.slots[i]
        end_copy(s, slot)
        if load32(&slot.state) == SLOT_COPYING and slot.number <= mark and (
            link == NULL or slot.link == link
        ) and (opening == NULL or slot.opening == opening):
            ended = False
    pthread_mutex_unlock(&s.lock)
    return ended
