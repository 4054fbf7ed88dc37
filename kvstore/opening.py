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
from kvstore.tiers.stacked import Stacked

__all__ = ["open_tier"]

REQUEST_TIMEOUT_S: Final = 10.0
"""Of a request to an object store; it moves up to 16 MiB."""


def open_tier(config: Config, object_bytes_max: int) -> tuple[str, Tier] | None:
    """What the log calls it, and the tier; None if there is none. Raises what ``SegmentFiles``,
    ``open_bucket`` and ``Objects`` raise."""
    disk = _open_disk(config, object_bytes_max)
    try:
        objects = _open_objects(config, object_bytes_max)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    if disk is not None and objects is not None:
        return f"{config.disk} and {config.objects}", Stacked(disk, objects)
    if disk is not None:
        return str(config.disk), disk
    return None if objects is None else (config.objects, objects)


def _open_disk(config: Config, object_bytes_max: int) -> Disk | None:
    if config.disk is None:
        return None
    return Disk(config.disk, config.disk_size, object_bytes_max, POLICIES[config.policy])


def _open_objects(config: Config, object_bytes_max: int) -> Objects | None:
    if not config.objects:
        return None
    bucket = open_bucket(config.objects, REQUEST_TIMEOUT_S)
    policy = POLICIES[config.policy]
    return Objects(bucket, config.objects, config.objects_size, object_bytes_max, policy)
