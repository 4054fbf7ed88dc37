# SPDX-License-Identifier: Apache-2.0
"""Values of settings, as they come from JSON or a command line. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

__all__ = ["parse_bytes", "typed"]

_SUFFIXES: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
#: By annotation: what is accepted, and how that is called. True is a whole number in Python, and
#: is refused as one.
_KINDS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
    "Path": ((str, Path), "a path"),
}


def parse_bytes(text: str | int) -> int:
    """A size such as ``"16GiB"``, ``"512MiB"`` or ``1048576``, in bytes; ``ValueError``."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    pattern = r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*"
    match = re.fullmatch(pattern, text) if isinstance(text, str) else None
    unit = _SUFFIXES.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no size: write it like 16GiB, 512MiB or 1048576")
    return int(float(match[1]) * unit)


def typed(name: str, value: Any, kind: str) -> Any:
    """The value of a setting, as what its annotation says (``"int"``, ``"Path | None"``, …).
    ``ValueError`` names the setting and its value if it is something else."""
    wanted, _, none = kind.partition(" | ")
    if value is None and none:
        return None
    accepted, what = _KINDS[wanted]
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise ValueError(f"{name}={value!r} must be {what}")
    return Path(str(value)) if wanted == "Path" else value
