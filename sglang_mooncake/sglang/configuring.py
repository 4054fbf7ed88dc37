# SPDX-License-Identifier: Apache-2.0
"""The command `sglang-mooncake config`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from bootstrap_server.settings.rows import Given, to_toml
from sglang_mooncake.sglang.config import Config, ConfigError, check_file
from sglang_mooncake.sglang.listing import as_json, as_text
from sglang_mooncake.sglang.settings import BY_KEY, SETTINGS

__all__ = ["DESCRIPTION", "add_arguments", "show_config"]

EXIT_REFUSED = 2
DESCRIPTION = """\
Shows the settings that a server started in this environment would have, and where each value comes
from. The strongest source counts: variables SGLANG_MOONCAKE_..., the TOML file that
SGLANG_MOONCAKE_CONFIG names, Mooncake's variables, the default. SGLang's flags, given after --,
come before Mooncake's variables; standard error says what became of each of these. Exit status 2,
with all errors, if a setting cannot be used.

  sglang-mooncake config
  sglang-mooncake config --toml > settings.toml
  sglang-mooncake config --check settings.toml
  sglang-mooncake config -- --model-path /models/m --disaggregation-ib-device mlx5_0
"""
_NICS, _TOPOLOGY = "te.nics", "te.topology"
_DEVICES = "--disaggregation-ib-device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="show the defaults, too")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all settings as a JSON list")
    form.add_argument(
        "--toml", action="store_true", help="print a TOML file that gives the same settings"
    )
    form.add_argument("--check", metavar="FILE", help="say only whether this TOML file can be used")
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="the command line of the SGLang server"
    )


def show_config(parsed: argparse.Namespace) -> int:
    """The exit status."""
    try:
        sys.stdout.write(_shown(parsed))
    except ConfigError as error:
        lines = (f"sglang-mooncake config: {one}\n" for one in error.sentences)
        sys.stderr.write("".join(lines))
        return EXIT_REFUSED
    return 0


def _shown(parsed: argparse.Namespace) -> str:
    if parsed.check:
        return f"{parsed.check}: {check_file(parsed.check)} settings, all of them can be used\n"
    config = Config.from_environment()
    for note in config.courtesies:
        sys.stderr.write(f"sglang-mooncake config: {note}\n")
    given = with_flags(config.given, parsed.flags, has_nics=bool(config.nics))
    if parsed.json:
        return json.dumps(as_json(given), indent=1) + "\n"
    if parsed.toml:
        return to_toml(SETTINGS, given)
    return as_text(given, show_all=parsed.all)


def with_flags(
    given: Mapping[str, Given], flags: Sequence[str], *, has_nics: bool
) -> Mapping[str, Given]:
    """With what SGLang's flags say, which `transports.open_engine` puts before Mooncake's variables
    and after our own.

    Raises:
        ConfigError: a flag without its value.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument(_DEVICES, dest="devices")
    try:
        devices = parser.parse_known_args(list(flags))[0].devices
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if not devices or has_nics or _TOPOLOGY in given:
        return given
    return {**given, BY_KEY[_NICS].key: Given(devices, _DEVICES)}
