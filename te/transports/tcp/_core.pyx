# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# TCP: the source sends the bytes, and the kernel scatters them to where they belong.

from te.core.callers cimport AWAITED_BYTES
from te.core.channels cimport Channel
from te.core.engine cimport Engine
from te.core.handles cimport LinkHandle
from te.core.heap cimport need
from te.core.link cimport Ops
from te.core.frames cimport Protocol
from te.core.payload cimport Payload
from te.core.receiving cimport receiving_protocol
from te.core.sending cimport Streams, sending_ops
from te.core.wire cimport OVER_TCP
from te.transports.tcp.encryption cimport SECRET_BYTES, encrypted_new, plain_new
from libc.stdint cimport uint8_t

import os

cdef Ops OPS = sending_ops()
OPS.name = b"tcp"
cdef Protocol PROTOCOL = receiving_protocol(OVER_TCP)
PROTOCOL.reply_most = AWAITED_BYTES


cdef class TcpLink(LinkHandle):
    def __cinit__(self, Engine engine, bint is_incoming):
        self.make(engine, &OPS, is_incoming, need(sizeof(Streams)))

    def add_rail(self, int fd, secrets=None):
        cdef Channel *channel
        cdef bytes out, into
        cdef int errnum
        if secrets is None:
            channel = plain_new(fd)
        else:
            out, into = secrets
            assert len(out) == len(into) == SECRET_BYTES
            channel = encrypted_new(
                fd, <const uint8_t *><char *>out, <const uint8_t *><char *>into, 0, &errnum)
            if channel == NULL:
                raise OSError(errnum, f"cannot encrypt the connection: {os.strerror(errnum)}")
        return self.add(&PROTOCOL, channel, sizeof(Payload))
