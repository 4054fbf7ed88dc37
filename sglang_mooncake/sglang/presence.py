# SPDX-License-Identifier: Apache-2.0
"""Decode ranks at registries that run by themselves: for status pages, metrics, and routers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from bootstrap_server import (
    BootstrapClient,
    Rank,
    RankLease,
    RankRecord,
    RankStatus,
    instance_name_of,
)
from bootstrap_server.admission.signatures import signed, signed_name
from sglang_mooncake.context import RankContext
from sglang_mooncake.sglang.config import Config

__all__ = ["presence_leases"]


def presence_leases(
    context: RankContext,
    config: Config,
    server: str,
    http_port: int,
    epoch: int,
    make_report: Callable[[], Callable[[], RankStatus]],
) -> list[RankLease]:
    """A lease of this decode rank at each registry that the settings name. Never waits: only
    routers look a decode rank up, so the server serves whether or not the leases reach a registry.

    Args:
        server: an address that the ranks of this server have in common, and no others.
        http_port: of SGLang's HTTP API on this node.
        epoch: of this life of the rank, in nanoseconds since 1970.
        make_report: called for each lease; what it returns is called in the lease's thread.
    """
    name = instance_name_of(server)
    record = signed(
        RankRecord(context.config, Rank(context.coords, context.host, http_port, epoch)),
        config.keys.record,
        signed_name(name, "decode"),
    )
    return [
        RankLease(
            address,
            record,
            instance=name,
            deadline_s=None,
            keys=config.keys.registry,
            status=make_report(),
            make_client=functools.partial(BootstrapClient, role="decode"),
        )
        for address in config.registry
    ]
