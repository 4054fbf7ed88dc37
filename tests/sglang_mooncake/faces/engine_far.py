# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine.TransferEngine`` over te, here and in another process (see ``te_far``)."""

from __future__ import annotations

import base64
import importlib
from typing import Any, ClassVar

import numpy as np
from te_far import FarEngine, main, pattern

from sglang_mooncake.faces.mooncake_engine import Options, answering, install, sessions
from sglang_mooncake.faces.mooncake_engine.engine import TransferEngine
from sglang_mooncake.sglang.config import Config
from sglang_mooncake.sglang.drop_in import engine_options

P2P = "P2PHANDSHAKE"
NEVER_S = 1_000.0
#: A machine that stops a process for seconds fails no transfer.
PATIENT = {"SGLANG_MOONCAKE_STALL_TIMEOUT_S": f"{NEVER_S:g}"}


def near(
    protocol: str = "rdma", given: Options | None = None, **environment: str
) -> TransferEngine:
    """An engine in this process."""
    given = given or engine_options(Config.from_environment(PATIENT | environment))
    engine = type("TransferEngine", (TransferEngine,), {"options": given})()
    assert engine.initialize("127.0.0.1", P2P, protocol, "") == 0
    return engine


class FarFace(FarEngine):
    """The near end. ``environment``: settings of the process."""

    program: ClassVar[str] = __file__

    def __init__(self, protocol: str = "rdma", **environment: str) -> None:
        self.wanted = protocol
        super().__init__(**(PATIENT | environment))

    def start(self, config: dict[str, Any]) -> str:
        return self.begin(environment=config, protocol=self.wanted)

    @property
    def session(self) -> str:
        return f"127.0.0.1:{self.port()}"


class Far:
    """The far end: each method is an operation."""

    def begin(self, environment: dict[str, str], protocol: str) -> int:
        self.buffers: dict[int, np.ndarray] = {}
        sessions.ASK_TIMEOUT_S = answering.ANSWER_TIMEOUT_S = NEVER_S
        install(engine_options(Config.from_environment(environment)))
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        return self.engine.initialize("127.0.0.1", P2P, protocol, "")

    def port(self) -> int:
        return self.engine.get_rpc_port()

    def register(self, nbytes: int, seed: int | None = None) -> int:
        buffer = np.zeros(nbytes, np.uint8) if seed is None else pattern(seed, nbytes)
        assert self.engine.register_memory(buffer.ctypes.data, nbytes) == 0
        self.buffers[buffer.ctypes.data] = buffer
        return int(buffer.ctypes.data)

    def unregister(self, address: int) -> int:
        return self.engine.unregister_memory(address)

    def read(self, address: int) -> str:
        return base64.b64encode(self.buffers[address].tobytes()).decode()

    def write_to(self, session: str, src: int, dst: int, nbytes: int) -> int:
        return self.engine.transfer_sync_write(session, src, dst, nbytes)


if __name__ == "__main__":
    main(Far())
