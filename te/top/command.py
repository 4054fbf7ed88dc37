# SPDX-License-Identifier: Apache-2.0
"""The command ``te top``: asks the engines; a table once, JSON, or the live view."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from te.errors import StatusSocketError, UsageError
from te.stats import EngineStatus
from te.status import Live, ask, default_directories, running
from te.top.lines import lines
from te.top.rates import EngineRow, Sample, rows

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION: Final = """\
Shows the engines in this user's processes, their peers and the rails to each: state, rate in each
direction, transfers in flight, totals and failures. Rates are those since the last look. Names of
links begin with → where the engine writes to the peer, and with ← where the peer writes to it.

Keys: q or Ctrl-C ends. The exit status of --once is 1 when there is no engine."""

#: Engines that are asked at the same time, and for how long.
ASKED_AT_ONCE: Final = 16
TIMEOUT_S: Final = 2.0
INTERVAL_LEAST_S: Final = 0.1
#: Of --once without --all.
LINES_MAX: Final = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--once",
        action="store_true",
        help="look twice, print one table as plain text, and end: the busiest engines and links, in"
        f" at most {LINES_MAX} lines",
    )
    parser.add_argument(
        "--all", action="store_true", help="with --once: every engine and every link"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: one object a line for each look, or one in all with --once",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between two looks (default: 1)",
    )
    parser.add_argument(
        "--pid",
        type=int,
        action="append",
        metavar="PID",
        help="show this process alone; repeatable",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where the engines have their status sockets (default: $XDG_RUNTIME_DIR/te and"
        " /tmp/te-UID)",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status; ``te.UsageError`` for arguments that cannot be followed."""
    if not arguments.interval >= INTERVAL_LEAST_S:
        raise UsageError(f"--interval {arguments.interval} must be at least {INTERVAL_LEAST_S} s")
    places = default_directories() if arguments.dir is None else (arguments.dir,)
    pids = None if arguments.pid is None else frozenset(arguments.pid)

    def look() -> Sample:
        return sample(places, pids)

    if arguments.once:
        most = None if arguments.all else LINES_MAX
        return _once(look, arguments.interval, places, arguments.json, most)
    if arguments.all:
        raise UsageError("--all is for --once")
    if arguments.json:
        return _stream(look, arguments.interval)
    if not sys.stdout.isatty():
        raise UsageError("the live view needs a terminal: use --once or --json")
    if importlib.util.find_spec("rich") is None:
        raise UsageError(
            "the live view needs the package rich: pip install rich; te top --once needs nothing"
        )
    screen = importlib.import_module("te.top.screen")
    status: int = screen.show(look, arguments.interval, nobody(places))
    return status


# -- asking


def sample(places: tuple[Path, ...], pids: frozenset[int] | None) -> Sample:
    """Asks all engines, at the same time; those of these processes, or of all."""
    live: list[Live] = []
    problems: list[str] = []
    for place in places:
        try:
            live += [one for one in running(place) if pids is None or one.pid in pids]
        except StatusSocketError as exc:
            problems.append(str(exc))
    with concurrent.futures.ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        # Read in this thread: msgspec 0.22 crashes when two threads are the first to use a type.
        answers = [_status_of(*one) for one in zip(live, pool.map(_ask, live), strict=True)]
    problems += [one for one in answers if isinstance(one, str)]
    engines = tuple(one for one in answers if isinstance(one, EngineStatus))
    return Sample(time.monotonic(), engines, tuple(problems))


def _ask(live: Live) -> Any:
    """The answer, or why there is none."""
    try:
        return ask(live.path, "engine", timeout_s=TIMEOUT_S)
    except StatusSocketError as exc:
        return exc


def _status_of(live: Live, answer: Any) -> EngineStatus | str:
    if isinstance(answer, StatusSocketError):
        return f"pid {live.pid}: {answer}"
    try:
        return msgspec.convert(answer, EngineStatus)
    except msgspec.ValidationError as exc:
        return f"pid {live.pid} runs another version of te: {exc}"


def nobody(places: tuple[Path, ...]) -> str:
    """The sentence for no engine."""
    return f"No engine of this user is running (looked in {', '.join(map(str, places))})."


# -- showing


def _pairs(look: Callable[[], Sample], interval_s: float) -> Iterator[tuple[Sample, Sample]]:
    before = look()
    while True:
        time.sleep(interval_s)
        after = look()
        yield before, after
        before = after


def _once(
    look: Callable[[], Sample],
    interval_s: float,
    places: tuple[Path, ...],
    as_json: bool,
    most: int | None,
) -> int:
    before, after = next(_pairs(look, interval_s))
    found = rows(before, after)
    if as_json:
        _write(_json(before, after))
    elif found or after.problems:
        _write("\n".join(_table(found, after.problems, most)))
    else:
        _write(nobody(places))
    return 0 if found else 1


def _table(
    found: tuple[EngineRow, ...], problems: tuple[str, ...], most: int | None
) -> Iterator[str]:
    whole = lines(found, problems, None)
    is_whole = most is None or len(whole) <= most
    yield from (text for _, text in (whole if is_whole else lines(found, problems, None, most)))
    if not is_whole:
        yield "--all shows every engine and every link."


def _stream(look: Callable[[], Sample], interval_s: float) -> int:
    try:
        for before, after in _pairs(look, interval_s):
            _write(_json(before, after))
    except BrokenPipeError:
        sys.stderr.close()  # Else the interpreter complains about the pipe at its end.
    return 0


def _json(before: Sample, after: Sample) -> str:
    """An array of engines; see ``te.top.rates`` and ``te.stats`` for the fields."""
    engines: list[dict[str, Any]] = [dataclasses.asdict(one) for one in rows(before, after)]
    return msgspec.json.encode({"engines": engines, "problems": after.problems}).decode()


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
