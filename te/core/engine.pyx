# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# Methods keep the interpreter lock unless they say otherwise: it is what makes callers one at a time.

cimport cython
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from te.core.heap cimport need
from te.core.link cimport Death, Link, Transfer, link_drop, links_tally
from te.core.notes cimport Note, box_take, note_free
from te.core.notices cimport bulletin_take, notice_take
from te.core.kinds cimport kind_of, KINDS_MAX
from te.core.plane cimport (
    CANCELLED, DONE, plane_close, plane_know, plane_open, plane_quiesce,
    plane_stage, plane_unstage,
)
from te.core.posix cimport eventfd_read, eventfd_write
from te.core.regions cimport *
from te.core.sections cimport WORKERS_MAX
from te.core.sync cimport *
from te.core.tags cimport *
from te.core.tally cimport CODES_MAX, Ledger, LEDGERS_MAX, Outcomes, Tally
from te.core.transfer cimport transfer_drop
from te.core.wire cimport RAILS_MAX
from te.core.worker cimport worker_work, workers_stop

import os

WORKERS_LIMIT = WORKERS_MAX

cdef enum:
    SUSPECT_NS = 250000000  # a piece of 1 MiB takes 84 ms at 100 Mbit/s


def numa_node(u64 address):
    return max(page_node(address), -1)


@cython.no_gc_clear
cdef class Engine:
    def __cinit__(
        self, u32 workers, double stall_s, double rail_s, double spin_s, u64 segment_bytes,
        u32 segment_blocks
    ):
        cdef int errnum
        cdef Plane *p = <Plane *>need(sizeof(Plane))
        self.p = p
        self.kinds = set()
        p.stall_ns = ns_of(stall_s)
        p.rail_ns = ns_of(rail_s)
        p.suspect_ns = min(p.rail_ns / 4, <u64>SUSPECT_NS)
        p.segment_bytes = segment_bytes
        p.segment_blocks = segment_blocks
        errnum = plane_open(p, workers, ns_of(spin_s))
        if errnum:
            raise OSError(errnum, f"no descriptor for an engine: {os.strerror(errnum)}")

    def __dealloc__(self):
        if self.p == NULL:
            return
        while take_notice(self.p) != NULL:
            pass
        self.events()
        plane_close(self.p)
        free(self.p)

    def work(self, u32 index):
        name_thread(f"te-worker-{index}".encode())
        with nogil:
            worker_work(&self.p.workers.of[index])

    def stop(self):
        workers_stop(&self.p.workers)

    # -- memory

    def add_region(
        self, u64 start, u64 end, u64 serial, object kind, u32 rights, bint is_shared,
        bytes keys=b""
    ):
        cdef Region *r = region_new(
            start, end, serial, kind_of(kind), rights, is_shared, <char *>keys, len(keys))
        if kind not in self.kinds and len(self.kinds) == KINDS_MAX:
            region_drop(r)
            raise ValueError(f"memory of more than {KINDS_MAX} kinds")
        self.kinds.add(kind)  # A region may be in use for longer than it is registered.
        plane_know(self.p, r.kind)
        region_put(&self.p.regions, r)

    def stage(self, u64 base, u64 nbytes, u64 slot_bytes):
        cdef int errnum = plane_stage(self.p, <void *>base, nbytes, slot_bytes)
        if errnum:
            raise ValueError(f"{nbytes} bytes make no slots of {slot_bytes} bytes, or too many")

    def unstage(self, double timeout_s):
        cdef u64 until = now_ns() + ns_of(timeout_s)
        cdef bint done
        with nogil:
            done = plane_unstage(self.p)
            while not done and look_later(until, LOOK_NS):
                done = plane_unstage(self.p)
        return done

    def remove_region(self, u64 serial, double timeout_s):
        cdef u64 until = now_ns() + ns_of(timeout_s)
        cdef Region *r = region_of(&self.p.regions, serial)
        cdef bint done, is_first = r != NULL and not r.is_leaving
        if r == NULL:
            return 0
        with nogil:
            await_readers(r, until)
        if load32(&r.readers):
            return load32(&r.readers)
        region_take(&self.p.regions, r)
        with nogil:
            done = plane_quiesce(self.p, NULL, NULL, r.start, r.end, until)
            if done:  # A peer's read may have begun: it looked before the region was gone.
                await_readers(r, until)
        if not done:
            return -1
        readers = load32(&r.readers)
        if readers and not is_first:
            return readers
        if readers:
            region_put(&self.p.regions, r)
        else:
            region_forget(&self.p.regions, r)
        return readers

    # -- tags

    def open_tag(self, u64 value, bytes peer=b"", ranges=None):
        cdef bint is_open = False, is_new
        cdef Identity identity
        cdef Range *kept = NULL
        cdef u64 n = 0
        if ranges is not None:
            n = len(<bytes>ranges) // sizeof(Range)
            kept = <Range *>need((n + 1) * sizeof(Range))
            memcpy(kept, <char *><bytes>ranges, n * sizeof(Range))
            n = ranges_normalise(kept, n)
            if n > RANGES_MAX:
                free(kept)
                raise ValueError(
                    f"a tag for {n} separate ranges; at most {RANGES_MAX} are allowed: give larger"
                    " ones, or none")
        cdef Opening *o = opening_new(value, kept, n)
        if peer:
            memset(&identity, 0, sizeof(identity))
            memcpy(&identity, <char *>peer, min(<size_t>len(peer), sizeof(identity)))
            opening_bind(o, &identity, <size_t>len(peer) == sizeof(identity))
        is_new = tag_open(&self.p.tags, o, &is_open)
        return is_new, is_open

    def arrived(self, u64 value):
        cdef Opening *o = opening_asked(&self.p.tags, value)
        cdef u64 count = 0 if o == NULL else load64(&o.count)
        opening_drop(o)
        return count

    def arrived_nbytes(self, u64 value):
        cdef Opening *o = opening_asked(&self.p.tags, value)
        cdef u64 nbytes = 0 if o == NULL else load64(&o.nbytes)
        opening_drop(o)
        return nbytes

    def revoke_tag(self, u64 value):
        cdef Opening *o = opening_asked(&self.p.tags, value)
        if o == NULL:
            return None
        store32(&o.is_open, 0)
        cdef Revocation revocation = Revocation.__new__(Revocation)
        revocation.o = o
        revocation.engine = self
        return revocation

    # -- what happens to links and transfers

    @property
    def events_fd(self):
        return self.p.notices.bulletins_fd

    def events(self):
        cdef u64 value
        cdef Link *k
        cdef list found = []
        eventfd_read(self.p.notices.bulletins_fd, &value)
        while True:
            k = <Link *>bulletin_take(&self.p.notices)
            if k == NULL:
                return found
            has_ended = load32(&k.has_ended) != 0 and not k.end_was_told
            k.end_was_told |= has_ended
            found.append((k.number, has_ended, *death_of(k)))
            with nogil:
                link_drop(k)

    def take_notes(self):
        cdef u64 dropped
        cdef Note *note = box_take(&self.p.notes, &dropped)
        cdef list found = []
        while note != NULL:
            peer = (<char *>&note.peer)[:sizeof(Identity)]
            found.append((peer, (<char *>(note + 1))[:note.nbytes]))
            note = note_free(note)
        return found, dropped

    def wait_notices(self):
        cdef u64 value
        cdef void *one
        cdef list found = []
        with nogil:
            eventfd_read(self.p.notices.notices_fd, &value)
        while True:
            one = take_notice(self.p)
            if one == NULL:
                return found
            found.append(<u64>one)

    def wake_notices(self):
        eventfd_write(self.p.notices.notices_fd, 1)

    @property
    def reply_blocks(self):
        return load64(&self.p.reply_blocks)

    def connections(self):
        cdef Plane *p = self.p
        return load64(&p.connections_out), load64(&p.connections_in)

    def tallies(self):
        cdef Ledger ledgers[LEDGERS_MAX]
        cdef Tally *one
        memset(ledgers, 0, sizeof(ledgers))
        with nogil:
            links_tally(self.p, ledgers)
        found = {}
        for i in range(LEDGERS_MAX):
            one = &ledgers[i].tally
            if ledgers[i].transport != NULL:
                found[ledgers[i].transport.decode()] = (
                    [(one.sent_nbytes[k], one.received_nbytes[k]) for k in range(RAILS_MAX)],
                    outcomes_of(&one.outcomes),
                    {k: one.ended[k] for k in range(CODES_MAX) if one.ended[k]})
        return found


cdef object outcomes_of(Outcomes *o):
    return (
        load64(&o.by_status[<u32>DONE]), load64(&o.by_status[<u32>CANCELLED]),
        {i: load64(&o.failed[i]) for i in range(CODES_MAX) if load64(&o.failed[i])},
        load64(&o.done_blocks), load64(&o.done_nbytes), load64(&o.landed), load64(&o.landed_nbytes))


cdef object death_of(Link *k):
    cdef Death *death = <Death *>load_pointer(&k.death)
    return death.code, death.errnum, (<bytes>death.text).decode("ascii", "replace")


cdef void *take_notice(Plane *p) noexcept:
    """The first transfer on the list, whose address is its name; its reference is dropped."""
    cdef Transfer *t = <Transfer *>notice_take(&p.notices)
    if t != NULL:
        transfer_drop(t)
    return t


cdef void withdraw(Plane *p, Opening *o) noexcept nogil:
    """Tells the owners of all links that the opening is for."""
    cdef Link *link
    pthread_mutex_lock(&p.lock)
    link = <Link *>p.links_first
    while link != NULL:
        if link.is_incoming and opening_admits(o, &link.peer):
            link.ops.revoke(link)
        link = link.after
    pthread_mutex_unlock(&p.lock)


cdef bint fence_opening(Plane *p, Opening *o, u64 until_ns) noexcept nogil:
    """It was revoked: True once nothing lands under it; False if that is not so in time, and then it can be called
    again."""
    if not plane_quiesce(p, NULL, o, 0, 0, until_ns):
        return False
    # Behind that nothing is granted any more. Who fences once more asks nobody again.
    if load32(&o.granted) and not swap32(&o.is_withdrawn, 1):
        withdraw(p, o)
    while load32(&o.granted):
        if not look_later(until_ns, LOOK_NS):
            return False
    return True


@cython.no_gc_clear
cdef class Revocation:
    def __dealloc__(self):
        opening_drop(self.o)

    def wait(self, double timeout_s):
        cdef bint done
        cdef u64 until = now_ns() + ns_of(timeout_s)
        with nogil:
            done = fence_opening(self.engine.p, self.o, until)
        return done

    def forget(self):
        opening_forget(&self.engine.p.tags, self.o)
        return load64(&self.o.count)
