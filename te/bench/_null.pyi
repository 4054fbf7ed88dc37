# SPDX-License-Identifier: Apache-2.0
class Wires:
    """Joins the queue pairs of engines in this process; outlives them."""

    def expect(self, nbytes: int) -> None:
        """Begins to count anew. Nothing may be under way."""

    def posted(self) -> tuple[int, int, int, int]:
        """Work requests since then and the bytes they name; those of the first call, and the ns
        from that call until the one that made the expected bytes full, without those that it took
        to wake whom a device would interrupt."""

class Device:
    """Stands for ``te.verbs._core.Device``: takes every work request and moves nothing."""

    def __init__(self, wires: Wires) -> None: ...
