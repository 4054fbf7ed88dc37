# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint16_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.connections cimport set_interest
from te.core.frames cimport MOVED, WAITING, on_sending_failed, queue_frame, take_queued
from te.core.heap cimport need
from te.core.posix cimport iovec
from te.core.regions cimport Key, Snapshot
from te.core.sections cimport enter, leave
from te.core.sync cimport *
from te.core.wire cimport *
from te.core.worker cimport worker_wake
from te.transports.rdma.state cimport *


cdef Moved control_send(Connection *c) noexcept nogil:
    cdef iovec v
    cdef ssize_t moved
    if c.out_left == 0:
        control_of(c).sending_n = c.out_left = take_queued(c)
        if c.out_left == 0:
            return WAITING
        c.progress_ns = now_ns()
    v.iov_base = c.sending + (control_of(c).sending_n - c.out_left)
    v.iov_len = c.out_left
    moved = c.channel.ops.send(c.channel, &v, 1, True)
    if moved < 0:
        return on_sending_failed(c, -moved)
    c.progress_ns = now_ns()
    c.out_left -= moved
    return MOVED if c.out_left == 0 else WAITING


cdef Connection *control_lock(Link *link) noexcept nogil:
    cdef Connection *c = <Connection *>link.connections[0]
    pthread_mutex_lock(&link.lock)
    return c


cdef void control_unlock(Connection *c) noexcept nogil:
    pthread_mutex_unlock(&c.link.lock)
    if not load32(&c.gone) and not load32(&c.link.dead) and (c.queued_n or c.out_left):
        control_send(c)
        set_interest(c)


cdef void kick_qps(Link *link) noexcept nogil:
    add32(&direct_of(link).kicks, 1)
    worker_wake(worker_of(link))


cdef void queue_pieces(
    Connection *c, uint8_t kind, u64 rail, u64 epoch, PieceId *items, u32 n
) noexcept nogil:
    cdef Header h = header_of(kind, rail, epoch, 0)
    h.count = n
    queue_frame(c, &h, items, n * sizeof(PieceId))


cdef void queue_broken(Connection *c, u64 rail, u64 epoch, u32 why) noexcept nogil:
    cdef Header h = header_of(RAIL_BROKEN, rail, epoch, direct_of(c.link).fences)
    h.status = <uint8_t>why
    queue_frame(c, &h, NULL, 0)


cdef void queue_grant(Connection *c, u64 number, u64 mark) noexcept nogil:
    cdef Header h = header_of(ACK, number, mark, 0)
    h.status = GRANTED
    queue_frame(c, &h, NULL, 0)


cdef void queue_credit(Connection *c, u64 rail, u64 epoch, u64 marks) noexcept nogil:
    cdef Header h = header_of(CREDIT, rail, epoch, marks)
    queue_frame(c, &h, NULL, 0)


cdef void queue_abandon(Connection *c, u64 number, u64 tag, u64 pieces) noexcept nogil:
    cdef Header h = header_of(ABANDON, number, tag, pieces)
    queue_frame(c, &h, NULL, 0)


cdef void queue_table(Connection *c, RemoteRange *items, u32 n, uint16_t flags) noexcept nogil:
    cdef Header h = header_of(TABLE, 0, 0, 0)
    h.flags = flags
    h.count = n
    queue_frame(c, &h, items, n * sizeof(RemoteRange))


cdef RemoteRange *table_of(Snapshot *s, u32 asked, u32 *n) noexcept nogil:
    """Each range that a device calls by a key of its own, with the keys of those that allow some of
    what was asked for."""
    cdef RemoteRange *all
    cdef Key *key
    cdef u32 i, k, rights
    n[0] = 0
    for i in range(s.count):
        n[0] += s.regions[i].keys_n
    all = <RemoteRange *>need((n[0] + 1) * sizeof(RemoteRange))
    n[0] = 0
    for i in range(s.count):
        rights = s.regions[i].rights & REMOTE_RIGHTS
        for k in range(s.regions[i].keys_n if rights else 0):
            key = &s.regions[i].keys[k]
            all[n[0]].start, all[n[0]].end, all[n[0]].rights = key.start, key.end, rights
            if rights & asked:
                memcpy(all[n[0]].keys, key.rkeys, sizeof(key.rkeys))
            n[0] += 1
    return all


cdef void tell_table(Connection *c, u32 right) noexcept nogil:
    cdef Direct *d = direct_of(c.link)
    cdef RemoteRange *all = NULL
    cdef Snapshot *s
    cdef u32 i = 0, k, n = 0
    enter(&c.polled.worker.section, c.link, NULL)
    s = <Snapshot *>load_pointer(&c.link.plane.regions.now)
    if s.version != d.table_told or right & ~d.table_rights:
        d.table_told = s.version
        d.table_rights |= right
        all = table_of(s, d.table_rights, &n)
    leave(&c.polled.worker.section)
    if all == NULL:
        return
    while True:
        k = min(n - i, <u32>TABLE_MAX)
        queue_table(c, all + i, k, TABLE_FIRST if i == 0 else 0)
        i += k
        if i == n:
            break
    free(all)
