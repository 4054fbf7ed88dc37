# SPDX-License-Identifier: Apache-2.0
# Which rail carries the next piece. Pure.
#
# A transfer is not divided beforehand: its pieces wait in one queue, and each goes to the rail that
# is expected to be done with it first. So rails that turn out to be slow, die or come back need no
# rule of their own: their bytes under way tell.

from libc.stdint cimport uint8_t
from te.core.sync cimport u32

cdef enum:
    NO_LANE = 0xFFFFFFFF

# What a rail moved lately, older measurements counting for less.
cdef struct Pace:
    double nbytes, busy_s

# A rail as the balancer sees it.
cdef struct Lane:
    double speed  # bytes per second; 0 of one that is not to carry any of it
    double in_flight  # bytes
    bint has_room

# Of `n` lanes, which takes a piece of that many bytes, when `waiting` bytes, it among them, wait: the
# one that will be done with it first. If that one is full, the best of the others takes it only when
# it is done no later than all together with all that waits; NO_LANE otherwise, and the piece waits.
# Among equals the one at `turn` or behind it.
cdef u32 choose(const Lane *lanes, u32 n, double nbytes, double waiting, u32 turn) noexcept nogil

# How many times longer a byte is taken to need by a rail at that distance from the memory: far NICs
# help when near ones have work for so much longer, since they are the near ones of somebody else's
# memory.
cdef double slowness(uint8_t distance) noexcept nogil

# Adds what was moved in a time during which there always was work. Older measurements fade with half
# a second of busy time: a long one counts for more than a short one, and no time for nothing.
cdef void pace_note(Pace *p, double nbytes, double busy_s) noexcept nogil
# A pace that nothing was measured of yet, with the speed of the port: it counts as if measured for
# long, so that the first short measurement, taken by chance, is not believed at once.
cdef void pace_begin(Pace *p, double bytes_per_s) noexcept nogil
# The pace of a rail that was slow and may have recovered: what is measured now counts soon. A first
# piece after a pause tells little (a seventh of the rate, on soft iWARP); a rail that is ten times as
# slow as the others counts as slow again after 60 ms of work.
cdef void pace_retry(Pace *p, double bytes_per_s) noexcept nogil
cdef double pace_rate(const Pace *p) noexcept nogil

# From measured rates the speeds to reckon with. Rates down to a third of the fastest count as equal
# to it: rails that share a bottleneck (a processor, a switch, the peer) are measured by chance. Four
# equal soft devices that share one processor, 2 MiB a rail and transfer: single rates differed
# 4.7-fold, and after fading 2.2-fold in 1 of 100 cases, 2.6-fold in 1 of 1000. None counts as slower
# than a sixteenth of the fastest: it keeps getting work, so that its rate is measured again.
# The fastest is returned.
cdef double speeds_of(const double *rates, double *speeds, u32 n) noexcept nogil
