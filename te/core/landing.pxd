# SPDX-License-Identifier: Apache-2.0
# The payload of frames at the destination: it lands, goes through slots first, or is thrown away; and
# what that is to the transfer.

from te.core.frames cimport Connection, Moved
from te.core.inbound cimport Arriving
from te.core.staged cimport Part
from te.core.sync cimport u64

# Where a lent turn is said to be, a function returns False, and nothing has changed, if another worker has the link's
# lock then: it is called again, by the connection's worker.

# A payload of a transfer is to land where `local` says, if it may: AT_PLACE.
cdef void landing_expect(Connection *c, Arriving *a) noexcept nogil
# Whether it may: `is_good`; else it is refused. AT_COPY if it goes through slots. In a lent turn, too.
cdef bint landing_begin(Connection *c, bint *is_good) noexcept nogil
# The payload that has begun goes through slots, whatever memory it is for; under no lock.
cdef void landing_stage(Connection *c, Arriving *a) noexcept nogil
# The payload that comes through the channel: one step.
cdef Moved landing_receive(Connection *c) noexcept nogil
# What is to come, or is coming, must not land.
cdef void throw_away(Connection *c) noexcept nogil

# Inside a section: whether the payload may land now, else why not. It must not, for that reason.
cdef bint landing_may_land(Connection *c, char *reason) noexcept nogil
cdef bint landing_refuse(Connection *c, const char *reason) noexcept nogil  # in a lent turn, too
# So many bytes have landed.
cdef void landing_moved(Connection *c, u64 nbytes) noexcept nogil
# `nbytes` more are in the slot, and `left` is what is still to come: has them copied to where they belong.
# False if they must not land, and were refused.
cdef bint landing_push(Connection *c, u64 nbytes) noexcept nogil
# All of the payload has landed, or was thrown away; `is_good`: as the source had it. In a lent turn, too.
cdef bint landing_landed(Connection *c, bint is_good) noexcept nogil
# A copy out of a slot is over.
cdef void landing_part(Connection *c, Part *part) noexcept nogil

# Answers a transfer early; the rest of it is thrown away. Once per transfer. All under the link's lock.
cdef void refuse(Connection *c, Arriving *a, const char *reason) noexcept nogil
cdef void tell_refused(Connection *c, Arriving *a, const char *reason) noexcept nogil
# All of it has come: counts it, answers, forgets it.
cdef void landing_finish(Connection *c, Arriving *a) noexcept nogil
