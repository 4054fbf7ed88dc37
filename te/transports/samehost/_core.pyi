# SPDX-License-Identifier: Apache-2.0
from typing import Final

from te.core.engine import Engine
from te.core.handles import LinkHandle

RINGS_NBYTES: Final[int]
NONCE_NBYTES: Final[int]

LOOK_TIMEOUT_S: Final[float]

def read_process(pid: int, address: int, nbytes: int, timeout_s: float = ...) -> bytes:
    """process_vm_readv(2), by a thread of its own, which is left behind if the memory does not
    answer in time; ``OSError``, also while four that were left behind still wait for that process,
    or threads for 64 others."""

class SamehostLink(LinkHandle):
    """A link without rails yet. The memory of the process ``pid`` is copied for as long as
    ``pidfd`` (pidfd_open(2), taken over) says that it lives, and copies find the ``nonce``,
    ``NONCE_NBYTES``, at the address ``nonce_at`` there; the link dies with it."""

    def __init__(
        self,
        engine: Engine,
        is_incoming: bool,
        pid: int,
        pidfd: int,
        nonce_at: int,
        nonce: bytes,
    ) -> None: ...
    def add_rail(self, fd: int, rings_fd: int) -> bool:
        """Takes over a connected, non-blocking unix socket, and a memory file of ``RINGS_NBYTES``
        that cannot shrink; False (nothing taken) on a dead or full link. ``OSError`` (nothing
        taken)."""

    def add_mapping(self, serial: int, start: int, fd: int, nbytes: int) -> None:
        """Maps memory of the source, read-only, so that it is copied from directly. ``OSError``,
        also for a range that touches one which is mapped, and for too many."""

    def take_descriptor(self, number: int) -> int:
        """A descriptor of the source by its number there (pidfd_getfd(2), Linux 5.6); the caller's.
        ``OSError``."""

    def check_mapping(self, start: int, nbytes: int, mapped: int) -> None:
        """``OSError`` if the range touches one that is mapped, or if with ``mapped`` bytes more
        there would be too many."""

    def add_mapped(
        self,
        serial: int,
        start: int,
        nbytes: int,
        kind: object,
        here: int,
        number: int,
        mapped: int,
    ) -> None:
        """Memory of the source that a kind, by its capsule, has mapped at ``here``, so that it is
        copied by that; ``number`` is for the kind's ``unmap``, 0 if there is nothing to undo, and
        ``mapped`` how many bytes it has mapped.
        ``OSError`` as above, and it is unmapped."""

    def remove_mapping(self, serial: int) -> bool:
        """Unmaps what is mapped of a region; False when a copy out of it did not end: then it is no
        longer copied from, and is unmapped with the link. Waits without the lock."""

    def mapped_by_peer(self, serial: int, is_mapped: bool) -> None:
        """The source's side: whether the peer has mapped all of a region."""
