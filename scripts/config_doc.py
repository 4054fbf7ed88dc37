# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md: the text of config_doc.in.md, with the settings of all packages."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection
from pathlib import Path

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    Parser(".venv/bin/python scripts/config_doc.py", __doc__).parse_args()

from bootstrap_server.settings.rows import Given, Setting
from bootstrap_server.settings.server import SETTINGS as REGISTRY_SETTINGS
from kvstore.config import Config as StoreConfig
from sglang_mooncake.sglang.listing import as_text
from sglang_mooncake.sglang.settings import CONFIG_FILE, SETTINGS, SGLANGS_OWN
from te.config import LIMITS
from te.config import Config as EngineConfig

TEXT = Path(__file__).with_name("config_doc.in.md")
PATH = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
#: Fields whose default is found when the program runs, and the like of which has no short form.
_DEFAULTS = {
    "transports": "all",
    "keys": "none",
    "nics": "all active devices",
    "status_dir": "`$XDG_RUNTIME_DIR/te`, else `/tmp/te-UID`",
    "directory": "`/tmp/kvstore-UID`",
}
_EXAMPLE = {
    "te.transports": Given("tcp", "SGLANG_MOONCAKE_TRANSPORTS"),
    "te.gid_index": Given("3", "MC_GID_INDEX=3"),
}


def document() -> str:
    """All of docs/configuration.md."""
    parts = {
        "example": "\n".join(f"    {line}" for line in as_text(_EXAMPLE).splitlines()),
        "config_file": CONFIG_FILE,
        "sglangs_own": ", ".join(f"`{name}`" for name in sorted(SGLANGS_OWN)),
        "variables": "\n".join(_variable(one) for one in SETTINGS if one.variable),
        "fields": _fields(EngineConfig),
        "store": _fields(StoreConfig, {"engine"}),
        **{
            table: "\n\n".join(_section(one) for one in rows)
            for table in ("sglang_mooncake", "te", "bootstrap_server")
            if (rows := [one for one in (*SETTINGS, *REGISTRY_SETTINGS) if one.table == table])
        },
    }
    return re.sub(r"@(\w+)@", lambda found: parts[found[1]], TEXT.read_text())


def _variable(setting: Setting) -> str:
    """One line of the table of all variables: the first sentence of what it means."""
    default = f"`{setting.default}`" if setting.default else setting.unset
    first = re.split(r"(?<=[a-z0-9)`]\.) ", setting.help)[0]
    link = f"[`{setting.variable}`](#{setting.key.replace('.', '')})"
    return "| " + " | ".join(_cell(one) for one in (link, default, first)) + " |"


def _section(setting: Setting) -> str:
    """One setting: its heading, what it means, and a table of the rest."""
    default = f"`{setting.default}`" if setting.default else setting.unset
    rows = [
        ("type", setting.kind.what),
        ("default", default),
        ("variable", f"`{setting.variable}`" if setting.variable else ""),
        ("argument", f"`{setting.argument}`" if setting.argument else ""),
        ("TOML", f"`{setting.name}` in `[{setting.table}]`, {setting.kind.form}"),
        ("otherwise taken from", ", ".join(f"`{one}`" for one in setting.others)),
    ]
    table = [f"| {name} | {_cell(value)} |" for name, value in rows if value]
    return "\n".join([f"### {setting.key}", "", setting.help, "", "| | |", "|---|---|", *table])


def _fields(config: type[EngineConfig | StoreConfig], but: Collection[str] = ()) -> str:
    meanings = _meanings(config)
    lines = ["| field | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(config):
        if field.name in but:
            continue
        default = _DEFAULTS.get(field.name) or f"`{field.default!r}`"
        limits = LIMITS.get(field.name) if config is EngineConfig else None
        allowed = f"{limits[0]} to {limits[1]}" if limits else ""
        cells = (f"`{field.name}`", f"`{field.type}`", default, allowed, meanings[field.name])
        lines.append("| " + " | ".join(_cell(one) for one in cells) + " |")
    return "\n".join(lines)


def _meanings(config: type) -> dict[str, str]:
    """The comments before the fields."""
    pattern = r"((?:^ +#: .*\n)+) +(\w+): "
    found = re.findall(pattern, inspect.getsource(config), re.MULTILINE)
    texts = {
        name: " ".join(line.strip().removeprefix("#: ") for line in lines.splitlines())
        for lines, name in found
    }
    return {name: text.replace("``", "`") for name, text in texts.items()}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PATH.write_text(document())
