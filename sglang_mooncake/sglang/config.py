# SPDX-License-Identifier: Apache-2.0
"""A rank's settings, from a TOML file and from the environment of the SGLang server; `settings.py`
has the table of them. What SGLang has a flag or variable for is taken from SGLang (`seam.py`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap_server.admission.secret import Keys, split_secrets
from bootstrap_server.admission.secret_file import read_secret_file
from bootstrap_server.settings.file import read_settings_file
from bootstrap_server.settings.rows import Given, from_variables, read_values
from bootstrap_server.settings.server import SETTINGS as REGISTRY_SETTINGS
from bootstrap_server.settings.values import ConfigError
from sglang_mooncake.context import SettingNames
from sglang_mooncake.registries import Registries
from sglang_mooncake.sglang.mooncake_variables import Courtesies, read_courtesies
from sglang_mooncake.sglang.settings import (
    BY_KEY,
    CONFIG_FILE,
    ENGINE,
    INSTEAD_OF,
    PREFIX,
    SETTINGS,
    SGLANGS_OWN,
)
from sglang_mooncake.stats import STORY_ROOMS
from te.config import GID_INDEX_AUTOMATIC
from te.status import default_directory

__all__ = ["INSECURE", "SETTING_NAMES", "SGLANGS_OWN", "Config", "ConfigError", "check_file"]

INSECURE = BY_KEY["sglang_mooncake.insecure"].variable
#: What the neutral part calls them in its sentences.
SETTING_NAMES = SettingNames(
    bootstrap="SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    waiting="SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    link=BY_KEY["sglang_mooncake.link_timeout_s"].variable,
)
_ALL = (*SETTINGS, *REGISTRY_SETTINGS)
_HOST, _NICS, _TOPOLOGY = "sglang_mooncake.host", "te.nics", "te.topology"
_SECRET, _SECRET_FILE = "sglang_mooncake.secret", "sglang_mooncake.secret_file"


@dataclass(frozen=True, slots=True)
class Config:
    """A field for each row of `settings.SETTINGS`, which says what it means. The strongest source
    counts: variables with our prefix, then the TOML file that SGLANG_MOONCAKE_CONFIG names, then
    Mooncake's variables (`mooncake_variables`), then the default. The file comes before Mooncake's
    variables since it was written for this hand-over, and they were not."""

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
    #: Fields of te.Config, by name (`settings.ENGINE`), those that are given.
    engine: Mapping[str, Any] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    registries: Registries = field(default_factory=Registries)
    registry: tuple[str, ...] = ()
    layerwise: bool = False
    verify: str = "sample"
    verify_dir: Path | None = None
    drop_in: bool = False
    #: Settings of the store by their names, for `mooncake.store`.
    store: Mapping[str, Any] = field(default_factory=dict)
    stats_dir: Path | None = None
    status_dir: Path | None = field(default_factory=default_directory)
    story_rooms: int = STORY_ROOMS
    #: Made of the secrets, which are not kept.
    keys: Keys = field(default_factory=Keys, repr=False)
    insecure: bool = False
    encrypt: bool = False
    #: What became of variables of Mooncake's, for the log.
    courtesies: tuple[str, ...] = ()
    #: Each setting that has a value, by key, and where that comes from.
    given: Mapping[str, Given] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Config:
        """Raises ConfigError for unknown settings and values out of range, all of them at once."""
        path = environment.get(CONFIG_FILE)
        of_file, problems = _read_file(path) if path else ({}, [])
        of_variables, more = from_variables(
            SETTINGS, environment, PREFIX, {CONFIG_FILE, *SGLANGS_OWN}
        )
        ours = _stronger(_checked(of_file), _checked(of_variables))
        said = {
            BY_KEY[key].name.upper(): f"{one.where}={one.text}"
            for key, one in ours.items()
            if not BY_KEY[key].secret
        }
        taken = read_courtesies(environment, said, PREFIX)
        given = _of_mooncake(taken) | ours
        values, bad = read_values(SETTINGS, given)
        problems += [*more, *bad]
        if problems:
            raise ConfigError(*problems)
        keys = _keys(ours)
        if values.get("te.encrypt") and not keys:
            raise ConfigError(
                f"{given['te.encrypt'].where}=1 needs a secret: give all servers the same"
                f" {BY_KEY[_SECRET_FILE].variable} (`sglang-mooncake secret` makes one)"
            )
        if _HOST not in given and (host := environment.get("SGLANG_HOST_IP")):
            given[_HOST] = Given(host, "SGLANG_HOST_IP")
        return _config(values, keys, taken, given, _NICS in ours)


def check_file(path: str) -> int:
    """How many settings a TOML file has, for all packages. Raises ConfigError for what is wrong in
    it, all at once. Files that it names are not read: they may be on another host."""
    given, problems = read_settings_file(path, _ALL)
    problems += read_values(_ALL, _checked(given))[1]
    if problems:
        raise ConfigError(*problems)
    return len(given)


def _read_file(path: str) -> tuple[dict[str, Given], list[str]]:
    """The settings of a rank in a TOML file, by key, and what is wrong in it. The table of the
    registry's process is checked, too."""
    given, problems = read_settings_file(path, _ALL)
    problems += read_values(REGISTRY_SETTINGS, given)[1]
    return {key: one for key, one in given.items() if key in BY_KEY}, problems


def _config(
    values: Mapping[str, Any],
    keys: Keys,
    taken: Courtesies,
    given: Mapping[str, Given],
    has_nics: bool,
) -> Config:
    fields = {key.partition(".")[2]: value for key, value in values.items()}
    for name in ("secret", "secret_file"):
        fields.pop(name, None)
    if not has_nics:
        fields["nics_of_mooncake"] = fields.pop("nics", ())
    engine = {one.name: fields.pop(one.name) for one in ENGINE if one.name in fields}
    if engine.get("gid_index") == GID_INDEX_AUTOMATIC:
        del engine["gid_index"]
    return Config(**fields, engine=engine, keys=keys, courtesies=taken.notes, given=given)


def _of_mooncake(taken: Courtesies) -> dict[str, Given]:
    return {
        key: Given(taken.settings[one.name.upper()], taken.sources[one.name.upper()])
        for key, one in BY_KEY.items()
        if one.name.upper() in taken.settings
    }


def _checked(given: Mapping[str, Given]) -> Mapping[str, Given]:
    """Of one source, without two of which one is used. Raises ConfigError."""
    if _NICS in given and _TOPOLOGY in given:
        raise ConfigError(
            f"{given[_TOPOLOGY].where} is complete: {given[_NICS].where} cannot be given beside it"
        )
    if _SECRET in given and _SECRET_FILE in given:
        both = f"{given[_SECRET].where} and {given[_SECRET_FILE].where}"
        raise ConfigError(f"{both} are both set: leave one out")
    return given


def _stronger(weak: Mapping[str, Given], strong: Mapping[str, Given]) -> dict[str, Given]:
    """Both; of two of which one is used, that of the strong source."""
    taken = {key: one for key, one in weak.items() if INSTEAD_OF.get(key) not in strong}
    return taken | dict(strong)


def _keys(given: Mapping[str, Given]) -> Keys:
    one = given.get(_SECRET_FILE) or given.get(_SECRET)
    if one is None:
        return Keys()
    try:
        is_file = _SECRET_FILE in given
        return Keys.from_secrets(read_secret_file(one.text) if is_file else split_secrets(one.text))
    except ValueError as error:
        raise ConfigError(f"{one.where}: {error}") from error
