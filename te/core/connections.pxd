# SPDX-License-Identifier: Apache-2.0
# Connections of a link in the hands of their workers.

from te.core.channels cimport Channel
from te.core.frames cimport Connection, Protocol
from te.core.link cimport Link
from te.core.sync cimport u32
from te.core.worker cimport Worker

# Adds a connection to a link and hands it to a worker. 0, or an errno: then the channel is freed, and
# its descriptors are the caller's. Under the link's lock, by the caller's thread.
cdef int connection_add(
    Link *link, const Protocol *protocol, Worker *w, Channel *channel, size_t own_nbytes
) noexcept nogil
# Of a link that nobody has any more.
cdef void connections_free(Link *link) noexcept nogil

# Waits for what it can use. A caller that drives it is not disturbed by its worker.
cdef void set_interest(Connection *c) noexcept nogil
cdef void watch(Connection *c, u32 wanted) noexcept nogil
# Asks to be woken up; True if there is something already.
cdef bint connection_arm(Connection *c) noexcept nogil
