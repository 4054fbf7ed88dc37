# SPDX-License-Identifier: Apache-2.0
"""Kinds of values that settings have (pure). Every source hands over text: variables and arguments
as they stand, a TOML file by `Kind.from_toml`."""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "ConfigError",
    "Kind",
    "address",
    "choice",
    "choices",
    "file_path",
    "instead",
    "names",
    "names_of",
    "port_range",
    "seconds",
    "switch",
    "text",
    "whole",
]

_PORT_MAX = 65_535
#: Labels as in RFC 1123; underscores are found in names of containers.
_NAME = re.compile(r"(?=.{1,254}\Z)[^\W_][\w-]{0,62}(\.[\w-]{1,63})*\.?")
#: A setting has one TOML type.
_TOML_TYPES: dict[str, tuple[type, ...]] = {
    "true or false": (bool,),
    "a whole number": (int,),
    "a number": (int, float),
    "a list of strings": (list,),
    "a string": (str,),
}
_Form = Literal["true or false", "a whole number", "a number", "a list of strings", "a string"]


class ConfigError(ValueError):
    """Settings that we cannot use. Each of `sentences` names a setting and where it was given."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


@dataclass(frozen=True, slots=True)
class Kind:
    """what: what values are allowed, for the reference. read: from text to the value; raises
    ValueError with what to give instead. form: the type in a TOML file."""

    what: str
    read: Callable[[str], Any]
    form: _Form = "a string"

    def from_toml(self, value: Any) -> str:
        """The text of a value in a TOML file. Raises ValueError for another type."""
        fits = isinstance(value, _TOML_TYPES[self.form])
        if isinstance(value, bool) and self.form != "true or false":
            fits = False
        if isinstance(value, list):
            fits = fits and all(isinstance(one, str) and "," not in one for one in value)
        if not fits:
            raise ValueError(f"give {self.form}")
        if isinstance(value, bool):
            return str(int(value))
        return ",".join(value) if isinstance(value, list) else str(value)

    def to_toml(self, given: str) -> str:
        """A value, which `read` takes, as it stands in a TOML file."""
        match self.form:
            case "true or false":
                return "true" if self.read(given) else "false"
            case "a whole number" | "a number":
                return repr(self.read(given))
            case "a list of strings":
                return json.dumps(names(given), ensure_ascii=False)
            case _:
                return json.dumps(given, ensure_ascii=False)


def instead(given: str, allowed: Iterable[str]) -> str:
    """What was probably meant: `: did you mean 'rdma'?`, or nothing."""
    found = difflib.get_close_matches(given.lower(), allowed, 1)
    return f": did you mean {found[0]!r}?" if found else ""


def names(given: str) -> tuple[str, ...]:
    """Those between commas."""
    return tuple(name.strip() for name in given.split(",") if name.strip())


def whole(low: int, high: int) -> Kind:
    def read(given: str) -> int:
        try:
            value = int(given)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ValueError(f"give a whole number from {low} to {high}")
        return value

    return Kind(f"whole number from {low} to {high}", read, "a whole number")


def seconds(low: float = 0.01, high: float = 86_400) -> Kind:
    def read(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = -1.0
        if not low <= value <= high:
            raise ValueError(f"give seconds between {low:g} and {high:.0f}")
        return value

    return Kind(f"seconds from {low:g} to {high:.0f}", read, "a number")


def switch() -> Kind:
    def read(given: str) -> bool:
        if given not in ("0", "1"):
            raise ValueError("give 1 or 0")
        return given == "1"

    return Kind("`1` or `0`", read, "true or false")


def choice(allowed: Sequence[str]) -> Kind:
    def read(given: str) -> str:
        if given not in allowed:
            raise ValueError(f"give one of {', '.join(allowed)}{instead(given, allowed)}")
        return given

    return Kind(f"one of {', '.join(allowed)}", read)


def choices(allowed: Sequence[str]) -> Kind:
    """Some of them, in the order given."""
    known = ", ".join(allowed)

    def read(given: str) -> tuple[str, ...]:
        found = names(given)
        for one in found:
            if one not in allowed:
                raise ValueError(f"give some of {known}, each once{instead(one, allowed)}")
        if len(set(found)) != len(found):
            raise ValueError(f"give some of {known}, each once")
        return found

    return Kind(f"some of {known}, each once", read, "a list of strings")


def names_of(what: str, read: Callable[[tuple[str, ...]], Any] = tuple) -> Kind:
    def read_all(given: str) -> Any:
        return read(names(_printable(given)))

    return Kind(what, read_all, "a list of strings")


def port_range() -> Kind:
    def read(given: str) -> tuple[int, int]:
        first, _, last = (part.strip() for part in given.partition("-"))
        are_numbers = first.isdecimal() and last.isdecimal()
        if not (are_numbers and 1 <= int(first) <= int(last) <= _PORT_MAX):
            raise ValueError("give the first and last port, as in 20000-20100")
        return int(first), int(last)

    return Kind("the first and last port, `20000-20100`", read)


def address() -> Kind:
    """Of a host. Names are not resolved: that may be another host's to do."""

    def read(given: str) -> str:
        if not (_is_address(_printable(given)) or _is_name(given)):
            raise ValueError("give an address such as 10.0.0.1 or fd00::1, or a host's name")
        return given

    return Kind("address or name", read)


def _is_address(given: str) -> bool:
    try:
        ipaddress.ip_address(given)
    except ValueError:
        return False
    return True


def _is_name(given: str) -> bool:
    """Not one that resolvers take for an address that was cut short, such as `10.0.0.`."""
    if _NAME.fullmatch(given) is None:
        return False
    last = given.removesuffix(".").rpartition(".")[2]
    return not last.isdecimal() or ("." not in given and int(given) >> 32 > 0)


def file_path(none: str = "") -> Kind:
    """none: a word that means no path, which `read` gives as None."""

    def read(given: str) -> Path | None:
        return None if given == none and none else Path(_printable(given))

    return Kind(f"path, or `{none}`" if none else "path", read)


def text(what: str) -> Kind:
    """As it stands."""
    return Kind(what, str)


def _printable(given: str) -> str:
    # Others cannot stand in a TOML file or in a line of the log.
    if not given.isprintable():
        raise ValueError("give printable characters alone")
    return given
