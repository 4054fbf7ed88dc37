# SPDX-License-Identifier: Apache-2.0
"""Values of environment variables, read or refused with the variable's name."""

from __future__ import annotations

__all__ = ["ConfigError", "integer", "names", "port_range", "seconds", "switch"]

_PORT_MAX = 65_535


class ConfigError(ValueError):
    """A variable has a value that we cannot use; the sentence names it."""


def names(text: str) -> tuple[str, ...]:
    """Those between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def integer(variable: str, text: str, low: int, high: int) -> int:
    """Raises ConfigError."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(f"{variable}={text!r}: give a whole number from {low} to {high}")
    return value


def seconds(variable: str, text: str) -> float:
    """Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.01 <= value <= 86_400:
        raise ConfigError(f"{variable}={text!r}: give seconds between 0.01 and 86400")
    return value


def port_range(variable: str, text: str) -> tuple[int, int]:
    """The first and the last of `20000-20100`. Raises ConfigError."""
    first, _, last = (part.strip() for part in text.partition("-"))
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= _PORT_MAX):
        raise ConfigError(f"{variable}={text!r}: give the first and last port, as in 20000-20100")
    return int(first), int(last)


def switch(variable: str, text: str) -> bool:
    """Raises ConfigError."""
    if text not in ("0", "1"):
        raise ConfigError(f"{variable}={text!r}: give 1 or 0")
    return text == "1"
