# SPDX-License-Identifier: Apache-2.0
"""What is tried with one release of SGLang, step by step. What commands say goes to a log."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from release_trial.table import Row, chaos_counts, rows_of

__all__ = ["Trial"]

ROOT = Path(__file__).parents[2]
ALONE = ("tests/sglang/test_seam_members.py", "tests/sglang/test_release_modes.py")
SERVERS = ("tests/serving/test_serving_releases.py",)
#: Far beyond what is needed.
SETUP_TIMEOUT_S = 1800.0
TESTS_TIMEOUT_S = 3600.0
#: Of tests that failed, so many have their words in a row.
SHOWN = 3
#: As a shell says it.
TIMED_OUT = 124


@dataclass(frozen=True)
class Done:
    """A command that has ended, or was ended at its deadline (TIMED_OUT)."""

    code: int
    output: str
    seconds: float


class Trial:
    def __init__(self, release: str, log: Path) -> None:
        self.release, self.log = release, log
        self._at = ROOT / "build/sglang" / release

    def rows(self, chaos_minutes: float | None) -> list[Row]:
        self._say("installing it")
        done = self._run([str(ROOT / "scripts/setup"), "release", self.release], SETUP_TIMEOUT_S)
        if done.code:
            return [Row("installed", False, done.seconds, _last_line(done.output))]
        rows = [Row("installed", True, done.seconds), self._seam()]
        rows += [self._alone(), *self._servers()]
        if chaos_minutes is not None:
            rows.append(self._chaos(chaos_minutes))
        return rows

    def _seam(self) -> Row:
        """For people: an older release lacks what it is known to lack, a newer one what is to be
        mended."""
        self._say("what it lacks or has otherwise than the installed release")
        installed = sysconfig.get_path("purelib")
        argv = [sys.executable, "-m", "sglang_seam", installed, str(self._at)]
        done = self._run(argv, SETUP_TIMEOUT_S)
        print(done.output, end="", flush=True)
        return Row("what our code uses", None, done.seconds, _last_line(done.output))

    def _alone(self) -> Row:
        """Tests that run in that release themselves. What failed is in the log."""
        name = "what needs no server"
        done, rows = self._pytest(name, ALONE, self._first())
        bad = [row for row in rows if not row.is_good]
        seen = "; ".join(f"{row.what}: {row.seen}" for row in bad[:SHOWN])
        return Row(name, done.code == 0, done.seconds, seen or f"{len(rows)} tests")

    def _servers(self) -> list[Row]:
        """Tests that start its servers."""
        name = "servers"
        done, rows = self._pytest(name, ("--sglang-release", self.release, *SERVERS), {})
        if done.code and all(row.is_good for row in rows):
            said = f"pytest ended with status {done.code}: {_last_line(done.output)}"
            rows.append(Row(name, False, done.seconds, said))
        return rows

    def _pytest(
        self, name: str, words: Sequence[str], env: Mapping[str, str]
    ) -> tuple[Done, list[Row]]:
        self._say(name)
        report = self.log.with_name(f"{self.release}-{name.replace(' ', '-')}.xml")
        argv = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *words]
        done = self._run(argv, TESTS_TIMEOUT_S, env)
        return done, rows_of(report.read_text(), self.release) if report.exists() else []

    def _chaos(self, minutes: float) -> Row:
        self._say(f"chaos for {minutes:g} min")
        argv = [sys.executable, "-m", "chaos_run", "--minutes", f"{minutes:g}"]
        done = self._run(argv, TESTS_TIMEOUT_S, self._first())
        seen = chaos_counts(done.output) or _last_line(done.output)
        return Row(f"chaos for {minutes:g} min", done.code == 0, done.seconds, seen)

    def _first(self) -> Mapping[str, str]:
        """The environment of a program that shall have that release itself."""
        return {"PYTHONPATH": f"{self._at}:{os.environ.get('PYTHONPATH', '')}"}

    def _run(
        self, argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> Done:
        began_s = time.monotonic()
        with self.log.open("a+") as log:
            log.write(f"\n### {' '.join(argv)}\n")
            log.flush()
            start = log.tell()
            try:
                done = subprocess.run(
                    argv,
                    cwd=ROOT,
                    env={**os.environ, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            log.seek(start)
            return Done(code, log.read(), time.monotonic() - began_s)

    def _say(self, what: str) -> None:
        print(f"SGLang {self.release}: {what} ...", flush=True)


def _last_line(text: str) -> str:
    return next(iter(reversed(text.strip().splitlines())), "")
