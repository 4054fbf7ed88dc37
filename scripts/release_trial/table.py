# SPDX-License-Identifier: Apache-2.0
"""What became of a release, in rows and words. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

__all__ = ["Row", "chaos_counts", "rows_of", "table"]

_SEEN = "seen"
#: As `chaos_run.report` writes how many requests ended how.
_COUNT = re.compile(r"^ *(\d+ (?:answered|left|failed|not ended).*?)(?:, median.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One thing that was tried. is_good: None if there is no right or wrong about it."""

    what: str
    is_good: bool | None
    seconds: float
    seen: str = ""

    @property
    def word(self) -> str:
        return "" if self.is_good is None else "ok" if self.is_good else "FAILED"


def rows_of(junit: str, release: str) -> list[Row]:
    """Of each test in pytest's XML, what it recorded as `seen`, or the first line of its failure.

    Args:
        junit: the text of the file.
        release: left out of the tests' names.
    """
    cases = ElementTree.fromstring(junit).iter("testcase")
    # One without a name is that during which pytest was interrupted.
    return [_row(case, release) for case in cases if case.get("name")]


def table(release: str, rows: Sequence[Row], wall_s: float, cpu_s: float) -> str:
    """Of one release."""
    width = max(len("what"), *(len(row.what) for row in rows))
    lines = [f"SGLang {release}", f"  {'result':6}  {'seconds':>7}  {'what':{width}}  seen"]
    for row in rows:
        line = f"  {row.word:6}  {row.seconds:7.0f}  {row.what:{width}}  {row.seen}"
        lines.append(line.rstrip())
    failed = sum(row.is_good is False for row in rows)
    verdict = f"{failed} failed" if failed else "nothing failed"
    return "\n".join([*lines, f"  {verdict}, {wall_s:.0f} s, {cpu_s:.0f} CPU-seconds"])


def chaos_counts(text: str) -> str:
    """Of what `scripts/chaos` prints, how requests ended; empty if it came to none."""
    return "; ".join(_COUNT.findall(text))


def _row(case: ElementTree.Element, release: str) -> Row:
    properties = {one.get("name"): one.get("value", "") for one in case.iter("property")}
    bad = [one for kind in ("failure", "error") for one in case.iter(kind)]
    left_out = next(case.iter("skipped"), None)
    seen = properties.get(_SEEN, "")
    if bad:
        seen = bad[0].get("message", "").partition("\n")[0]
    what = _words(case.get("name", ""), release)
    if left_out is not None:
        return Row(what, None, 0.0, f"left out: {left_out.get('message', '')}")
    return Row(what, not bad, float(case.get("time", 0.0)), seen)


def _words(test: str, release: str) -> str:
    """Of a test's name."""
    name, _, params = test.removesuffix("]").partition("[")
    params = params.removeprefix(release).removeprefix("-")
    name = name.removeprefix("test_").replace("_", " ")
    return f"{name}: {params}" if params else name
