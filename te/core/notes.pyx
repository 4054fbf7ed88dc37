# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.heap cimport need, need_more
from te.core.sync cimport (
    add32, add64, load64, lock_as_caller, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_trylock, pthread_mutex_unlock, store_pointer,
)
from te.core.wire cimport NOTE, NOTE_PART_MAX, header_of


cdef inline uint8_t *bytes_of(Note *note) noexcept nogil:
    return <uint8_t *>(note + 1)


cdef inline bint has_room(u64 notes, u64 nbytes, u64 more_nbytes) noexcept nogil:
    """Whether a link may have one note more than so many."""
    return notes < LANE_NOTES_MAX and nbytes + more_nbytes <= LANE_BYTES_MAX


cdef Note *note_free(Note *note) noexcept nogil:
    cdef Note *next = note.next
    add64(&note.lane.kept, -1)
    add64(&note.lane.kept_nbytes, -<int64_t>note.nbytes)
    lane_drop(note.lane)
    free(note)
    return next


# -- what has come

cdef void box_open(Box *box) noexcept nogil:
    pthread_mutex_init(&box.lock, NULL)


cdef void box_close(Box *box) noexcept nogil:
    cdef Note *note = box.first
    while note != NULL:
        note = note_free(note)
    pthread_mutex_destroy(&box.lock)


cdef Note *box_take(Box *box, u64 *dropped) noexcept:
    cdef Note *all
    lock_as_caller(&box.lock)
    all = box.first
    box.first = NULL
    box.nbytes = 0
    dropped[0] = box.dropped
    pthread_mutex_unlock(&box.lock)
    return all


cdef void box_put(Box *box, Lane *lane, Note *note) noexcept nogil:
    """Takes the note over. Whoever sends more than is taken loses what is too much, and nobody else
    does, unless all together are too many."""
    cdef bint fits
    pthread_mutex_lock(&box.lock)
    fits = has_room(load64(&lane.kept), load64(&lane.kept_nbytes), note.nbytes) and (
        box.nbytes + note.nbytes <= BOX_BYTES_MAX)
    if fits:
        note.lane = lane
        add32(&lane.refs, 1)
        add64(&lane.kept, 1)
        add64(&lane.kept_nbytes, note.nbytes)
        box.nbytes += note.nbytes
        if box.first == NULL:
            box.first = note
        else:
            box.last.next = note
        box.last = note
    else:
        box.dropped += 1
    pthread_mutex_unlock(&box.lock)
    if not fits:
        free(note)


# -- links

cdef Lane *lane_new() noexcept nogil:
    cdef Lane *lane = <Lane *>need(sizeof(Lane))
    pthread_mutex_init(&lane.lock, NULL)
    lane.refs = 1
    return lane


cdef void lane_drop(Lane *lane) noexcept nogil:
    cdef Note *note
    if add32(&lane.refs, -1):
        return
    while lane.first != NULL:
        note = lane.first
        lane.first = note.next
        free(note)
    free(lane.coming)
    pthread_mutex_destroy(&lane.lock)
    free(lane)


cdef bint lane_put(Lane *lane, const uint8_t *data, u64 nbytes) noexcept:
    cdef Note *note
    cdef bint fits
    lock_as_caller(&lane.lock)
    fits = has_room(lane.waiting, lane.waiting_nbytes, nbytes)
    if fits:
        note = <Note *>need(sizeof(Note) + nbytes)
        note.nbytes = nbytes
        memcpy(bytes_of(note), data, nbytes)
        lane.waiting += 1
        lane.waiting_nbytes += nbytes
        if lane.first == NULL:
            store_pointer(&lane.first, note)
        else:
            lane.last.next = note
        lane.last = note
    pthread_mutex_unlock(&lane.lock)
    return fits


cdef bint lane_take(Lane *lane, bint waits, Header *h, uint8_t *part) noexcept nogil:
    cdef Note *note
    if pthread_mutex_trylock(&lane.lock):
        if not waits:
            return False
        pthread_mutex_lock(&lane.lock)
    note = lane.first
    if note != NULL:
        if lane.parted == 0:
            lane.number += 1
        h[0] = header_of(NOTE, lane.number, 0, note.nbytes)
        h.count = <u32>min(note.nbytes - lane.parted, <u64>NOTE_PART_MAX)
        memcpy(part, bytes_of(note) + lane.parted, h.count)
        lane.parted += h.count
        if lane.parted == note.nbytes:
            lane.parted = 0
            lane.waiting -= 1
            lane.waiting_nbytes -= note.nbytes
            store_pointer(&lane.first, note.next)
            free(note)
    pthread_mutex_unlock(&lane.lock)
    return note != NULL


cdef const char *lane_came(
    Lane *lane, Box *box, const Identity *peer, const Header *h, const uint8_t *part
) noexcept nogil:
    cdef const char *problem
    # A peer that breaks the protocol may send parts over several connections at once.
    pthread_mutex_lock(&lane.lock)
    problem = take_part(lane, box, peer, h, part)
    pthread_mutex_unlock(&lane.lock)
    return problem


cdef const char *take_part(
    Lane *lane, Box *box, const Identity *peer, const Header *h, const uint8_t *part
) noexcept nogil:
    cdef Note *note = lane.coming
    if lane.have == 0:
        if h.transfer <= lane.last_number:
            return b"a note comes after a later one"
        lane.last_number = h.transfer
    elif h.transfer != lane.last_number or h.total != note.nbytes:
        return b"a note begins in the middle of another one"
    if h.count > h.total - lane.have:
        return b"a note is longer than it says"
    if note == NULL or lane.have + h.count > lane.room:
        # Room is made as the bytes come: a peer that only promises them costs nothing.
        lane.room = min(h.total, max(lane.have + h.count, 2 * lane.have))
        note = <Note *>need_more(note, sizeof(Note) + lane.room)
        lane.coming = note
    memcpy(bytes_of(note) + lane.have, part, h.count)
    lane.have += h.count
    note.nbytes = h.total
    if lane.have == h.total:
        note.next = NULL
        note.lane = NULL
        note.peer = peer[0]
        lane.coming = NULL
        lane.have = lane.room = 0
        box_put(box, lane, note)
    return NULL
