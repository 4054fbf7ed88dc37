# SPDX-License-Identifier: Apache-2.0
# The frames of a transfer over connections that carry its bytes, or say where they lie, as its destination
# reads them.

from te.core.frames cimport Connection, Moved, Protocol
from te.core.inbound cimport Arriving
from te.core.sync cimport u64

# Of a transport that sends by te/core/sending.pxd; nothing is pulled.
cdef Protocol receiving_protocol(int over) noexcept

# Reads on with a frame. When it is complete, what it asks for is done, or its payload begins. A PULL is the caller's to
# carry out: `pulled` is its transfer, and its ranges are in `local`; else `pulled` is NULL.
cdef Moved receiving_read(Connection *c, bint answers_only, Arriving **pulled) noexcept nogil
# An empty transfer, END, has come; False after a violation. Transfers are numbered upwards: `last_id` is
# the one that was begun last.
cdef bint receiving_empty(Connection *c, u64 *last_id) noexcept nogil
