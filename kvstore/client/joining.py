# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a store meet: in a directory of this host, or at an index."""

from __future__ import annotations

from kvstore.client.owners import Membership
from kvstore.config import Config
from kvstore.membership.directory import Directory
from kvstore.membership.members import Members, host_towards

__all__ = ["join"]


def join(config: Config) -> tuple[Membership, str]:
    """How this process finds the others, and the address of this host that they use."""
    if not config.index:
        return Directory(config.directory), config.host or config.engine.host
    try:
        host = config.host or host_towards(config.index)
    except OSError as exc:
        raise ValueError(
            f"no address of this host leads to the index: {exc}; give one that other hosts reach"
            " as host"
        ) from exc
    return Members(config.index, host, config.keys), host
