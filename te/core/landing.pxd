# SPDX-License-Identifier: Apache-2.0
# The destination's side of a transfer over connections that carry its bytes, or say where they lie.

from libc.stdint cimport uint8_t
from te.core.frames cimport Connection, Protocol
from te.core.inbound cimport Arriving, Place
from te.core.sync cimport u64

# A protocol of frames that land, and what differs between those: `Connection.protocol` is one.
cdef struct LandingProtocol:
    Protocol frames
    uint8_t reply  # the frames that serve a peer's read: SEGMENT or PULL
    # A PULL has come, and its ranges are known: has them copied. NULL where there are none.
    void (*pull)(Connection *c, Arriving *a) noexcept nogil

# Of a transport that sends by te/core/sending.pxd; nothing is pulled.
cdef LandingProtocol landing_protocol(int over, uint8_t reply) noexcept

# What a connection has of its own: `Connection.own` begins with it.
cdef struct Landings:
    Arriving *arriving  # whose payload is under way
    Place place
    u64 last_id

# What its `Protocol` calls, and who does more instead.
cdef bint landing_may_land(Connection *c, char *reason) noexcept nogil
cdef void landing_refuse(Connection *c, const char *reason) noexcept nogil
cdef void landing_moved(Connection *c, u64 nbytes) noexcept nogil
cdef void landing_landed(Connection *c, bint is_good) noexcept nogil
cdef void landing_part(Connection *c, void *of, u64 nbytes, int fault) noexcept nogil

# A payload begins, whose ranges are in `local`; False if it must not land, and is refused.
cdef bint landing_begin(Connection *c, Arriving *a) noexcept nogil
# The payload that has begun goes through slots, whatever memory it is for; under no lock.
cdef void landing_stage(Connection *c, Arriving *a) noexcept nogil
# An empty transfer, END, has come; False after a violation.
cdef bint landing_empty(Connection *c) noexcept nogil
# All of it has come: counts it, answers, forgets it. Under the link's lock.
cdef void landing_finish(Connection *c, Arriving *a) noexcept nogil
