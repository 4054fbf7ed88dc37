# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine (PyPI mooncake-transfer-engine-non-cuda), over TCP."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from te_bench.contenders.base import Absent, Call, Contender, Spent, time_calls
from te_bench.memory import Memory
from te_bench.protocol import Info, Timing

__all__ = ["Mooncake", "MooncakePool"]

HOST = "127.0.0.1"


class Mooncake(Contender):
    """``batch_transfer_sync_write``; its lists are made beforehand, as its callers cannot."""

    #: By default it refuses more than 1,024 blocks in a call, and so the shape kv.
    ENVIRONMENT: ClassVar[dict[str, str]] = {
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_LOG_LEVEL": "ERROR",
    }

    def version(self) -> str:
        found = (
            f"{distribution.name} {distribution.version}"
            for distribution in metadata.distributions()
            if distribution.name.startswith("mooncake-transfer-engine")
        )
        return next(found, "unknown")

    def open(self, memory: Memory) -> Info:
        os.environ.update(self.ENVIRONMENT)  # Mooncake reads them when it starts.
        try:
            module: Any = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise Absent(f"mooncake.engine cannot be imported: {error}") from error
        self._engine = module.TransferEngine()
        self._memory = memory
        if code := self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"initialize returned {code}")
        if code := self._engine.register_memory(memory.address, memory.nbytes):
            raise RuntimeError(f"register_memory returned {code}")
        return {"target": f"{HOST}:{self._engine.get_rpc_port()}"}

    def connect(self, there: Info) -> Info:
        write, target = self._engine.batch_transfer_sync_write, there["target"]
        source = self.source_addresses(self._memory)
        destination = self.destination_addresses(there)

        def call(numbers: npt.NDArray[np.int64]) -> Call:
            lists = (
                source[numbers].tolist(),
                destination[numbers].tolist(),
                [self.plan.shape.nbytes] * len(numbers),
            )

            def move() -> Spent:
                if code := write(target, *lists):
                    raise RuntimeError(f"batch_transfer_sync_write returned {code}")
                return Spent()

            return move

        self._calls = [[call(numbers) for numbers in calls] for calls in self.parts()]
        return {}

    def transfer(self) -> Timing:
        return time_calls(self._calls)


class MooncakePool(Mooncake):
    """The same with connections kept for the next transfer."""

    ENVIRONMENT: ClassVar[dict[str, str]] = {
        **Mooncake.ENVIRONMENT,
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    }
