# SPDX-License-Identifier: Apache-2.0
"""What stands behind an engine of Mooncake's class, and how its calls end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import te
from sglang_mooncake.faces.mooncake_engine.answering import Answerer
from sglang_mooncake.faces.mooncake_engine.batches import Batches
from sglang_mooncake.faces.mooncake_engine.exchange import NoCard, Told
from sglang_mooncake.faces.mooncake_engine.memory import Memory
from sglang_mooncake.faces.mooncake_engine.options import Options
from sglang_mooncake.faces.mooncake_engine.sessions import Sessions

__all__ = ["EngineImpl", "outcome"]

logger = logging.getLogger(__name__)


class EngineImpl:
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
