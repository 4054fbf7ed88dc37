# SPDX-License-Identifier: Apache-2.0
# A fence: after it nothing lands any more under a tag. It is one command to the owners of the links
# that the tag is for, which the engine's list of links tells; they answer by `Opening.granted`.

from te.core.plane cimport Plane
from te.core.sync cimport u64
from te.core.tags cimport Opening

# The opening was revoked: True once nothing lands under it; False if that is not so at `until_ns`, and
# then it can be called again. By callers, without a lock and without the interpreter lock.
cdef bint fence_opening(Plane *p, Opening *o, u64 until_ns) noexcept nogil
