# SPDX-License-Identifier: Apache-2.0
# The destination's side: lets a transfer be written, and counts what has landed. Each piece of a
# transfer is trailed by a mark on the same rail, (slot, generation, piece): a queue pair delivers in
# order, so a mark is never earlier than the data before it.

from te.core.frames cimport Connection
from te.core.inbound cimport Arriving
from te.core.link cimport Link
from te.transports.rdma.state cimport Qp
from te.verbs.abi cimport VWc

# A source asks for a transfer to be written, or with no pieces, only for the table; False after a
# violation.
cdef bint on_ask(Connection *c) noexcept nogil
# The source has given a transfer up and writes no more of it; False after a violation.
cdef bint on_abandon(Connection *c) noexcept nogil
cdef void marks_arrived(Qp *q, VWc *wc, int n) noexcept nogil

# Under the link's lock.
# It has a slot no more.
cdef void give_slot_back(Link *link, Arriving *a) noexcept nogil
# The same, and its source writes nothing any more.
cdef void ungrant(Link *link, Arriving *a) noexcept nogil
