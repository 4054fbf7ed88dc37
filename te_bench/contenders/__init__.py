# SPDX-License-Identifier: Apache-2.0
"""Contenders by name. A variant is one way to run a family: ``mooncake`` has two."""

from __future__ import annotations

import importlib
from typing import Final

from te_bench.contenders.base import Absent, Contender

__all__ = ["ALONE", "OURS", "VARIANTS", "Absent", "Contender", "family", "load"]

#: Families that can be asked for by name, and the variants that are tried for each. A floor's
#: variants depend on the rest: ``floor.fitting``.
VARIANTS: Final = {
    "te": ("te",),
    "te-staged": ("te-staged",),
    "te-host": ("te-host",),
    "device-copy": ("device-copy",),
    "mooncake": ("mooncake", "mooncake-pool"),
    "nixl": ("nixl",),
}

#: Those that are run by te's own interpreter; and that are one process instead of two.
OURS: Final = ("te", "te-staged", "te-host", "device-copy")
ALONE: Final = ("device-copy",)

_CLASSES: Final = {
    "te": "te_bench.contenders.te_engine:TeEngine",
    "te-staged": "te_bench.contenders.staged:StagedTeEngine",
    "te-host": "te_bench.contenders.te_engine:HostTeEngine",
    "device-copy": "te_bench.contenders.device_copy:DeviceCopy",
    "mooncake": "te_bench.contenders.mooncake:Mooncake",
    "mooncake-pool": "te_bench.contenders.mooncake:MooncakePool",
    "nixl": "te_bench.contenders.nixl:Nixl",
    "floor": "te_bench.contenders.floor:Floor",
}


def family(variant: str) -> str:
    """``floor:tcp-2`` is a floor, ``mooncake-pool`` is mooncake; ``module:Class`` is itself."""
    if variant.startswith("floor:"):
        return "floor"
    for name, variants in VARIANTS.items():
        if variant in variants:
            return name
    return variant


def load(variant: str) -> type[Contender]:
    """The class, of this package or, named as ``module:Class``, of anybody's."""
    kind = "floor" if variant.startswith("floor:") else variant
    module, _, name = _CLASSES.get(kind, kind).partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Absent(f"the contender {variant} cannot be loaded: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Contender)):
        raise Absent(f"{variant} is not a te_bench.contenders.Contender")
    return loaded
