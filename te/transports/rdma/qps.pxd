# SPDX-License-Identifier: Apache-2.0
# The life of a rail: a queue pair. A source's end that fails is destroyed, the destination is asked
# to drain and destroy its own, and says which pieces had landed; only then is the rest written again
# elsewhere. So no late packet of a dead rail lands after an arrival was counted.
#
# All but `qp_new` is the link's worker's.

from te.core.frames cimport Connection
from te.core.link cimport Link
from te.core.sync cimport u32, u64
from te.core.worker cimport PolledOps
from te.transports.rdma.state cimport Qp
from te.verbs.abi cimport Endpoint

# Hands a connected queue pair to the link's worker; 0, or an errno (then it is not taken). By a calling thread.
cdef int qp_new(
    Link *link, const PolledOps *ops, Endpoint *e, u32 index, u32 epoch, u32 local_nic,
    u32 remote_nic, u64 fences, u64 hello
) noexcept
cdef void qp_free(Qp *q) noexcept nogil
# The next step of a rail; whether it can be taken. The only way in which one changes. At a source
# Python is told to look at the link's rails.
cdef bint rail_step(Link *link, u32 index, int happening) noexcept nogil
# The attempt of a source's rail that is under way has come to nothing.
cdef void rail_not_made(Link *link, u32 index, const char *text) noexcept nogil
# A turn of the link's worker, without a lock: what a source's rails wait for by the clock, and what
# attempts to make them, devices and the destination have told.
cdef void rails_turn(Link *link) noexcept nogil
# Whether all of those that were to be destroyed are: tries again those that were not.
cdef bint qps_have_gone(Link *link) noexcept nogil
# Room for that many more marks; 0 or an errno.
cdef int post_receives(Qp *q, u32 n) noexcept nogil
# Destroys it: nothing is read or written through it any more.
cdef void qp_end(Qp *q) noexcept nogil
# The link has died, and before its transfers are failed all are destroyed; False if that is not so yet.
cdef bint qps_end(Link *link) noexcept nogil
# Something came back.
cdef void qp_moved(Qp *q, u64 now) noexcept nogil

# The source's end has failed, or is to be given up. Without a lock.
cdef void qp_fail(Qp *q, int code, int errnum) noexcept nogil
# The same of either end; the destination tells the source the code. Without a lock.
cdef void qp_give_up(Qp *q, int code, int errnum) noexcept nogil
# The destination's end is put into the error state: nothing more lands once all of its receives have
# come back, which `qp_drained` is told.
cdef void qp_drain(Qp *q) noexcept nogil
cdef void qp_drained(Qp *q) noexcept nogil

# Frames; False after a violation.
cdef bint on_lost(Connection *c) noexcept nogil
cdef void on_closed(Connection *c) noexcept nogil
cdef void on_broken(Connection *c) noexcept nogil
