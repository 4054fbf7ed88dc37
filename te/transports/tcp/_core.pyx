# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# TCP: the source sends the bytes, and the kernel scatters them to where they belong.

from te.core.engine cimport Engine
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.landing cimport Landings, LandingProtocol, landing_protocol
from te.core.link cimport Ops
from te.core.sending cimport Streams, sending_ops
from te.core.wire cimport OVER_TCP, SEGMENT

cdef Ops OPS = sending_ops()
cdef LandingProtocol PROTOCOL = landing_protocol(OVER_TCP, SEGMENT)


cdef class TcpLink(LinkHandle):
    def __cinit__(self, Engine engine, bint is_incoming):
        self.make(engine, &OPS, is_incoming, need(sizeof(Streams)))

    def add_rail(self, int fd):
        return self.add(&PROTOCOL.frames, fd, -1, sizeof(Landings), -1)
