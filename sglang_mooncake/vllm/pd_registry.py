# SPDX-License-Identifier: Apache-2.0
"""A prefill server's place where decode servers look it up."""

from __future__ import annotations

from bootstrap_server import BootstrapServer, RankLease, RankRecord
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.vllm.pd_options import PdOptions

__all__ = ["Registration"]

REGISTER_TIMEOUT_S = 60.0


class Registration:
    """The rank's lease at a registry: this server's own, unless the operator has started one."""

    def __init__(self, options: PdOptions, host: str, record: RankRecord) -> None:
        """Raises ``BootstrapError`` if its own registry cannot listen, or the other one is not
        reached within 60 s, or has another server."""
        keys = options.keys
        self._server: BootstrapServer | None = None
        #: "host:port", for decode servers.
        self.address = options.registry or ""
        if options.registry is None:
            self._server = BootstrapServer(host, options.registry_port, keys=keys.registry)
            self.address = f"[{host}]" if ":" in host else host
            self.address += f":{self._server.port}"
        try:
            self._lease = RankLease(
                self.address,
                signed(record, keys.record),
                deadline_s=REGISTER_TIMEOUT_S,
                keys=keys.registry,
            )
        except BaseException:
            self._close_server()
            raise

    def close(self) -> None:
        """Decode servers look it up in vain. Idempotent."""
        self._lease.close()
        self._close_server()

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
