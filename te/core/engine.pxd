# SPDX-License-Identifier: Apache-2.0
# Python's view of an engine's compiled half; engine.pyi is the contract.

from te.core.link cimport Link
from te.core.plane cimport Plane
from te.core.tags cimport Opening
from te.core.tally cimport Outcomes

cdef class Engine:
    cdef Plane *p
    cdef set kinds

cdef class Revocation:
    cdef Opening *o
    cdef Engine engine

# (done, cancelled, failed by reason, blocks and bytes of those done, landed, bytes landed)
cdef object outcomes_of(Outcomes *o)
# Why a link is dead: (code, errno, text); without a reason while it is not.
cdef object death_of(Link *k)
