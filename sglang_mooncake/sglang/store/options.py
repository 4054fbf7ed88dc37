# SPDX-License-Identifier: Apache-2.0
"""What the operator says of the store: ``linker_extra_config``, or HiCache's extra config."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import te
from kvstore.config import Config
from kvstore.values import typed
from sglang_mooncake.sglang.config import Config as Settings
from te.transports.registry import WITHOUT_DEVICES

__all__ = ["Options", "config_of"]

LAYERS_PER_READ: Final = 4
LOAD_TIMEOUT_S: Final = 10.0
STALL_TIMEOUT_S: Final = 1.0
CONNECT_TIMEOUT_S: Final = 2.0
"""An owner that sends nothing of a load for so long is given up. SGLang's forward waits for it."""

#: Settings that are not the store's own: default and kind.
OWN: Final[dict[str, tuple[Any, str]]] = {
    "weights": (None, "str | None"),
    "layers_per_read": (LAYERS_PER_READ, "int"),
    "load_timeout_s": (LOAD_TIMEOUT_S, "float"),
    "admission": (True, "bool"),
}


@dataclass(frozen=True)
class Options:
    """The settings of one server: those of ``kvstore.Config``, and these."""

    store: Config
    #: Tells the weights apart. Servers with the same text share pages. Without it the files of the
    #: model tell.
    weights: str | None
    #: Layers that one read brings, where the device's pools are read into.
    layers_per_read: int
    #: A load that takes longer is given up.
    load_timeout_s: float
    #: Loads only what is expected to be loaded in less time than it is computed.
    admission: bool

    @classmethod
    def of(cls, given: Mapping[str, Any], label: str = "") -> Self:
        """``ValueError`` names what is unknown or wrong. ``label``: see ``te.Config.label``."""
        rest = dict(given)
        weights, layers, timeout_s, admission = (
            typed(name, rest.pop(name, default), kind) for name, (default, kind) in OWN.items()
        )
        if layers < 1 or not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(
                f"layers_per_read={layers} and load_timeout_s={timeout_s} must be positive"
            )
        store = config_of(rest, Settings.from_environment(), OWN, label)
        return cls(store, weights, layers, timeout_s, admission)


def config_of(
    given: Mapping[str, Any], settings: Settings, others: Collection[str] = (), label: str = ""
) -> Config:
    """The store's own settings, with the hand-over's for its engine. ``ValueError`` names what is
    unknown or wrong. ``others``: names that the caller has taken out."""
    store = Config.of(given, settings.keys, others)
    return replace(store, engine=replace(_engine(settings, store), label=label))


def _engine(settings: Settings, store: Config) -> te.Config:
    """With an index as the hand-over's engine. Without, all processes are on one host, and need no
    device."""
    given: dict[str, Any] = {"transports": WITHOUT_DEVICES}
    if store.index:
        port, port_last = settings.ports or (0, None)
        given = {
            **settings.engine,
            "keys": store.keys.data,
            "encrypt": settings.encrypt,
            "port": port,
            "port_last": port_last,
            "nics": settings.nics,
            "topology": settings.topology,
        }
        if settings.transports:
            given["transports"] = settings.transports
    given |= {"status_dir": settings.status_dir, "stall_timeout_s": STALL_TIMEOUT_S}
    return te.Config(**given | {"connect_timeout_s": CONNECT_TIMEOUT_S})
