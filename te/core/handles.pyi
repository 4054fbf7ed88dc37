# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

from te.core.engine import OutcomesTuple

class LinkHandle:
    """All rails between two engines that one side opened; transports derive their own. The link
    ends with its last handle."""

    @property
    def number(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    def name_peer(self, peer: bytes) -> None:
        """Of an incoming link, before its first rail: the source, with its epoch, as
        ``te.tags.packed_peer`` makes it. It is whom tags may be open for."""

    @property
    def rails(self) -> int:
        """Connections in use."""

    def tally(self) -> tuple[list[tuple[int, int]], OutcomesTuple, int]:
        """Bytes sent and received, by rail; what became of transfers; how many have no outcome."""

    @property
    def death(self) -> tuple[int, int, str]:
        """Why it is not alive: code, errno, text."""

    def die(self, code: int) -> None:
        """Asks the workers to close its connections."""

    def send_note(self, data: bytes) -> bool:
        """Has it sent, of 1 to NOTE_LIMIT bytes; False if too much waits. The link must have had a
        rail; if it has ended, the note is lost."""

    def submit(
        self,
        blocks: npt.NDArray[np.void],
        total: int,
        tag: int,
        is_read: bool,
        unfinished_max: int,
        is_awaited: bool = False,
    ) -> TransferHandle | int | None:
        """Begins a transfer of blocks, shape (n,), dtype ``te.blocks.BLOCK``. ``is_awaited``: see
        ``te.Peer.write``; each read is.

        Instead of a handle: the index of the first block whose local side is not registered, or
        None when the link has ``unfinished_max`` unfinished transfers.
        """

class TransferHandle:
    @property
    def name(self) -> int:
        """What ``Engine.wait_notices`` calls it; unique while the handle lives."""

    def status(self) -> int: ...
    def failure(self) -> tuple[int, int, str]:
        """Why it failed: code, errno, text."""

    def cancel_requested(self) -> bool: ...
    def duration_s(self) -> float: ...
    def subscribe(self) -> bool:
        """True if there is an outcome; False if ``Engine.wait_notices`` will name it."""

    def cancel(self) -> bool:
        """Asks that it stop. For a read it waits, without the lock, for landings under way; False
        when one did not end in time. Always True for a write."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for an outcome, at first with the lock if it is small; False if none came."""
