# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# The format between engines as the plane has it (te/core/wire.h, and the rings of the same host): for docs/wire.md, the
# fuzzers and tests.

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy
from te.core.sync cimport u64
from te.core.wire cimport *
from te.transports.samehost.rings cimport RING_BYTES, RINGS_HEAD_BYTES, Ring

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
