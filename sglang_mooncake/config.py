# SPDX-License-Identifier: Apache-2.0
"""Our own settings, all from the environment of the SGLang server, all with the prefix
`SGLANG_MOONCAKE_`. What SGLang has a flag or variable for is taken from SGLang (`seam.py`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_mooncake.registries import Registries
from te.config import TRANSPORTS

__all__ = ["SGLANGS_OWN", "Config", "ConfigError"]

_PREFIX = "SGLANG_MOONCAKE_"
#: SGLang's own variables that begin like ours. They tune the engine of the mooncake package or its
#: memory and mean nothing to the hand-over, but must not stop a server whose recipe sets them.
SGLANGS_OWN = frozenset(
    {
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
        "SGLANG_MOONCAKE_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
        "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES",
        "SGLANG_MOONCAKE_SEND_AUX_TCP",
    }
)


class ConfigError(ValueError):
    """A variable has a value that we cannot use; the sentence names it."""


@dataclass(frozen=True, slots=True)
class Config:
    """
    HOST: address that the transfer engine listens on and tells its peers (default: the address
        that SGLang itself uses between hosts, see SGLANG_HOST_IP).
    REGISTER_TIMEOUT_S: how long a prefill rank tries to reach the bootstrap server at start-up.
    LINK_TIMEOUT_S: how long a decode rank waits for a prefill rank's answer to its hello.
    STALL_TIMEOUT_S: a transfer without progress this long fails.
    TRANSPORTS: transports to use, the preferred one first, separated by commas (default: all of
        te's that can move the KV cache). With one alone, not getting it is an error. Without it a
        wish for TCP that is Mooncake's is heard: MC_FORCE_TCP=1 (SGLang sets it for the backend
        mooncake_tcp), MOONCAKE_PROTOCOL=tcp.
    NICS: RDMA devices to use, patterns separated by commas, `!` before those to leave out
        (default: those of --disaggregation-ib-device, else all).
    TOPOLOGY: JSON file that says which RDMA devices memory uses, instead of NICS and of what is
        found (te.Config.topology; Mooncake's MC_CUSTOM_TOPO_JSON).
    REGISTRIES: registries (`bootstrap_host` and `bootstrap_port` of a request) that a decode rank
        asks: names, addresses or networks, with or without a port, separated by commas
        (`Registries`; default: any).
    STATS_DIR: directory for one JSON file per scheduler process (default: none are written).
    """

    host: str | None = None
    register_timeout_s: float = 60.0
    link_timeout_s: float = 10.0
    stall_timeout_s: float = 5.0
    transports: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    topology: Path | None = None
    registries: Registries = field(default_factory=Registries)
    stats_dir: Path | None = None

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Config:
        """Raises ConfigError for an unknown variable with our prefix, or a value out of range."""
        given = {
            name.removeprefix(_PREFIX): value
            for name, value in environment.items()
            if name.startswith(_PREFIX)
        }
        transports = _transports(given.pop("TRANSPORTS", ""), environment)
        for name in SGLANGS_OWN:
            given.pop(name.removeprefix(_PREFIX), None)
        stats_dir, topology = given.pop("STATS_DIR", ""), given.pop("TOPOLOGY", "")
        config = Config(
            host=given.pop("HOST", "") or None,
            register_timeout_s=_seconds(given, "REGISTER_TIMEOUT_S", 60.0),
            link_timeout_s=_seconds(given, "LINK_TIMEOUT_S", 10.0),
            stall_timeout_s=_seconds(given, "STALL_TIMEOUT_S", 5.0),
            transports=transports,
            nics=_names(given.pop("NICS", "")),
            topology=Path(topology) if topology else None,
            registries=_registries(given.pop("REGISTRIES", "")),
            stats_dir=Path(stats_dir) if stats_dir else None,
        )
        if config.topology is not None and config.nics:
            raise ConfigError(
                f"{_PREFIX}TOPOLOGY is complete: {_PREFIX}NICS cannot be given beside it"
            )
        if given:
            unknown = ", ".join(sorted(_PREFIX + name for name in given))
            raise ConfigError(f"unknown variable {unknown}: see sglang_mooncake/config.py")
        return config


def _transports(text: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """None if nobody asked for any."""
    names = _names(text)
    if not names:
        wishes = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
        for name, value in wishes.items():
            if environment.get(name, "").strip().lower() == value:
                return ("tcp",)
        return ()
    if len(set(names)) != len(names) or not set(names) <= set(TRANSPORTS):
        known = ", ".join(TRANSPORTS)
        raise ConfigError(f"{_PREFIX}TRANSPORTS={text!r}: give some of {known}, each once")
    return names


def _registries(text: str) -> Registries:
    try:
        return Registries(_names(text))
    except ValueError as error:
        raise ConfigError(f"{_PREFIX}REGISTRIES={text!r}: {error}") from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _seconds(given: dict[str, str], name: str, default: float) -> float:
    text = given.pop(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.01 <= value <= 86_400:
        raise ConfigError(f"{_PREFIX}{name}={text!r}: give seconds between 0.01 and 86400")
    return value
