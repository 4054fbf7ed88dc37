# SPDX-License-Identifier: Apache-2.0
"""What the operator says of ``nixl`` over te."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import te

__all__ = ["Notices", "OpenEngine", "Options"]

OpenEngine = Callable[[str, tuple[str, ...], int], te.Engine]
"""Makes te's engine from the host to listen on, the RDMA devices and the number of threads that the
caller names (none, 0: the operator's, or te's own)."""


class Notices(Protocol):
    """Notifications between two engines: at most once, in order, and bounded at both ends."""

    def send(self, peer: te.Peer, data: bytes) -> None:
        """Returns at once. ``te.Error`` if it cannot be sent."""

    def take(self) -> list[tuple[str, bytes]]:
        """Those that have come since, with the id of the engine that sent each."""


@dataclass(frozen=True)
class Options:
    """What the operator says, and NIXL's arguments do not."""

    open_engine: OpenEngine
    make_notices: Callable[[te.Engine], Notices]
    #: The address to listen on, at which other agents reach this process.
    host: str = "127.0.0.1"
    #: Whether the deployment has a secret. Without one everybody may read and write the memory.
    has_secret: bool = False
    #: Goes on without a secret on a public address; and how an operator says so.
    insecure: bool = False
    how_to_insist: str = ""
    #: What the operator says of telemetry; None leaves it to the caller. Asked for each agent.
    telemetry: Callable[[], bool | None] = lambda: None
