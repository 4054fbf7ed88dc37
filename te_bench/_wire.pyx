# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# The format between engines as the plane has it (te/core/wire.h, the rings of the same host, and encrypted records over
# TCP): for docs/wire.md, the fuzzers and tests.

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy
from te.core.channels cimport Channel, channel_moved
from te.core.posix cimport EPOLLIN, iovec
from te.core.sync cimport u32, u64
from te.core.wire cimport *
from te.transports.samehost.rings cimport RING_BYTES, RINGS_HEAD_BYTES, Ring
from te.transports.tcp.encryption cimport SECRET_BYTES, encrypted_new

import os

cdef extern from "core/wire.h" nogil:
    ctypedef struct Bounds:
        u64 least, most
        const char *means
        uint8_t floor
    ctypedef struct FrameRule:
        const char *name
        const char *variant
        uint8_t source, destination, item, has_payload
        Bounds *bounds
        const char *says
    ctypedef struct Member:
        const char *name
        size_t offset, nbytes, length
        const char *means
    ctypedef struct Layout:
        const char *name
        size_t nbytes
        Member *members
    enum:
        FIRST_KIND, KINDS, VARIANTS, H_STATUS, H_FIELDS, LAYOUTS
    const FrameRule **FRAME_RULES
    const Layout *LAYOUT_TABLE


cdef str text_of(const char *text):
    return "" if text == NULL else text.decode("ascii")


def frame_rules():
    cdef const FrameRule *rule
    cdef const Bounds *b
    found = []
    for kind in range(KINDS):
        for variant in range(VARIANTS):
            rule = &FRAME_RULES[kind][variant]
            if rule.name == NULL:
                break
            bounds = []
            for field in range(H_STATUS, H_FIELDS):
                b = &rule.bounds[field]
                bounds.append((b.least, b.most, b.floor, text_of(b.means)))
            found.append((
                FIRST_KIND + kind, text_of(rule.name), text_of(rule.variant), rule.source,
                rule.destination, rule.item, bool(rule.has_payload), text_of(rule.says), bounds,
            ))
    return found


def frame_layouts():
    cdef const Layout *one
    cdef const Member *m
    found = []
    for i in range(LAYOUTS):
        one = &LAYOUT_TABLE[i]
        members = []
        for k in range(8):
            m = &one.members[k]
            if m.name != NULL:
                members.append((text_of(m.name), m.offset, m.nbytes, m.length, text_of(m.means)))
        found.append((text_of(one.name), one.nbytes, members))
    return found


def frame_limits():
    return {
        "RAILS_MAX": RAILS_MAX, "NICS_MAX": NICS_MAX, "BLOCKS_MAX": BLOCKS_MAX,
        "SEGMENT_BYTES_MAX": SEGMENT_BYTES_MAX, "TRAILER_BYTES": TRAILER_BYTES,
        "REASON_MAX": REASON_MAX, "PIECES_MAX": PIECES_MAX, "POSTED_MAX": POSTED_MAX,
        "TABLE_MAX": TABLE_MAX, "TABLE_RANGES_MAX": TABLE_RANGES_MAX, "ANY_RAIL": ANY_RAIL,
        "TABLE_FIRST": TABLE_FIRST, "FLAG_REPLY": FLAG_REPLY,
        "BEGUN_MAX": BEGUN_MAX, "ARRIVING_MAX": ARRIVING_MAX,
        "READS_SERVED_MAX": READS_SERVED_MAX, "RECEIVES": RECEIVES,
        "NOTE_PART_MAX": NOTE_PART_MAX, "NOTE_MAX": NOTE_MAX,
    }


def check_frame(bytes header, int over, bint from_source):
    cdef Header h
    cdef char text[TEXT_MAX]
    cdef int64_t nbytes
    if len(header) != sizeof(Header):
        raise ValueError(f"{len(header)} bytes are not a header of {sizeof(Header)}")
    memcpy(&h, <char *>header, sizeof(Header))
    nbytes = check_header(&h, over, from_source, text, TEXT_MAX)
    return text_of(text) if nbytes < 0 else nbytes


def ring_limits():
    return {
        "RING_BYTES": RING_BYTES, "RINGS_HEAD_BYTES": RINGS_HEAD_BYTES,
        "RING_HEAD_BYTES": sizeof(Ring),
    }


def ring_layout():
    cdef Ring r
    return {
        "head": <char *>&r.head - <char *>&r,
        "tail": <char *>&r.tail - <char *>&r,
        "reader_asleep": <char *>&r.reader_asleep - <char *>&r,
        "writer_asleep": <char *>&r.writer_asleep - <char *>&r,
    }


cdef class Records:
    cdef Channel *c

    def __cinit__(self, int fd, bytes out, bytes into, u64 rekey_records=0):
        cdef int errnum
        assert len(out) == len(into) == SECRET_BYTES
        self.c = encrypted_new(
            fd, <const uint8_t *><char *>out, <const uint8_t *><char *>into, rekey_records, &errnum)
        if self.c == NULL:
            raise OSError(errnum, f"cannot encrypt: {os.strerror(errnum)}")

    def __dealloc__(self):
        if self.c != NULL:
            self.c.ops.free(self.c)

    @property
    def ready(self):
        return channel_moved(self.c, EPOLLIN)

    def send(self, data, bint own=True):
        return self._moved(self.c.ops.send, data, PyBUF_SIMPLE, own)

    def receive(self, room, bint own=True):
        return self._moved(self.c.ops.receive, room, PyBUF_WRITABLE, own)

    cdef _moved(
        self, ssize_t (*move)(Channel *, iovec *, u32, bint) noexcept nogil, buffer, int how, bint own
    ):
        # Not a memoryview of Cython's: 20,000 lines of C, and six times as long to compile.
        cdef Py_buffer view
        cdef iovec v
        cdef ssize_t moved
        PyObject_GetBuffer(buffer, &view, how)
        v.iov_base, v.iov_len = view.buf, view.len
        moved = move(self.c, &v, 1, own)
        PyBuffer_Release(&view)
        if moved < 0:
            raise OSError(<int>-moved, os.strerror(<int>-moved))
        return moved
