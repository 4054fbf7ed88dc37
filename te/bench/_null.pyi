# SPDX-License-Identifier: Apache-2.0
class Wires:
    """Joins the queue pairs of engines in this process."""

    def counts(self) -> tuple[int, int]:
        """Work requests posted so far, and the bytes they name."""

class Device:
    """Stands for ``te.verbs._core.Device``: takes every work request and moves nothing."""

    def __init__(self, wires: Wires) -> None: ...
