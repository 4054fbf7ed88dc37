# SPDX-License-Identifier: Apache-2.0
"""What stands behind an engine of Mooncake's class, and how its calls end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import te
from sglang_mooncake.mooncake_face.answering import Answerer
from sglang_mooncake.mooncake_face.batches import Batches
from sglang_mooncake.mooncake_face.exchange import NoCard, Told
from sglang_mooncake.mooncake_face.memory import Memory
from sglang_mooncake.mooncake_face.sessions import Sessions

__all__ = ["OpenEngine", "Opened", "Options", "outcome"]

logger = logging.getLogger(__name__)

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


class Opened:
    """What stands behind an engine that was initialized. Does not know it, so that it can go."""

    def __init__(self, options: Options, engine: te.Engine, host: str) -> None:
        self.engine: Final = engine
        self.sessions: Final = Sessions(engine, options.keys)
        self.memory: Final = Memory(engine)
        self.batches: Final = Batches()
        self.answerer: Final = Answerer(host, options.ports, options.keys, self._tell)

    def _tell(self) -> Told:
        return Told(self.engine.card(), self.memory.first_address)

    def close(self) -> None:
        self.answerer.close()
        self.engine.close()


def outcome(what: str, work: Callable[[], int | None], failed: int = -1) -> int:
    """As Mooncake has it: a number, and the reason of a failure in the log."""
    try:
        return work() or 0
    except (te.Error, NoCard, ValueError, RuntimeError, OSError, OverflowError) as exc:
        # As text: a log that keeps exceptions would keep the engine.
        logger.error("mooncake.engine over te: %s failed: %s", what, str(exc))
        return failed
