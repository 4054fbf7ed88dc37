# SPDX-License-Identifier: Apache-2.0
# The same host: the destination copies, out of the source's memory, so that its consent, bounds
# and fence hold whatever the source does.

from te.core.frames cimport Connection, Moved
from te.core.inbound cimport Arriving
from te.core.sync cimport u64
from te.transports.samehost.state cimport Samehost

cdef void pulling_pull(Connection *c, Arriving *a) noexcept nogil
cdef Moved pulling_copy(Connection *c) noexcept nogil
cdef void pulling_landed(Connection *c, bint is_good) noexcept nogil
# `Protocol.part`.
cdef void pulling_part(Connection *c, void *of, u64 nbytes, int fault) noexcept nogil
cdef bint pulling_take_up(Connection *c, bint is_idle) noexcept nogil
cdef bint pulling_has_work(Connection *c) noexcept nogil
cdef void forget_jobs(Samehost *own) noexcept nogil
