# SPDX-License-Identifier: Apache-2.0
"""A prefill server's place where decode servers look it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    RankLease,
    RankRecord,
    close_leases,
)
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.given_up import GivenUpWatch
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.pd_requests import GivenUp

__all__ = ["Registration"]

REGISTER_TIMEOUT_S = 60.0
#: Of prompts that were given up, until the workers are told with the next step.
GIVEN_UP_MAX: Final = 4_096


class Registration:
    """The leases of a server's ranks at a registry: this server's own, unless the operator has
    started one. Decode servers find the server once all of its ranks are there, and leave word
    there of prompts that they will not ask for, as they cannot reach the server."""

    def __init__(self, options: PdOptions, host: str, records: Sequence[RankRecord]) -> None:
        """``records``: of all TP ranks. Raises ``BootstrapError`` if its own registry cannot
        listen, or the other one is not reached within 60 s, or has another server."""
        keys = options.keys
        self._given_up: deque[GivenUp] = deque(maxlen=GIVEN_UP_MAX)
        with ExitStack() as stack:
            #: "host:port", for decode servers.
            self.address = options.registry or ""
            if options.registry is None:
                server = BootstrapServer(host, options.registry_port, keys=keys.registry)
                stack.callback(server.close)
                self.address = f"[{host}]" if ":" in host else host
                self.address += f":{server.port}"
            leases: list[RankLease] = []
            stack.callback(close_leases, leases)
            for record in records:
                lease = RankLease(
                    self.address,
                    signed(record, keys.record),
                    deadline_s=REGISTER_TIMEOUT_S,
                    keys=keys.registry,
                )
                leases.append(lease)
            watch = GivenUpWatch(
                lambda: BootstrapClient(self.address, keys=keys.registry),
                lambda *said: self._given_up.append(GivenUp(*said)),
            )
            stack.callback(watch.close)
            watch.start()
            self._opened = stack.pop_all()

    def take_given_up(self) -> list[GivenUp]:
        """What decode servers have left since the last call. Never waits."""
        return [self._given_up.popleft() for _ in range(len(self._given_up))]

    def close(self) -> None:
        """Decode servers look it up in vain. Idempotent."""
        self._opened.close()
