# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# TCP: the source sends the bytes, and the kernel scatters them to where they belong.

from te.core.engine cimport Engine
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.landing cimport Landings, LandingProtocol, landing_protocol
from te.core.link cimport Ops
from te.core.encryption cimport SECRET_BYTES, Encrypted, encrypted_free, encrypted_new
from te.core.sending cimport Streams, sending_ops
from te.core.wire cimport OVER_TCP, SEGMENT
from libc.stdint cimport uint8_t

import os

cdef Ops OPS = sending_ops()
OPS.name = b"tcp"
cdef LandingProtocol PROTOCOL = landing_protocol(OVER_TCP, SEGMENT)


cdef class TcpLink(LinkHandle):
    def __cinit__(self, Engine engine, bint is_incoming):
        self.make(engine, &OPS, is_incoming, need(sizeof(Streams)))

    def add_rail(self, int fd, secrets=None):
        cdef Encrypted *encrypted = NULL
        cdef bint added = False
        cdef const uint8_t[::1] out, into
        cdef int errnum
        if secrets is not None:
            out, into = secrets
            assert len(out) == len(into) == SECRET_BYTES
            encrypted = encrypted_new(&out[0], &into[0], 0, &errnum)
            if encrypted == NULL:
                raise OSError(errnum, f"cannot encrypt the connection: {os.strerror(errnum)}")
        try:
            added = self.add(&PROTOCOL.frames, fd, -1, sizeof(Landings), -1, encrypted)
        finally:
            if not added:
                encrypted_free(encrypted)
        return added
