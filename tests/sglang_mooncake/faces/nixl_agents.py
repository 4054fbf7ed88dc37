# SPDX-License-Identifier: Apache-2.0
"""Agents over te, here and in another process (see ``te_far``)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from te_far import FarEngine, main, pattern, wait_until

import te
from sglang_mooncake.faces.nixl import Options
from sglang_mooncake.faces.nixl.api import nixl_agent, nixl_agent_config
from sglang_mooncake.faces.nixl.modules import modules
from sglang_mooncake.faces.nixl.notices import TeNotices

NEVER_S = 1_000.0


def options(**config: Any) -> Options:
    """A machine that stops a process for seconds fails no transfer, unless the test says so."""
    given = {"stall_timeout_s": NEVER_S, "connect_timeout_s": NEVER_S, "status_dir": None} | config

    def open_engine(host: str, devices: tuple[str, ...], threads: int) -> te.Engine:
        assert not devices
        return te.Engine(te.Config(host=host, workers=threads or 2, **given))

    return Options(open_engine, TeNotices)


def agent(
    name: str, conf: nixl_agent_config | None = None, given: Options | None = None, **config: Any
) -> nixl_agent:
    """An agent in this process; ``config``: of te."""
    made: nixl_agent = modules(given or options(**config), ["nixl"])["nixl._api"].nixl_agent(
        name, conf
    )
    return made


def registered(one: nixl_agent, nbytes: int, seed: int | None = None) -> np.ndarray:
    """Memory of the agent's: zeros, or a pattern."""
    memory = np.zeros(nbytes, np.uint8) if seed is None else pattern(seed, nbytes)
    one.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return memory


def blocks(memory: np.ndarray, nbytes: int) -> list[tuple[int, int, int]]:
    """The memory in pieces of this size."""
    return [(memory.ctypes.data + at, nbytes, 0) for at in range(0, memory.nbytes, nbytes)]


def ended(one: nixl_agent, handle: Any) -> str:
    """The last state of a transfer."""
    states = [one.check_xfer_state(handle)]

    def is_over() -> bool:
        states.append(one.check_xfer_state(handle))
        return states[-1] != "PROC"

    wait_until(is_over, "the transfer has ended")
    return states[-1]


def messages(one: nixl_agent, count: int) -> dict[str, list[bytes]]:
    """Notifications, once so many have come."""
    found: dict[str, list[bytes]] = {}

    def has_all() -> bool:
        for name, more in one.get_new_notifs().items():
            found.setdefault(name, []).extend(more)
        return sum(map(len, found.values())) >= count

    wait_until(has_all, f"{count} notifications")
    return found


def raises_until(call: Callable[[], Any], kind: type[Exception]) -> int:
    """How often the call raised before it did not."""
    count = 0

    def succeeds() -> bool:
        nonlocal count
        try:
            call()
        except kind:
            count += 1
            return False
        return True

    wait_until(succeeds, f"no {kind.__name__} any more")
    return count


class FarAgent(FarEngine):
    """The near end."""

    program: ClassVar[str] = __file__

    def metadata(self) -> bytes:
        return base64.b64decode(self.told())


class Far:
    """The far end: each method is an operation."""

    def start(self, config: dict[str, Any]) -> str:
        self.agent = agent("far", **config)
        self.buffers: dict[int, np.ndarray] = {}
        return self.agent.name

    def register(self, nbytes: int, seed: int | None = None) -> int:
        memory = registered(self.agent, nbytes, seed)
        self.buffers[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def told(self) -> str:
        return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def read(self, address: int) -> str:
        return base64.b64encode(self.buffers[address].tobytes()).decode()

    def fill(self, address: int, value: int) -> None:
        self.buffers[address][:] = value


if __name__ == "__main__":
    main(Far())
