# SPDX-License-Identifier: Apache-2.0
"""Servers that do not take a process for dead that a busy machine has not run for some seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cpu_serving.servers import ServerOptions

__all__ = ["PATIENT", "patient"]

#: Of ranks to each other: 30 s, for silence and for transfers that do not move. A process that is
#: killed is noticed at once.
PATIENT: Final = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "0.5",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "60",
    "SGLANG_MOONCAKE_LINK_TIMEOUT_S": "30",
    "SGLANG_MOONCAKE_STALL_TIMEOUT_S": "30",
}


def patient(options: ServerOptions) -> ServerOptions:
    """The same but for these; what the options say of them counts."""
    return replace(options, extra_env={**PATIENT, **options.extra_env})
