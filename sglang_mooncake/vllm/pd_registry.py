# SPDX-License-Identifier: Apache-2.0
"""A prefill server's place where decode servers look it up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from bootstrap_server import BootstrapServer, RankLease, RankRecord
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.vllm.pd_options import PdOptions

__all__ = ["Registration"]

REGISTER_TIMEOUT_S = 60.0


class Registration:
    """The leases of a server's ranks at a registry: this server's own, unless the operator has
    started one. Decode servers find the server once all of its ranks are there."""

    def __init__(self, options: PdOptions, host: str, records: Sequence[RankRecord]) -> None:
        """``records``: of all TP ranks. Raises ``BootstrapError`` if its own registry cannot
        listen, or the other one is not reached within 60 s, or has another server."""
        keys = options.keys
        with ExitStack() as stack:
            #: "host:port", for decode servers.
            self.address = options.registry or ""
            if options.registry is None:
                server = BootstrapServer(host, options.registry_port, keys=keys.registry)
                stack.callback(server.close)
                self.address = f"[{host}]" if ":" in host else host
                self.address += f":{server.port}"
            for record in records:
                lease = RankLease(
                    self.address,
                    signed(record, keys.record),
                    deadline_s=REGISTER_TIMEOUT_S,
                    keys=keys.registry,
                )
                stack.callback(lease.close)
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Decode servers look it up in vain. Idempotent."""
        self._opened.close()
