# SPDX-License-Identifier: Apache-2.0
# Python's view of an engine's compiled half; engine.pyi is the contract.

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
