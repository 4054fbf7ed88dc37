# SPDX-License-Identifier: Apache-2.0
# What a calling thread does: it puts commands on the list of a link's owner. If the owner's turn is free it
# carries them out itself, and may take the answer itself, in the turn of the worker whose connection it comes
# by: waking a worker up costs more than a small write. It never waits for a turn: where somebody has it, the worker
# does it. Nor does it wait for a link's lock that a worker may have (`link_lock`).

from te.core.frames cimport Connection
from te.core.link cimport Transfer
from te.core.sync cimport u64
from te.core.worker cimport Spin

cdef enum:
    INLINE_BYTES = 64 << 10  # of a write that is sent at once, and whose answer a calling thread takes
    ONE_FRAME_BYTES = 256 << 10  # is one frame, with any number of connections
    # The same of what a calling thread waits for, and sends or lands itself, and of the reply to a read: 1 MiB, and what
    # goes beside it. Over two connections it takes two threads more to wake up, and two processors for them.
    AWAITED_BYTES = (1 << 20) + (64 << 10)

# The owner is to begin the transfer, of which it gets a reference. Once.
cdef void submit(Transfer *t) noexcept
# The owner is to end it, as `Transfer.cancel` is set; and of a read nothing lands any more.
cdef void call_off(Transfer *t) noexcept nogil
# Waits for the outcome in the calling thread, which is awake already, for as long as the answer may come there.
cdef void await_answer(Transfer *t, Spin *spin, u64 until_ns) noexcept nogil


cdef inline u64 one_frame_bytes(Connection *c, bint is_awaited) noexcept nogil:
    """Transfers of up to so many bytes are one frame on this connection."""
    return max(<u64>ONE_FRAME_BYTES, c.protocol.reply_most) if is_awaited else <u64>ONE_FRAME_BYTES
