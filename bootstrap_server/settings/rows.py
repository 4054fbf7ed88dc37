# SPDX-License-Identifier: Apache-2.0
"""Settings as rows of a table, from which all else follows: reading them, the errors, the reference
and the listing (pure)."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bootstrap_server.settings.values import Kind

__all__ = ["Given", "Setting", "from_document", "from_variables", "read_values", "to_toml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """
    table, name: its place in a TOML file; `key` is both. The table is the package that it is for.
    default: in the form of the text that `kind` reads; empty: see `unset`.
    unset: what happens without a value.
    variable: environment variable. argument: of `python -m bootstrap_server`.
    others: what else may give it a value: flags of SGLang, variables of others.
    secret: its value is shown nowhere.
    needs_value: an empty variable is an error, instead of one that is not set.
    """

    table: str
    name: str
    kind: Kind
    help: str
    default: str = ""
    unset: str = ""
    variable: str = ""
    argument: str = ""
    others: tuple[str, ...] = ()
    secret: bool = False
    needs_value: bool = False

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}"


@dataclass(frozen=True, slots=True)
class Given:
    """text: a value in the form of a variable. where: what gave it, `SGLANG_MOONCAKE_RAILS` or
    `/etc/te.toml: te.rails`."""

    text: str = field(repr=False)
    where: str


def from_variables(
    settings: Iterable[Setting],
    environment: Mapping[str, str],
    prefix: str,
    foreign: Collection[str] = (),
) -> tuple[dict[str, Given], list[str]]:
    """The settings that variables give, by key, and a sentence about each unknown variable, with
    the nearest known one.

    Args:
        prefix: that of all our variables.
        foreign: other variables that begin so, too; they are passed over.
    """
    known = {one.variable.removeprefix(prefix): one for one in settings}
    candidates = [*known, *sorted(one.removeprefix(prefix) for one in foreign)]
    given: dict[str, Given] = {}
    unknown: list[str] = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix) or variable in foreign:
            continue
        name = variable.removeprefix(prefix)
        if name not in known:
            meant = _meant(name, candidates, prefix)
            unknown.append(f"{variable} is not a setting{meant}")
        elif text or known[name].needs_value:
            given[known[name].key] = Given(text, variable)
    return given, unknown


def from_document(
    settings: Sequence[Setting],
    document: Mapping[str, Any],
    path: str,
    foreign: Collection[str] = (),
) -> tuple[dict[str, Given], list[str]]:
    """The settings that a TOML file gives, by key, and a sentence about each unknown table or name,
    with the nearest known one, and about each value of another type.

    Args:
        document: what the file holds.
        foreign: tables of other programs, which are passed over.
    """
    tables = {one.table for one in settings}
    given: dict[str, Given] = {}
    problems: list[str] = []
    for table, content in document.items():
        if table in foreign:
            continue
        if table not in tables:
            meant = _meant_key(table, settings) or _meant(table, sorted(tables))
            problems.append(f"{path}: {table} is not a table of settings{meant}")
        elif not isinstance(content, Mapping):
            problems.append(f"{path}: {table} is a table: write [{table}]")
        else:
            for name, value in content.items():
                try:
                    one = _named(settings, table, name)
                    given[one.key] = Given(_text(one, value), f"{path}: {one.key}")
                except ValueError as error:
                    problems.append(f"{path}: {table}.{name}{error}")
    return {key: one for key, one in given.items() if one.text}, problems


def _named(settings: Sequence[Setting], table: str, name: str) -> Setting:
    for one in settings:
        if (one.table, one.name) == (table, name):
            return one
    of_table = [one.name for one in settings if one.table == table]
    meant = _meant_key(name, settings) or _meant(name, of_table, f"{table}.")
    if not meant and (close := difflib.get_close_matches(name, [one.name for one in settings], 1)):
        meant = _meant_key(close[0], settings)
    raise ValueError(f" is not a setting{meant}")


def _text(setting: Setting, value: Any) -> str:
    try:
        text = setting.kind.from_toml(value)
        if not text and value == "":
            raise ValueError("give a value, or leave it out")
    except ValueError as error:
        # A value of another type may be a secret in the wrong form.
        shown = "" if setting.secret else f" = {value!r}"
        raise ValueError(f"{shown}: {error}") from None
    return text


def _meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {prefix}{found[0]}?" if found else ""


def _meant_key(name: str, settings: Iterable[Setting]) -> str:
    """A setting that stands in another table."""
    found = [one.key for one in settings if one.name == name]
    return f": did you mean {' or '.join(found)}?" if found else ""


def read_values(
    settings: Iterable[Setting], given: Mapping[str, Given]
) -> tuple[dict[str, Any], list[str]]:
    """The values that are given, by key, and a sentence about each that cannot be used."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for one in settings:
        if one.key not in given:
            continue
        text, where = given[one.key].text, given[one.key].where
        try:
            values[one.key] = one.kind.read(text)
        except ValueError as error:
            problems.append(f"{where}: {error}" if one.secret else f"{where}={text!r}: {error}")
    return values, problems


def to_toml(settings: Sequence[Setting], given: Mapping[str, Given]) -> str:
    """A file that gives the same settings, all but the secrets, which a comment stands for."""
    lines: list[str] = []
    for table in dict.fromkeys(one.table for one in settings):
        rows = [one for one in settings if one.table == table and one.key in given]
        if rows:
            lines += [""] * bool(lines) + [f"[{table}]"]
        for one in rows:
            if one.secret:
                lines.append(f"# {one.name} is not shown: {given[one.key].where} gives it")
            else:
                lines.append(f"{one.name} = {one.kind.to_toml(given[one.key].text)}")
    return "".join(f"{line}\n" for line in lines)
