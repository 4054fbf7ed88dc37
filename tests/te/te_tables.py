# SPDX-License-Identifier: Apache-2.0
"""Tables of compiled code that say which state may follow which: stages.h and rails.h."""

from __future__ import annotations

import re

__all__ = ["read_table"]


def read_table(
    text: str, prefix: str = ""
) -> tuple[list[str], list[str], dict[str, dict[str, str]]]:
    """The states, what may happen, and by state what may happen to it and the state behind that.
    ``prefix``: what the states' names begin with in the text."""
    states, happenings = (
        re.findall(r"^ +(\w+)(?: = \d+)?,", names, re.MULTILINE)
        for names in re.findall(r"enum [^\n]*\{ /\* \w+ \*/(.*?)\};", text, re.DOTALL)
    )
    table: dict[str, dict[str, str]] = {name.removeprefix(prefix): {} for name in states}
    for state, row in re.findall(r"^    \[(\w+)\] = \{(.*?)\}", text, re.MULTILINE | re.DOTALL):
        following = {
            how: one.removeprefix(prefix) for how, one in re.findall(r"\[(\w+)\] = (\w+)", row)
        }
        table[state.removeprefix(prefix)] = following
    return list(table), happenings, table
