# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable

class Wires:
    """Joins the queue pairs of engines in this process; outlives them."""

    def __init__(self, checks_keys: bool = False) -> None:
        """``checks_keys``: a work request that names memory which is not registered now, fails."""

    def expect(self, nbytes: int) -> None:
        """Begins to count anew. Nothing may be under way."""

    def posted(self) -> tuple[int, int, int, int]:
        """Work requests since then and the bytes they name; those of the first call, and the ns
        from that call until the one that made the expected bytes full, without those that it took
        to wake whom a device would interrupt."""

    def hold(self, held: bool) -> None:
        """Keeps back every completion of a queue pair that is not broken, or gives them out."""

    def keep(self, errnum: int) -> None:
        """Has no queue pair be destroyed, but that fail with the errno; 0: no more."""

    def refuse(self, errnum: int) -> None:
        """Has every call that posts sends fail with that, without a word on which of them were
        taken; 0: no more."""

class QueuePair:
    """Stands for ``te.verbs._core.QueuePair``; what follows is for one that no engine has."""

    @property
    def number(self) -> int:
        """By which the other end finds it."""

    @property
    def fd(self) -> int:
        """Of its completion channel."""

    def connect(self, far_number: int, *_of_the_wire: object, is_target: bool = False) -> None:
        """What is sent goes to the queue pair with that number; ``OSError`` if it has gone."""

    def receive(self, count: int) -> None:
        """Makes room for so many marks, in addition."""

    def send_marks(self, marks: Iterable[int]) -> bool:
        """Sends marks of 32 bits; False when the other end's queue was full."""

    def poll(self) -> list[tuple[int, int | None]]:
        """Up to 64 completions: status, and the mark that came, or None of a send."""

    def to_error(self) -> None:
        """Breaks it: receives come back as flushed, and what the other end sends fails."""

class Device:
    """Stands for ``te.verbs._core.Device``: takes every work request and moves nothing."""

    #: -1 once it is closed.
    events_fd: int

    def __init__(self, wires: Wires) -> None: ...
    def close(self) -> None: ...
    def queue_pair(
        self, port: int, send_depth: int, receive_depth: int, message_bytes: int
    ) -> QueuePair: ...
