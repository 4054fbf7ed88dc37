# SPDX-License-Identifier: Apache-2.0
# The same host: the destination copies, out of the source's memory, so that its consent, bounds
# and fence hold whatever the source does.

from te.core.frames cimport Connection, Moved
from te.transports.samehost.state cimport Samehost

# `Protocol.receive`, `.settle` and `.has_work`.
cdef Moved pulling_receive(Connection *c, bint answers_only) noexcept nogil
cdef void pulling_settle(Connection *c) noexcept nogil
cdef bint pulling_has_work(Connection *c) noexcept nogil
cdef void forget_jobs(Samehost *own) noexcept nogil
