# SPDX-License-Identifier: Apache-2.0
"""Settings that have a value, and where each comes from: as a line of the log, text and JSON
(pure). Secrets are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bootstrap_server.settings.rows import Given, Setting
from sglang_mooncake.sglang.settings import BY_KEY, SETTINGS

__all__ = ["as_json", "as_text", "differs", "in_one_line"]

_HIDDEN = "(not shown)"
_DEFAULT = "default"


def differs(setting: Setting, given: Mapping[str, Given]) -> bool:
    """Whether a setting has another value than its default."""
    if setting.key not in given:
        return False
    read = setting.kind.read
    return not setting.default or read(given[setting.key].text) != read(setting.default)


def in_one_line(given: Mapping[str, Given]) -> str:
    """Those that differ from the defaults: `te.rails=4 (SGLANG_MOONCAKE_RAILS), …`."""
    changed = [one for one in SETTINGS if differs(one, given)]
    said = (f"{one.key}={_value(one, given)} ({given[one.key].where})" for one in changed)
    return ", ".join(said) or "all have their defaults"


def as_text(given: Mapping[str, Given], *, show_all: bool = False) -> str:
    """A table of those that differ from the defaults, or of all."""
    rows = [("setting", "value", "from", "default")]
    for one in SETTINGS:
        if differs(one, given):
            rows.append((one.key, _value(one, given), given[one.key].where, _default(one)))
        elif show_all:
            where = given[one.key].where if one.key in given else _DEFAULT
            rows.append((one.key, _value(one, given), where, ""))
    if len(rows) == 1:
        return "All settings have their defaults; --all shows them.\n"
    return _aligned(rows)


def as_json(given: Mapping[str, Given]) -> list[dict[str, Any]]:
    """All of them. `value` and `default` are text as in a variable; None: there is none, and
    `unset` says what happens then."""
    return [
        {
            "setting": one.key,
            "value": _HIDDEN if one.secret and one.key in given else _text(one, given),
            "from": given[one.key].where if one.key in given else _DEFAULT,
            "default": one.default or None,
            "unset": one.unset or None,
            "variable": one.variable,
            "differs": differs(one, given),
        }
        for one in BY_KEY.values()
    ]


def _text(setting: Setting, given: Mapping[str, Given]) -> str | None:
    return given[setting.key].text if setting.key in given else setting.default or None


def _value(setting: Setting, given: Mapping[str, Given]) -> str:
    if setting.secret and setting.key in given:
        return _HIDDEN
    return _text(setting, given) or _default(setting)


def _default(setting: Setting) -> str:
    return setting.default or setting.unset.replace("`", "")


def _aligned(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)
