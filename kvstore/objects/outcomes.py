# SPDX-License-Identifier: Apache-2.0
"""What became of a put or a get. Nothing here is an exception: a cache that has not got something
costs its caller a computation, and nothing else."""

from __future__ import annotations

from enum import Enum

__all__ = ["Got", "Pinned", "Put", "Removed"]


class Got(Enum):
    """The outcome of reading one object. The destination has the object if it is ``RIGHT``; else it
    may have any bytes."""

    RIGHT = "right"
    #: No owner that this process knows of has it.
    MISSING = "missing"
    #: The key is there, but only with another signature or another size.
    REJECTED = "rejected"
    #: It was evicted, or its slot was used again, between the look-up and the end of the read.
    MOVED = "moved"
    #: Its bytes are not those that were stored.
    CORRUPTED = "corrupted"
    #: It lies in its owner's lower tier, and did not come up before the deadline.
    NOT_PROMOTED = "not promoted"
    #: Its owner does not answer, or the connection to it was lost.
    UNREACHABLE = "unreachable"
    #: The read did not end before its deadline. It was cancelled: nothing more lands.
    TIMED_OUT = "timed out"


class Put(Enum):
    """The outcome of storing one object."""

    STORED = "stored"
    #: It is there already: nothing was written.
    EXISTS = "exists"
    #: Somebody else is storing it at the moment.
    BEING_STORED = "being stored"
    #: The owner had no free slot, and evicts objects now.
    NO_SPACE = "no space"
    #: It is larger than a chunk of the owner's memory.
    TOO_LARGE = "too large"
    #: There is no owner to store it at, or it does not answer.
    UNREACHABLE = "unreachable"
    #: The owner or the write did not answer before the deadline.
    TIMED_OUT = "timed out"
    #: The write failed, or did not arrive as it was sent; the owner has dropped it.
    FAILED = "failed"


class Pinned(Enum):
    """The outcome of pinning one object."""

    PINNED = "pinned"
    #: No owner that answers has it in memory.
    MISSING = "missing"
    #: Its owner has as many bytes pinned as it may have.
    REFUSED = "refused"


class Removed(Enum):
    """The outcome of removing one object."""

    REMOVED = "removed"
    #: No owner had it.
    MISSING = "missing"
    #: An owner that is known cannot be asked or has not answered, and may have it still.
    UNREACHABLE = "unreachable"
