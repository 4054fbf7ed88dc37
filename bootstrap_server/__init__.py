# SPDX-License-Identifier: Apache-2.0
"""Bootstrap server: who the prefill ranks are, and which of them feed a decode rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bootstrap_server.client.bootstrap_client import BootstrapClient
from bootstrap_server.client.http import HttpClient, split_address
from bootstrap_server.client.lease import RankLease, close_leases
from bootstrap_server.ranks.errors import (
    BootstrapError,
    LeaseLost,
    MismatchError,
    NeverServed,
    NotReady,
    PlaceTaken,
    RegistrationRefused,
    Unreachable,
    Why,
)
from bootstrap_server.ranks.matching import (
    CPTransfer,
    PageShare,
    Source,
    check_configs,
    check_formats,
    cp_transfer,
    dealt_over,
    holding,
    prefill_dp_rank,
    sending,
    sources,
)
from bootstrap_server.ranks.rank_status import (
    FailureStatus,
    PeerStatus,
    RailStatus,
    RankStatus,
    TransportRate,
)
from bootstrap_server.ranks.records import (
    Instance,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    SpecLayout,
    Topology,
    instance_name_of,
)
from bootstrap_server.ranks.sglang_http import SGLangParallel

if TYPE_CHECKING:
    from bootstrap_server.admission.access import StatusPage
    from bootstrap_server.server import BootstrapServer

__all__ = [
    "BootstrapClient",
    "BootstrapError",
    "BootstrapServer",
    "CPTransfer",
    "FailureStatus",
    "HttpClient",
    "Instance",
    "InstanceConfig",
    "KVFormat",
    "LeaseLost",
    "MismatchError",
    "NeverServed",
    "NotReady",
    "PageShare",
    "PeerStatus",
    "PlaceTaken",
    "RailStatus",
    "Rank",
    "RankCoords",
    "RankLease",
    "RankRecord",
    "RankStatus",
    "RegistrationRefused",
    "SGLangParallel",
    "Source",
    "SpecLayout",
    "StatusPage",
    "Topology",
    "TransportRate",
    "Unreachable",
    "Why",
    "check_configs",
    "check_formats",
    "close_leases",
    "cp_transfer",
    "dealt_over",
    "holding",
    "instance_name_of",
    "prefill_dp_rank",
    "sending",
    "sources",
    "split_address",
]


def __getattr__(name: str) -> Any:
    """``__version__``, which is looked up when somebody asks; and what imports aiohttp, which takes
    as long as all else here: processes that use the secret or the clock alone do without."""
    if name == "__version__":
        from bootstrap_server.build import version

        return version()
    if name == "BootstrapServer":
        from bootstrap_server.server import BootstrapServer

        return BootstrapServer
    if name == "StatusPage":
        from bootstrap_server.admission.access import StatusPage

        return StatusPage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
