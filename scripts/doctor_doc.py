# SPDX-License-Identifier: Apache-2.0
"""Writes docs/doctor.md: the text of doctor_doc.in.md, with all findings of
te/doctor/catalogue.py."""

from __future__ import annotations

import re
from pathlib import Path

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    Parser(".venv/bin/python scripts/doctor_doc.py", __doc__).parse_args()

from te.doctor.catalogue import CATALOGUE
from te.doctor.findings import Kind, Severity

TEXT = Path(__file__).with_name("doctor_doc.in.md")
EXAMPLES = Path(__file__).with_name("doctor_doc")
PATH = Path(__file__).resolve().parents[1] / "docs" / "doctor.md"


def document() -> str:
    """All of docs/doctor.md."""
    parts = {
        "overview": _overview(),
        "findings": "\n\n".join(_section(kind) for kind in CATALOGUE.values()),
        **{path.stem: _indented(path.read_text()) for path in EXAMPLES.glob("*.txt")},
    }
    return re.sub(r"^@(\w+)@$", lambda found: parts[found[1]], TEXT.read_text(), flags=re.M)


def _overview() -> str:
    rows = [
        f"| [{kind.name}](#{kind.name}) | {kind.transport or 'any'} | {_severity(kind)} |"
        for kind in CATALOGUE.values()
    ]
    return "\n".join(["| finding | transport | severity |", "|---|---|---|", *rows])


def _severity(kind: Kind) -> str:
    text = kind.severity.value
    return text if kind.unasked is Severity.ERROR else f"{text}, unless asked for"


def _section(kind: Kind) -> str:
    lines = [
        f"### {kind.name}",
        _places(kind.what),
        f"*Consequence:* {_places(kind.consequence)}",
        f"*Mend:* {_mend(kind)}",
    ]
    return "\n\n".join(lines)


def _mend(kind: Kind) -> str:
    return "the report names the command." if kind.mend == "{mend}" else _places(kind.mend)


def _places(text: str) -> str:
    """``{device}`` as ``*device*``."""
    return re.sub(r"\{(\w+)\}", r"*\1*", text)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())


if __name__ == "__main__":
    PATH.write_text(document())
