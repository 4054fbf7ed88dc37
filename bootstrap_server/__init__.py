# SPDX-License-Identifier: Apache-2.0
"""Bootstrap server: who the prefill ranks are, and which of them feed a decode rank."""

from __future__ import annotations

from bootstrap_server.client import BootstrapClient
from bootstrap_server.errors import (
    BootstrapError,
    MismatchError,
    NotReady,
    RegistrationRefused,
    Unreachable,
)
from bootstrap_server.matching import check_configs, check_formats, prefill_dp_rank, sources
from bootstrap_server.records import (
    Instance,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    SpecLayout,
    Topology,
)
from bootstrap_server.server import BootstrapServer
from bootstrap_server.sglang_http import SGLangParallel

__all__ = [
    "BootstrapClient",
    "BootstrapError",
    "BootstrapServer",
    "Instance",
    "InstanceConfig",
    "KVFormat",
    "MismatchError",
    "NotReady",
    "Rank",
    "RankCoords",
    "RankRecord",
    "RegistrationRefused",
    "SGLangParallel",
    "SpecLayout",
    "Topology",
    "Unreachable",
    "check_configs",
    "check_formats",
    "prefill_dp_rank",
    "sources",
]
