# SPDX-License-Identifier: Apache-2.0
"""What the operator says of the hand-over between prefill and decode servers: vLLM's
``kv_connector_extra_config``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Final, Self

from bootstrap_server import split_address
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_keys
from bootstrap_server.ranks.errors import BootstrapError
from kvstore.values import typed
from sglang_mooncake.registries import Registries

__all__ = ["PdOptions"]

REGISTRY_PORT: Final = 8998
#: Settings that are lists of texts.
LISTS: Final = ("registries", "transports", "nics")


@dataclass(frozen=True)
class PdOptions:
    """The settings of one server. ``ValueError`` for one that is out of range."""

    #: The address of this server that the others reach. By default vLLM's own (VLLM_HOST_IP).
    host: str | None = None
    #: Prefill: "host:port" of a registry that runs already. Without it the server has its own.
    registry: str | None = None
    #: Prefill: the port of its own.
    registry_port: int = REGISTRY_PORT
    #: Decode: which registries a request may name (`Registries`); without it, any.
    registries: Registries = field(default_factory=Registries)
    #: Prefill: how long the blocks of a computed prompt wait until a decode server asks for them.
    hold_timeout_s: float = 120.0
    #: Decode: how long a prompt may take to be found, and then to arrive. After that it is
    #: computed here.
    load_timeout_s: float = 60.0
    #: Decode: how long a prefill server may take to answer the first message.
    link_timeout_s: float = 10.0
    #: How long the other server's ranks may show no sign of life. Up to half a second is added.
    silence_timeout_s: float = 4.0
    #: How long a transfer may make no progress (`te.Config`).
    stall_timeout_s: float = 5.0
    #: Of the transfer engine (`te.Config`); without them, all that there are.
    transports: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    #: Made of ``secret_file``.
    keys: Keys = field(default_factory=Keys, repr=False)
    #: The server may have a public address without a secret.
    insecure: bool = False
    #: Where a file with the rank's counters is kept.
    stats_dir: Path | None = None
    #: Tells the weights apart, on both servers. Without it a few bytes of every tensor are hashed.
    weights: str | None = None

    def __post_init__(self) -> None:
        for name in (one.name for one in fields_of(self) if one.name.endswith("_s")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a positive number of seconds")
        if not 0 <= self.registry_port <= 65_535:
            raise ValueError(f"registry_port={self.registry_port} must be between 0 and 65535")
        if self.registry is not None:
            try:
                split_address(self.registry)
            except BootstrapError as error:
                raise ValueError(f"registry={self.registry!r}: {error}") from error

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """``ValueError`` names what is unknown or wrong."""
        kinds = {one.name: str(one.type) for one in fields_of(cls) if one.name != "keys"}
        kinds["secret_file"] = "Path"
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"the hand-over has no setting {name!r}{hint}")
            values[name] = _texts(name, value) if name in LISTS else typed(name, value, kinds[name])
        if "registries" in values:
            values["registries"] = Registries(values["registries"], "registries")
        if "secret_file" in values:
            values["keys"] = read_keys(values.pop("secret_file"))
        return cls(**values)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}={value!r} must be a list of texts")
    return tuple(value)
