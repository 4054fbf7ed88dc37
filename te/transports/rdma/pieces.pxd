# SPDX-License-Identifier: Apache-2.0
# Cutting a transfer over RDMA into pieces: what a rail carries as a whole, what is written again
# when a rail dies, and what the balancer gives out. Pure.

from te.core.sync cimport u32, u64
from te.core.wire cimport Block

cdef struct Piece:
    u64 first, offset, nbytes  # begins at `offset` of the block `first`
    u32 blocks  # that it touches
    u32 next  # of those that wait: index + 1, or 0

# Into how many pieces to cut `total` bytes in `blocks` blocks, of which there is at least one, for
# that many rails of one speed: as many for each of them, of 1 MiB and of 256 blocks at most on the
# average; and below 128 KiB a further rail costs more than it carries.
cdef u32 pieces_for(u64 total, u64 blocks, u32 rails) noexcept nogil

# Cuts n blocks of `total` bytes into `most` pieces of about one size, or fewer; how many. Every byte
# is in one piece, none is empty. A block smaller than a quarter of a piece stays whole, and others
# are cut at multiples of 4096 bytes from their start: the unit of a NIC's page tables.
cdef u32 cut(const Block *blocks, u64 n, u64 total, u32 most, Piece *pieces) noexcept nogil
