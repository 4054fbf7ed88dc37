# SPDX-License-Identifier: Apache-2.0
# Connections of a link in the hands of their workers.

from te.core.channels cimport Channel
from te.core.frames cimport Connection, Protocol
from te.core.link cimport Link
from te.core.worker cimport Worker

# Adds a connection to a link and hands it to a worker. 0, or an errno: then the channel is freed, and its
# descriptors are the caller's; EPIPE where it takes none any more. By a calling thread, one at a time.
cdef int connection_add(
    Link *link, const Protocol *protocol, Worker *w, Channel *channel, size_t own_nbytes
) noexcept
# Of a link that nobody has any more.
cdef void connections_free(Link *link) noexcept nogil

# In its worker's turn: what it waits for, which is what it can use; not what calling threads look for.
cdef void set_interest(Connection *c) noexcept nogil
# Asks to be woken up; True if there is something already.
cdef bint connection_arm(Connection *c) noexcept nogil
