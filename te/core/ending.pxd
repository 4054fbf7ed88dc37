# SPDX-License-Identifier: Apache-2.0
# The end of a link.

from te.core.link cimport Link

# Its last connection has gone: ends what the transport has of it, fails its transfers, forgets what
# was landing, and tells Python. By a worker, without a lock.
cdef void link_close(Link *link) noexcept nogil
