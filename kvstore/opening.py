# SPDX-License-Identifier: Apache-2.0
"""The tier below an owner's memory that its settings name."""

from __future__ import annotations

from typing import Final

from kvstore.config import Config
from kvstore.policies import POLICIES
from kvstore.tiers.base import Tier
from kvstore.tiers.bucket import open_bucket
from kvstore.tiers.disk import Disk
from kvstore.tiers.objects import Objects

__all__ = ["open_tier"]

REQUEST_TIMEOUT_S: Final = 10.0
"""Of a request to an object store; it moves up to 16 MiB."""


def open_tier(config: Config, object_bytes_max: int) -> tuple[str, Tier] | None:
    """What the log calls it, and the tier; None if there is none. Raises what ``SegmentFiles``,
    ``open_bucket`` and ``Objects`` raise."""
    policy = POLICIES[config.policy]
    if config.disk is not None:
        return str(config.disk), Disk(config.disk, config.disk_size, object_bytes_max, policy)
    if config.objects:
        bucket = open_bucket(config.objects, REQUEST_TIMEOUT_S)
        return config.objects, Objects(
            bucket, config.objects, config.objects_size, object_bytes_max, policy
        )
    return None
