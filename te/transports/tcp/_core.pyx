# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# TCP: the source sends the bytes, and the kernel scatters them to where they belong.

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from te.core.callers cimport kick_some, send_inline
from te.core.engine cimport Engine
from te.core.connections cimport connections_free
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.landing cimport *
from te.core.link cimport Link, Ops, Transfer, plain_ops
from te.core.sending cimport *
from te.core.staged cimport staged_receive, staged_settle, staged_turn
from te.core.wire cimport OVER_TCP, SEGMENT

cdef enum:
    INLINE_BYTES = 64 << 10


cdef void prepare(Transfer *t, const uint8_t *plan, size_t nbytes, bint is_shared) noexcept nogil:
    sending_prepare(t, SEGMENT, 0)


cdef void submit(Transfer *t) noexcept nogil:
    if not t.is_read and t.total <= INLINE_BYTES and not (<Sending *>t.own).is_staged:
        send_inline(t.link, 1)
    else:
        kick_some(t.link, t.total)


cdef void release(Link *link) noexcept nogil:
    connections_free(link)
    free(link.own)


cdef Ops OPS = plain_ops()
OPS.transfer_bytes = sizeof(Sending)
OPS.prepare = prepare
OPS.submit = submit
OPS.cancel = sending_cancel
OPS.unread = sending_unread
OPS.settled = sending_settled
OPS.release = release

cdef LandingProtocol PROTOCOL
PROTOCOL.frames.over = OVER_TCP
PROTOCOL.frames.load = sending_load
PROTOCOL.frames.sent = sending_sent
PROTOCOL.frames.received = landing_received
PROTOCOL.frames.right = landing_right
PROTOCOL.frames.may_land = landing_may_land
PROTOCOL.frames.refuse = landing_refuse
PROTOCOL.frames.moved = landing_moved
PROTOCOL.frames.landed = landing_landed
PROTOCOL.frames.copy = staged_receive
PROTOCOL.frames.turn = staged_turn
PROTOCOL.frames.settle = staged_settle
PROTOCOL.frames.part = landing_part
PROTOCOL.frames.leave = sending_leave
PROTOCOL.reply = SEGMENT


cdef class TcpLink(LinkHandle):
    def __cinit__(self, Engine engine, bint is_incoming):
        self.make(engine, &OPS, is_incoming, need(sizeof(Streams)))

    def add_rail(self, int fd):
        return self.add(&PROTOCOL.frames, fd, -1, sizeof(Landings), -1)
