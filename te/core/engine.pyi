# SPDX-License-Identifier: Apache-2.0
from typing import Final, TypeAlias

OutcomesTuple: TypeAlias = tuple[int, int, dict[int, int], int, int, int, int]
"""Of transfers: done; cancelled; failed, by reason; blocks and bytes of those that are done; landed
here, and their bytes. Exists for type checkers alone."""

WORKERS_LIMIT: Final[int]

def numa_node(address: int) -> int:
    """Where the page is that the address lies on; -1 if there is none yet, or the kernel does not
    tell."""

class Engine:
    """Regions, tags and workers of one engine.

    Calls keep the interpreter lock and take microseconds, unless they say otherwise.
    """

    def __init__(
        self,
        workers: int,
        stall_s: float,
        rail_s: float,
        spin_s: float,
        segment_bytes: int,
        segment_blocks: int,
    ) -> None: ...
    def work(self, index: int) -> None:
        """The life of a worker; without the interpreter lock until ``stop``."""

    def stop(self) -> None:
        """Asks the workers to end every link and then themselves."""

    def add_region(
        self,
        start: int,
        end: int,
        serial: int,
        kind: object,
        rights: int,
        is_shared: bool,
        keys: bytes = b"",
    ) -> None:
        """Overlaps no other; serials rise. ``kind``: ``MemoryKind.compiled``. ``rights``: what
        peers may do there, bits of ``te.memory.RIGHTS``. Shared: peers on this host may map it.
        ``keys``: of ``te.core.regions.packed_key``, which cover the region, for devices."""

    def stage(self, base: int, nbytes: int, slot_bytes: int) -> None:
        """Memory for staging, that every kind has pinned; once, before the first region that needs
        it. ``ValueError`` if it makes no slots for each worker and direction, or too many."""

    def unstage(self, timeout_s: float) -> bool:
        """Once all workers have ended: waits, without the lock, until no copy is under way, so that
        that memory can be given back; False if one did not end in time."""

    def remove_region(self, serial: int, timeout_s: float) -> int:
        """Waits, without the lock, for transfers that read from it, takes it away, and waits for
        landings under way; 0.

        Or the number of unfinished transfers that read from it, and then it was not taken away; or
        -1 when a landing did not end in time: it was taken away, and the next call waits again.
        """

    def open_tag(
        self, value: int, peer: bytes = b"", ranges: bytes | None = None
    ) -> tuple[bool, bool]:
        """Opens it; whether it was not known, and whether it is open. Known and not open: it was
        revoked, and that is not confirmed yet. ``peer``: as ``te.tags.packed_peer`` makes it; empty
        for all. ``ranges``: pairs of u64 (start, end), none empty, in any order; None for all that
        the regions allow. ``ValueError`` for too many; then it is not opened."""

    def arrived(self, value: int) -> int:
        """Transfers that have landed under the tag; 0 if it is not known."""

    def arrived_nbytes(self, value: int) -> int:
        """Payload of those transfers in bytes; 0 if the tag is not known."""

    def revoke_tag(self, value: int) -> Revocation | None:
        """Closes it: no landing begins any more, and nothing is granted. None if it is not known.
        It stays known until ``Revocation.forget``; each call says the same."""

    @property
    def events_fd(self) -> int:
        """Readable when ``events`` has something."""

    def events(self) -> list[tuple[int, bool, int, int, str]]:
        """(link, whether it has ended, code, errno, text) of links that have ended, which is told
        once, or whose rails have changed since the last call; the last three say why it has
        ended."""

    def take_notes(self) -> tuple[list[tuple[bytes, bytes]], int]:
        """Those that have come since the last call, each with who has sent it, as
        ``te.tags.packed_peer`` makes it; and how many were dropped since the engine was made, as
        there were too many."""

    def wait_notices(self) -> list[int]:
        """Blocks, without the lock, until transfers that were subscribed to have an outcome."""

    def wake_notices(self) -> None:
        """Has ``wait_notices`` return."""

    @property
    def reply_blocks(self) -> int:
        """Blocks that peers have asked to read, of replies that are not all sent."""

    def connections(self) -> tuple[int, int]:
        """Rails of links that this engine opened, and of links that peers opened; over RDMA, the
        connections for words."""

    def tallies(self) -> dict[str, tuple[list[tuple[int, int]], OutcomesTuple, dict[int, int]]]:
        """By transport, what its links have counted since the engine was made: bytes sent and
        received, by rail; what became of transfers; links that have ended, by reason."""

class Revocation:
    """A tag that was revoked; it is confirmed once ``wait`` has returned True."""

    def wait(self, timeout_s: float) -> bool:
        """Waits, without the lock, until nothing can land under the tag any more: no landing is
        under way, and no peer may write by itself over RDMA. False if that is not so in time."""

    def forget(self) -> int:
        """Confirmed: the tag may be opened anew. The last count of arrivals."""
