# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m bootstrap_server`: arguments, a TOML file, or the defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bootstrap_server.admission.access import StatusPage
from bootstrap_server.build import version
from bootstrap_server.ranks.registry import LEASE_S
from bootstrap_server.settings.file import read_settings_file
from bootstrap_server.settings.rows import Given, Setting, read_values
from bootstrap_server.settings.values import (
    ConfigError,
    Kind,
    address,
    choice,
    file_path,
    instead,
    seconds,
    switch,
    whole,
)

__all__ = ["SETTINGS", "Config"]

_TABLE = "bootstrap_server"
#: Tables of the same file that servers of SGLang read.
_OF_SERVERS = ("te", "sglang_mooncake")


def _row(name: str, kind: Kind, help_: str, *, default: str = "", unset: str = "") -> Setting:
    argument = f"--{name.replace('_', '-')}"
    return Setting(
        table=_TABLE,
        name=name,
        kind=kind,
        help=help_,
        default=default,
        unset=unset,
        argument=argument,
    )


SETTINGS: tuple[Setting, ...] = (
    _row("host", address(), "Address to listen on.", default="127.0.0.1"),
    _row("port", whole(0, 65_535), "Port to listen on; 0 for any free one.", default="8998"),
    _row(
        "lease_s",
        seconds(),
        "A rank counts as dead this long after its last renewal.",
        default=f"{LEASE_S:g}",
    ),
    _row(
        "log_level",
        choice(("debug", "info", "warning", "error")),
        "Least severe messages that are logged.",
        default="warning",
    ),
    _row(
        "secret_file",
        file_path(),
        "File with the deployment's secrets, one per line: only servers that have one of them are"
        " served (docs/security.md).",
        unset="everybody is served",
    ),
    _row(
        "insecure",
        switch(),
        "Listens on a public address without a secret, too.",
        default="0",
    ),
    _row(
        "status_page",
        choice([page.value for page in StatusPage]),
        "Who may open the status page, http://HOST:PORT/, without proving the secret: `open`"
        " everybody, `local` programs on this host, `off` nobody.",
        unset="`local` with a secret, `open` without one",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A field for each row of `SETTINGS`, which says what it means."""

    host: str = "127.0.0.1"
    port: int = 8998
    lease_s: float = LEASE_S
    log_level: str = "warning"
    secret_file: Path | None = None
    insecure: bool = False
    status_page: StatusPage | None = None

    @staticmethod
    def from_arguments(arguments: Sequence[str] | None = None) -> Config:
        """Ends the process with status 2 and a sentence for unknown or bad arguments, as argparse
        does; raises ConfigError for what is wrong in the TOML file, and for bad values."""
        parsed = vars(_parser().parse_args(arguments))
        path = parsed.pop("config")
        given, problems = read_settings_file(path, SETTINGS, _OF_SERVERS) if path else ({}, [])
        for one in SETTINGS:
            if parsed[one.name] is not None:
                given[one.key] = Given(parsed[one.name], one.argument)
        values, bad = read_values(SETTINGS, given)
        if problems or bad:
            raise ConfigError(*problems, *bad)
        fields = {key.partition(".")[2]: value for key, value in values.items()}
        if "status_page" in fields:
            fields["status_page"] = StatusPage(fields["status_page"])
        return Config(**fields)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        options = [one for action in self._actions for one in action.option_strings]
        unknown = message.rpartition(": ")[2].split()
        if message.startswith("unrecognized arguments") and unknown:
            message += instead(unknown[0].partition("=")[0], options)
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bootstrap_server", description="Registry of prefill ranks for SGLang."
    )
    parser.add_argument("--version", action="version", version=f"bootstrap_server {version()}")
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="TOML file with these settings in a table [bootstrap_server]; arguments come first",
    )
    for one in SETTINGS:
        said = f"{one.help.rstrip('.')} (default: {one.default or one.unset})".replace("%", "%%")
        if one.kind.form == "true or false":
            parser.add_argument(one.argument, action="store_const", const="1", help=one.help)
        else:
            parser.add_argument(one.argument, metavar=one.name.upper(), help=said)
    return parser
