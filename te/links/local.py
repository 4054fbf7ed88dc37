# SPDX-License-Identifier: Apache-2.0
"""The engine as its links see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te.config import Config
from te.plane._core import Engine as Plane
from te.verbs.fabric import Fabric

if TYPE_CHECKING:
    from te.links.keeper import Keeper
    from te.links.sharing import Sharing

__all__ = ["Local", "SharedMemory"]


@dataclass(frozen=True)
class SharedMemory:
    """Memory that the engine allocated, which peers on this host may map."""

    #: Of its region: another one at the same address has another.
    serial: int
    address: int
    nbytes: int
    fd: int


@dataclass(frozen=True)
class Local:
    """Who the engine is and what it is made of."""

    id: str
    epoch: int
    config: Config
    plane: Plane
    #: Who has mapped what of it.
    sharing: Sharing
    #: RDMA devices; None without any.
    fabric: Fabric | None
    #: Why there are none.
    fabric_problem: str
    keeper: Keeper
