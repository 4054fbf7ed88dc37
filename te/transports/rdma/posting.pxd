# SPDX-License-Identifier: Apache-2.0
# The source's side: rails are given the pieces that wait, by the rule of balance.pxd; pieces become work requests in
# kept arrays, handed over by one call, and their completions come back. The link's worker's, which drives all of its
# rails.

from te.core.frames cimport Connection
from te.core.sync cimport u64
from te.transports.rdma.state cimport Direct, Qp
from te.verbs.abi cimport VWc

# The first mark through a new rail.
cdef void post_probe(Qp *q) noexcept nogil
# Sends what the qp was given, and gives all rails of its link what they have room for; whether there was something.
cdef bint post_pieces(Qp *q) noexcept nogil
cdef void sends_completed(Qp *q, VWc *wc, int n) noexcept nogil
# After completions, or a word of the destination: ends what is done; whether there was something.
cdef bint pieces_done(Qp *q) noexcept nogil
# After a pace has changed. Under the link's lock.
cdef void level_speeds(Direct *d, u64 now) noexcept nogil
# The destination has room for more marks, and has seen so many.
cdef void on_credit(Connection *c) noexcept nogil
