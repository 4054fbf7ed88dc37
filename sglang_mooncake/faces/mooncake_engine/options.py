# SPDX-License-Identifier: Apache-2.0
"""What the operator says of ``mooncake.engine`` over te."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import te

__all__ = ["OpenEngine", "Options"]

OpenEngine = Callable[[str, tuple[str, ...], tuple[str, ...]], te.Engine]
"""Makes te's engine from the host to listen on, the RDMA devices and the transports that the caller
of ``initialize`` names (none: the operator's, or all)."""


@dataclass(frozen=True)
class Options:
    """What the operator says, and Mooncake's arguments do not."""

    open_engine: OpenEngine
    #: Of the deployment's secrets; without, everybody may read and write registered memory.
    keys: tuple[bytes, ...] = ()
    #: The first and the last port that may be listened on.
    ports: tuple[int, int] | None = None
    #: Goes on without a secret on a public address; and how an operator says so.
    insecure: bool = False
    how_to_insist: str = ""
    #: Of one call, beside the time that its bytes take at 100 MB/s.
    transfer_timeout_s: float = 30.0
