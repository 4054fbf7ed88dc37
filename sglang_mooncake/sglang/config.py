# SPDX-License-Identifier: Apache-2.0
"""Our own settings, all from the environment of the SGLang server, all with the prefix
`SGLANG_MOONCAKE_`. What SGLang has a flag or variable for is taken from SGLang (`seam.py`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap_server.secret import Keys, split_secrets
from bootstrap_server.secret_file import read_secret_file
from sglang_mooncake.context import SettingNames
from sglang_mooncake.registries import Registries
from sglang_mooncake.sglang.mooncake_variables import read_courtesies
from sglang_mooncake.sglang.values import ConfigError, integer, names, port_range, seconds, switch
from sglang_mooncake.stats import STORY_ROOMS
from te.config import LIMITS, TRANSPORTS
from te.status import default_directory

__all__ = ["INSECURE", "SETTING_NAMES", "SGLANGS_OWN", "Config", "ConfigError"]

_PREFIX = "SGLANG_MOONCAKE_"
INSECURE = f"{_PREFIX}INSECURE"
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
#: What the neutral part calls them in its sentences.
SETTING_NAMES = SettingNames(
    bootstrap="SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    waiting="SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    link=f"{_PREFIX}LINK_TIMEOUT_S",
)
#: Settings that te.Config has by the same names.
_ENGINE = (
    "RAILS",
    "RAILS_PER_NIC",
    "WORKERS",
    "TRAFFIC_CLASS",
    "SERVICE_LEVEL",
    "PARTITION_KEY_INDEX",
    "GID_INDEX",
)
_NAMES = {
    "HOST",
    "REGISTER_TIMEOUT_S",
    "LINK_TIMEOUT_S",
    "STALL_TIMEOUT_S",
    "TRANSPORTS",
    "NICS",
    "TOPOLOGY",
    "PORTS",
    "REGISTRIES",
    "LAYERWISE",
    "STATS_DIR",
    "STATUS_DIR",
    "STORY_ROOMS",
    "SECRET",
    "SECRET_FILE",
    "INSECURE",
    "ENCRYPT",
    *_ENGINE,
}


@dataclass(frozen=True, slots=True)
class Config:
    """
    HOST: address that the transfer engine listens on and tells its peers (default: the address
        that SGLang itself uses between hosts, see SGLANG_HOST_IP).
    REGISTER_TIMEOUT_S: how long a prefill rank tries to reach the bootstrap server at start-up.
    LINK_TIMEOUT_S: how long a decode rank waits for a prefill rank's answer to its hello.
    STALL_TIMEOUT_S: a transfer without progress this long fails.
    TRANSPORTS: transports to use, the preferred one first, separated by commas (default: all of
        te's that can move the KV cache). With one alone, not getting it is an error.
    NICS: RDMA devices to use, patterns separated by commas, `!` before those to leave out
        (default: those of --disaggregation-ib-device, else all).
    TOPOLOGY: JSON file that says which RDMA devices memory uses, instead of NICS and of what is
        found (te.Config.topology; Mooncake's MC_CUSTOM_TOPO_JSON).
    RAILS, RAILS_PER_NIC, WORKERS, TRAFFIC_CLASS, SERVICE_LEVEL, PARTITION_KEY_INDEX, GID_INDEX: as
        te.Config has them, with its defaults.
    PORTS: first and last port that this rank listens on, for the transfer engine and for control
        messages: `20000-20100` (default: any free ones).
    REGISTRIES: registries (`bootstrap_host` and `bootstrap_port` of a request) that a decode rank
        asks: names, addresses or networks, with or without a port, separated by commas
        (`Registries`; default: any).
    LAYERWISE: `1`: a prefill rank hands KV over in groups of layers while the forward that computes
        it still runs (`layerwise`). `0`, the default: when it is over.
    STATS_DIR: directory for one JSON file per scheduler process (default: none are written).
    STATUS_DIR: directory of the status sockets, over which `te top` and `sglang-mooncake explain`
        ask the ranks of this user (default: $XDG_RUNTIME_DIR/te, else /tmp/te-UID); `none`: no
        sockets.
    STORY_ROOMS: how many ended requests each rank remembers for `sglang-mooncake explain`.
    SECRET_FILE: file with the deployment's secrets, one a line (docs/security.md; default: none, so
        that whoever reaches the ports is served).
    SECRET: the secrets themselves, instead of SECRET_FILE.
    INSECURE: `1`: start without a secret on a public address, too.
    ENCRYPT: `1`: encrypt KV caches between hosts, which only TCP can; takes a secret.

    Where a variable is not given, what Mooncake's say of the same is taken (`mooncake_variables`).
    """

    host: str | None = None
    register_timeout_s: float = 60.0
    link_timeout_s: float = 10.0
    stall_timeout_s: float = 5.0
    transports: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    topology: Path | None = None
    #: Devices that Mooncake's variables name: for ranks for which neither `nics` nor a flag of
    #: SGLang's names any.
    nics_of_mooncake: tuple[str, ...] = ()
    #: Fields of te.Config, by name.
    engine: Mapping[str, Any] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    registries: Registries = field(default_factory=Registries)
    layerwise: bool = False
    stats_dir: Path | None = None
    status_dir: Path | None = field(default_factory=default_directory)
    story_rooms: int = STORY_ROOMS
    #: Made of the secrets, which are not kept.
    keys: Keys = field(default_factory=Keys, repr=False)
    insecure: bool = False
    encrypt: bool = False
    #: What became of variables of Mooncake's, for the log.
    courtesies: tuple[str, ...] = ()

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Config:
        """Raises ConfigError for an unknown variable with our prefix, or a value out of range."""
        given = {
            name.removeprefix(_PREFIX): value
            for name, value in environment.items()
            if name.startswith(_PREFIX)
        }
        for name in SGLANGS_OWN:
            given.pop(name.removeprefix(_PREFIX), None)
        nics, has_topology = names(given.get("NICS", "")), bool(given.get("TOPOLOGY"))
        if nics and has_topology:
            raise ConfigError(
                f"{_PREFIX}TOPOLOGY is complete: {_PREFIX}NICS cannot be given beside it"
            )
        taken = read_courtesies(environment, given, _PREFIX)
        asked = taken.settings | {name: text for name, text in given.items() if text}
        ports, topology, stats_dir = (asked.get(n) for n in ("PORTS", "TOPOLOGY", "STATS_DIR"))
        config = Config(
            host=asked.get("HOST"),
            register_timeout_s=_seconds(asked, "REGISTER_TIMEOUT_S", 60.0),
            link_timeout_s=_seconds(asked, "LINK_TIMEOUT_S", 10.0),
            stall_timeout_s=_seconds(asked, "STALL_TIMEOUT_S", 5.0),
            transports=_transports(asked.get("TRANSPORTS", "")),
            nics=nics,
            topology=Path(topology) if topology else None,
            nics_of_mooncake=names(taken.settings.get("NICS", "")),
            engine=_engine(asked),
            ports=port_range(f"{_PREFIX}PORTS", ports) if ports else None,
            registries=_registries(asked.get("REGISTRIES", "")),
            layerwise=switch(f"{_PREFIX}LAYERWISE", asked.get("LAYERWISE", "0")),
            stats_dir=Path(stats_dir) if stats_dir else None,
            status_dir=_status_dir(asked.get("STATUS_DIR")),
            story_rooms=integer(
                f"{_PREFIX}STORY_ROOMS", asked.get("STORY_ROOMS", str(STORY_ROOMS)), 0, 65_536
            ),
            keys=_keys(given),
            insecure=switch(INSECURE, asked.get("INSECURE", "0")),
            encrypt=switch(f"{_PREFIX}ENCRYPT", asked.get("ENCRYPT", "0")),
            courtesies=taken.notes,
        )
        if config.encrypt and not config.keys:
            raise ConfigError(
                f"{_PREFIX}ENCRYPT=1 takes a secret: give all servers the same"
                f" {_PREFIX}SECRET_FILE (`sglang-mooncake secret` makes one)"
            )
        unknown = sorted(given.keys() - _NAMES)
        if unknown:
            raise ConfigError(
                f"unknown variable {', '.join(_PREFIX + name for name in unknown)}: see"
                " sglang_mooncake/sglang/config.py"
            )
        return config


def _engine(asked: Mapping[str, str]) -> dict[str, int]:
    return {
        name.lower(): integer(_PREFIX + name, asked[name], *LIMITS[name.lower()])
        for name in _ENGINE
        if name in asked
    }


def _status_dir(text: str | None) -> Path | None:
    if text is None:
        return default_directory()
    return None if text == "none" else Path(text)


def _transports(text: str) -> tuple[str, ...]:
    """None if nobody asked for any."""
    given = names(text)
    if len(set(given)) != len(given) or not set(given) <= set(TRANSPORTS):
        known = ", ".join(TRANSPORTS)
        raise ConfigError(f"{_PREFIX}TRANSPORTS={text!r}: give some of {known}, each once")
    return given


def _registries(text: str) -> Registries:
    try:
        return Registries(names(text), f"{_PREFIX}REGISTRIES")
    except ValueError as error:
        raise ConfigError(f"{_PREFIX}REGISTRIES={text!r}: {error}") from error


def _keys(given: Mapping[str, str]) -> Keys:
    # A variable that is empty is an error: who sets one wants a secret.
    text, path = given.get("SECRET"), given.get("SECRET_FILE")
    if text is not None and path is not None:
        raise ConfigError(f"{_PREFIX}SECRET and {_PREFIX}SECRET_FILE are both set: leave one out")
    try:
        if path is not None:
            return Keys.from_secrets(read_secret_file(path))
        return Keys() if text is None else Keys.from_secrets(split_secrets(text))
    except ValueError as error:
        name = "SECRET" if path is None else "SECRET_FILE"
        raise ConfigError(f"{_PREFIX}{name}: {error}") from error


def _seconds(asked: Mapping[str, str], name: str, default: float) -> float:
    return seconds(_PREFIX + name, asked[name]) if name in asked else default
