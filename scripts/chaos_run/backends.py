# SPDX-License-Identifier: Apache-2.0
"""Whose hand-over runs, and with which settings: ours, or one that SGLang brings. Pure.

Stock backends get what makes them notice and mend most: the shortest heartbeats that SGLang takes,
and deadlines such as ours. All move bytes over TCP, as a network is between hosts of this script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

__all__ = ["BACKENDS", "STOCK", "Backend", "Stock"]

Backend: TypeAlias = Literal["ours", "mooncake", "nixl"]
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)

#: Of each of SGLang's backends. Its own are twice and ten times as long.
_SGLANG: Final = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    # A list of plugins that are loaded; ours is none of them.
    "SGLANG_PLUGINS": "none",
    # What they lack on a CPU: see the shim.
    "CPU_SERVING_STOCK": "1",
}


@dataclass(frozen=True)
class Stock:
    """A backend that SGLang brings.

    flag: of `--disaggregation-transfer-backend`. packages: distributions that `scripts/setup peer`
    installs. settings: environment variables. remark: what a reader of figures has to know.
    """

    flag: str
    packages: tuple[str, ...]
    settings: Mapping[str, str]
    remark: str = ""


STOCK: Final[Mapping[Backend, Stock]] = {
    "mooncake": Stock(
        flag="mooncake",
        packages=("mooncake-transfer-engine-non-cuda",),
        settings=_SGLANG
        | {
            "MOONCAKE_PROTOCOL": "tcp",
            "MC_FORCE_TCP": "1",
            # Its default refuses transfers of more than 1,024 blocks.
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
            # Defaults: 30 s. Those of te: 5 s.
            "MC_TRANSFER_TIMEOUT": "5",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
            "MC_TCP_STATUS_TIMEOUT_SEC": "5",
            # SGLang asks a session that has failed again after 30 s, then less and less often.
            "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "1",
            "SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S": "2",
        },
        remark="SGLang copies Mooncake's indices of pages by an event of a GPU: here its sender"
        " gets them as other backends do",
    ),
    "nixl": Stock(
        flag="nixl",
        packages=("nixl", "nixl-cu12"),
        settings=_SGLANG
        | {
            # UCX would copy between processes of one machine, past the network that is disturbed.
            "UCX_TLS": "tcp",
        },
        remark="SGLang registers KV pools with NIXL as memory of a GPU, which UCX refuses of host"
        " memory: here the word for it means host memory",
    ),
}
