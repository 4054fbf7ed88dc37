# SPDX-License-Identifier: Apache-2.0
"""What the module ``mooncake.store`` holds beside the class, and why it lacks the rest."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final

from sglang_mooncake.faces.finder import lacking

__all__ = [
    "CONTENTS",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]

U64_END: Final = 1 << 64


class SoftPinAction(enum.IntEnum):
    """Whether a put pins softly. The store has no such pins: objects are evicted by their use."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(enum.IntEnum):
    """Of one copy. Only whole ones are found here."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class ObjectDataType(enum.IntEnum):
    """What an object is. The store does not ask."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


@dataclass
class ReplicateConfig:
    """How an object shall be kept. All of it is taken, and none of it used: how many copies there
    are is the store's setting (`copies`), where they lie and how long is its own to decide."""

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    preferred_segments: list[str] = field(default_factory=list)
    preferred_nof_segments: list[str] = field(default_factory=list)
    preferred_segment: str = ""
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    #: One for each key of a batch.
    group_ids: list[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"ReplicateConfig has no {name}")
        if name == "soft_pin_ttl_ms" and value is not None and not _is_u64(value):
            raise TypeError(f"soft_pin_ttl_ms={value!r} must be None or a number of milliseconds")
        object.__setattr__(self, name, value)

    def check(self, count: int) -> None:
        """``ValueError`` for what Mooncake refuses, too. ``count``: keys of the call."""
        if self.soft_pin_ttl_ms is not None and self.soft_pin_action is not SoftPinAction.ENABLE:
            raise ValueError("soft_pin_ttl_ms is given, and soft_pin_action is not ENABLE")
        if self.group_ids is not None and len(self.group_ids) != count:
            raise ValueError(f"{len(self.group_ids)} group_ids and {count} keys")


def _is_u64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < U64_END


@dataclass(frozen=True)
class ReplicaDescriptor:
    """Where a copy lies."""

    is_in_memory: bool
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return self.is_in_memory

    def is_disk_replica(self) -> bool:
        """Of a file system that all hosts have; the store has none."""
        return False

    def is_local_disk_replica(self) -> bool:
        """On the disk, or in the object storage, of a process."""
        return not self.is_in_memory


_NODES: Final = "the store chooses the memory that it lends"
_TENSORS: Final = "the store knows bytes, and no tensors"
_LACKS: Final[dict[str, str]] = {
    "MooncakeDistributedNoFRegister": "the store has no memory over NVMe-oF",
    "ParallelAxis": _TENSORS,
    "ReadTarget": _TENSORS,
    "TensorParallelism": _TENSORS,
    "bind_to_numa_node": _NODES,
    "get_alloc_func_addr": _NODES,
    "get_free_func_addr": _NODES,
}
CONTENTS: Final[dict[str, object]] = {
    "__getattr__": lacking("mooncake.store over kvstore", "mooncake", _LACKS),
    "ObjectDataType": ObjectDataType,
    "ReplicaDescriptor": ReplicaDescriptor,
    "ReplicaStatus": ReplicaStatus,
    "ReplicateConfig": ReplicateConfig,
    "SoftPinAction": SoftPinAction,
}
