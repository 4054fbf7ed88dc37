# SPDX-License-Identifier: Apache-2.0
# Whether the process whose memory is copied is still the one that was greeted: its number may be
# another one's soon, while somebody else may have kept its connection (fork(2)).

from libc.stdint cimport uint8_t
from libc.string cimport memcmp
from te.core.frames cimport Connection
from te.transports.samehost.state cimport NONCE_BYTES, Samehost

cdef enum:
    # How long a process that was seen alive is copied from unasked (to ask costs 2 us, and 0.5 us
    # for its nonce): before its number is given out again, 32,768 others are made and end, at 15 us
    # each at best.
    ALIVE_NS = 1000000

cdef bint process_gone(Samehost *own) noexcept nogil
# The same, without a call to the kernel where the number cannot be another's yet.
cdef bint may_be_gone(Samehost *own) noexcept nogil
# Whether the source has lived and kept the connection open until now, and so its memory as it was.
cdef bint source_lives(Connection *c) noexcept nogil
# Reads where the nonce should be; False if nothing can be read there.
cdef bint nonce_read(Samehost *own, uint8_t *seen) noexcept nogil


cdef inline bint is_nonce(Samehost *own, uint8_t *seen) noexcept nogil:
    return memcmp(seen, own.nonce, NONCE_BYTES) == 0
