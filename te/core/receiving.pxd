# SPDX-License-Identifier: Apache-2.0
# The frames of a transfer over connections that carry its bytes, or say where they lie, as its destination
# reads them.

from te.core.frames cimport Connection, Protocol
from te.core.inbound cimport Arriving
from te.core.sync cimport u64

# Of a transport that sends by te/core/sending.pxd; nothing is pulled.
cdef Protocol receiving_protocol(int over) noexcept

# A frame is complete: what it asks for is done, or its payload begins; False after a violation.
cdef bint receiving_frame(Connection *c) noexcept nogil
# The same of one that brings some of a transfer, whose ranges are in `local` from then on; NULL after a
# violation.
cdef Arriving *receiving_some(Connection *c) noexcept nogil
# An empty transfer, END, has come; False after a violation. Transfers are numbered upwards: `last_id` is
# the one that was begun last.
cdef bint receiving_empty(Connection *c, u64 *last_id) noexcept nogil
