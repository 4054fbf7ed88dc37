# SPDX-License-Identifier: Apache-2.0
"""The lower tier that the settings of an owner name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.config import Config
from kvstore.memory.policies import POLICIES
from kvstore.tiers.base import Tier
from kvstore.tiers.bucket import open_bucket
from kvstore.tiers.disk import Disk
from kvstore.tiers.object_tombstones import ObjectTombstones
from kvstore.tiers.objects import Objects
from kvstore.tiers.stacked import Stacked
from kvstore.tiers.tombstones import Tombstones

__all__ = ["OpenedTier", "open_tier"]

REQUEST_TIMEOUT_S: Final = 10.0
"""Of a request to an object store; it moves up to 16 MiB."""


TOMBSTONES: Final = "removed"
"""A file in the disk's directory."""


@dataclass(frozen=True)
class OpenedTier:
    """A tier."""

    #: What the log calls it.
    label: str
    tier: Tier
    #: Where it is told at once what was removed. Object storage below a disk follows that in its
    #: own time, so that the disk's file tells it for both.
    stones: Tombstones | ObjectTombstones


def open_tier(config: Config, object_bytes_max: int) -> OpenedTier | None:
    """None if there is none. Raises what ``SegmentFiles``, ``Tombstones``, ``open_bucket`` and
    ``Objects`` raise."""
    disk = _open_disk(config, object_bytes_max)
    try:
        objects = _open_objects(config, object_bytes_max)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    if disk is None or config.disk is None:
        return None if objects is None else OpenedTier(config.objects, objects, objects.tombstones)
    tier: Tier = disk
    label = str(config.disk)
    if objects is not None:
        tier, label = Stacked(disk, objects), f"{label} and {config.objects}"
    try:
        return OpenedTier(label, tier, Tombstones(config.disk / TOMBSTONES))
    except BaseException:
        tier.close()
        raise


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
