# SPDX-License-Identifier: Apache-2.0
"""What the operator says of the store: vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from kvstore.config import Config
from kvstore.networking import config_of
from kvstore.values import typed

__all__ = ["Options"]

LOAD_TIMEOUT_S: Final = 10.0
#: Settings that are not the store's own: default and kind.
OWN: Final[dict[str, tuple[Any, str]]] = {
    "weights": (None, "str | None"),
    "load_timeout_s": (LOAD_TIMEOUT_S, "float"),
}


@dataclass(frozen=True)
class Options:
    """The settings of one server: those of ``kvstore.Config``, and these."""

    store: Config
    #: Tells the weights apart. Servers with the same text share pages. Without it every
    #: byte of the files that they lie in is hashed.
    weights: str | None
    #: A load that takes longer is given up, and its pages are computed.
    load_timeout_s: float

    @classmethod
    def of(cls, given: Mapping[str, Any], label: str = "") -> Self:
        """``ValueError`` names what is unknown or wrong. ``label``: see ``te.Config.label``."""
        rest = dict(given)
        weights, timeout_s = (
            typed(name, rest.pop(name, default), kind) for name, (default, kind) in OWN.items()
        )
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"load_timeout_s={timeout_s} must be a positive number of seconds")
        store = config_of(rest, OWN)
        store = replace(store, engine=replace(store.engine, label=label))
        return cls(store, weights, timeout_s)
