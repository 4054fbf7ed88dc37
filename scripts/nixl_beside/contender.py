# SPDX-License-Identifier: Apache-2.0
"""For ``te bench --peers nixl,nixl_beside.contender:Face``: NIXL's calls over te, beside te's own
calls and NVIDIA's NIXL."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from cpu_serving.ports import HOST

from sglang_mooncake.sglang import drop_in
from sglang_mooncake.sglang.config import Config
from te.version import version
from te_bench.contenders.nixl import Nixl
from te_bench.memory import Memory
from te_bench.protocol import Info

__all__ = ["Face"]


class Face(Nixl):
    """The same calls as of NVIDIA's."""

    SPINS_IDLE: ClassVar[bool] = False

    def version(self) -> str:
        return f"nixl over te {version()}"

    def open(self, memory: Memory) -> Info:
        wanted = self.setup.transport
        transports = () if wanted == "auto" else (wanted,)
        drop_in.install(replace(Config.from_environment(), host=HOST, transports=transports))
        return super().open(memory)
