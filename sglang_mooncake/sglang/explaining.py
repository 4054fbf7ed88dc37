# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake explain`: asks the ranks of this host, or reads what they have told others."""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from sglang_mooncake.explain.drawing import as_svg
from sglang_mooncake.explain.elsewhere import (
    ANSWER_BYTES_MAX,
    EXIT_UNKNOWN,
    NotTold,
    ask_there,
)
from sglang_mooncake.explain.questions import COUNT_MAX, RankStories
from sglang_mooncake.explain.text import as_text, refused_text
from sglang_mooncake.explain.timeline import Timeline, timelines
from te.arguments import whole
from te.errors import StatusSocketError
from te.printable import printable
from te.status import ask, running

__all__ = ["add_arguments", "explain"]

DESCRIPTION: Final = """\
Shows where the time of a request's hand-over went: a timeline of its stages on every rank.

  sglang-mooncake explain --last               the request that ended last on this host
  sglang-mooncake explain --slowest 3          the three slowest since the servers started
  sglang-mooncake explain 1234 --svg room.svg  one request, by its bootstrap room

The command asks the ranks of this host. For servers on other hosts or in other containers, name
commands that run a program there:

  sglang-mooncake explain --last --on 'ssh prefill-0' 'ssh decode-0'
  sglang-mooncake explain 1234 --on 'kubectl exec prefill-0 --' 'kubectl exec decode-0 --'

Or save what the ranks of each host tell and show it together:

  sglang-mooncake explain 1234 --json > a.json         on each host
  sglang-mooncake explain 1234 --from a.json b.json    on any of them

Exit status: 0, 1 if no rank knows such a request, 2 if nobody could be asked.
"""

EXIT_NOBODY: Final = 2
_TIMEOUT_S: Final = 5.0
_FILE_BYTES_MAX: Final = ANSWER_BYTES_MAX
_COMMANDS_AT_ONCE: Final = 16


class _Failed(Exception):
    """The command ends with this status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("room", nargs="?", type=int, help="bootstrap room of the request")
    which.add_argument("--last", action="store_true", help="the request that ended last")
    which.add_argument(
        "--slowest",
        type=whole(1, COUNT_MAX),
        metavar="N",
        help=f"the N slowest requests, up to {COUNT_MAX}",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="also draw the requests that are shown as SVG, one below the other",
    )
    parser.add_argument(
        "--json", action="store_true", help="print what each rank told, for --from and programs"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--on",
        nargs="+",
        default=(),
        metavar="COMMAND",
        help="also ask the ranks of other hosts: commands that run a program there, such as"
        " 'ssh decode-0'; 'sglang-mooncake' is added unless it is the last word",
    )
    others.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="read what --json printed on other hosts, instead of asking the ranks of this one",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory of the status sockets (SGLANG_MOONCAKE_STATUS_DIR of the servers),"
        " also where --on asks",
    )


def explain(parsed: argparse.Namespace) -> int:
    """The exit status of the command."""
    try:
        told = _read(parsed.files) if parsed.files else _joined(_told(parsed))
        chosen = _chosen(parsed, timelines(told))
        if not chosen:
            if refused := refused_text(told):
                sys.stdout.write(f"{refused}\n")
            raise _Failed(EXIT_UNKNOWN, _unknown(parsed, told))
        if parsed.json:
            rooms = {line.room for line in chosen}
            kept = [_only(one, rooms) for one in told]
            sys.stdout.write(msgspec.json.encode(kept).decode() + "\n")
        else:
            parts = [as_text(line) for line in chosen] + [refused_text(told)]
            sys.stdout.write("\n\n".join(filter(None, parts)) + "\n")
        if parsed.svg is not None:
            _draw(chosen, parsed.svg)
    except _Failed as failed:
        sys.stderr.write(f"sglang-mooncake explain: {printable(str(failed))}\n")
        return failed.status
    return 0


def _only(one: RankStories, rooms: set[int]) -> RankStories:
    stories = tuple(story for story in one.stories if story.room in rooms)
    return msgspec.structs.replace(one, stories=stories)


def _draw(lines: Sequence[Timeline], path: Path) -> None:
    try:
        path.write_text(as_svg(lines))
    except OSError as error:
        raise _Failed(EXIT_NOBODY, f"cannot write {path}: {error.strerror}") from error


def _chosen(parsed: argparse.Namespace, lines: list[Timeline]) -> list[Timeline]:
    if parsed.room is not None:
        return [line for line in lines if line.room == parsed.room]
    if parsed.last:
        return lines[-1:]
    return sorted(lines, key=lambda line: line.duration_s, reverse=True)[: parsed.slowest]


def _told(parsed: argparse.Namespace) -> list[RankStories]:
    """What the ranks know of the rooms in question: first which those are, unless the user says it,
    then all about them."""
    paths = _sockets(parsed.dir, may_be_none=bool(parsed.on))
    if parsed.room is not None:
        return _asked(parsed, paths, "room", parsed.room)
    question, count = ("slowest", parsed.slowest) if parsed.slowest else ("last", 1)
    first = _asked(parsed, paths, question, count)
    lines = _chosen(parsed, timelines(_joined(first)))
    rooms = sorted({line.room for line in lines})
    return [one for room in rooms for one in _asked(parsed, paths, "room", room)] or first


def _asked(
    parsed: argparse.Namespace, paths: Sequence[Path], question: str, number: int
) -> list[RankStories]:
    """The answers of the ranks of this host and of all others. A host that cannot be asked is named
    on standard error, unless none answers at all."""
    name = "room" if question == "room" else "count"
    arguments = {"room": [str(number)], "last": ["--last"]}.get(
        question, ["--slowest", str(number)]
    )
    if parsed.dir is not None:
        arguments += ["--dir", str(parsed.dir)]
    answers = _ask(paths, question, {name: number}) if paths else []
    problems = []
    with concurrent.futures.ThreadPoolExecutor(_COMMANDS_AT_ONCE) as pool:
        waiting = [pool.submit(ask_there, command, arguments) for command in parsed.on]
    for one in waiting:
        try:
            answers += one.result()
        except NotTold as error:
            problems.append(str(error))
    if not paths and problems and len(problems) == len(parsed.on):
        raise _Failed(EXIT_NOBODY, f"no host could be asked: {'; '.join(problems)}")
    for problem in problems:
        sys.stderr.write(f"sglang-mooncake explain: a host is left out: {printable(problem)}\n")
    return answers


def _joined(answers: Sequence[RankStories]) -> list[RankStories]:
    """One answer for each rank, with the rooms of all that it gave. A host may have been asked
    twice, so that a rank tells the same again."""
    by_rank: dict[tuple[str, str, int], RankStories] = {}
    for one in answers:
        key = one.boot_id, one.rank, one.pid
        former = by_rank.get(key)
        if former is not None:
            known = {(story.room, story.serial) for story in former.stories}
            new = (story for story in one.stories if (story.room, story.serial) not in known)
            one = msgspec.structs.replace(one, stories=(*former.stories, *new))
        by_rank[key] = one
    return list(by_rank.values())


def _sockets(directory: Path | None, *, may_be_none: bool) -> list[Path]:
    try:
        found = [live.path for live in running(directory)]
    except StatusSocketError as error:
        raise _Failed(EXIT_NOBODY, str(error)) from error
    if not found and not may_be_none:
        where = directory or "the default directories"
        raise _Failed(
            EXIT_NOBODY,
            f"no rank of this user runs on this host (no status sockets in {where}). Run it as the"
            " user and in the container of the servers, and give --dir if they have"
            " SGLANG_MOONCAKE_STATUS_DIR set; --on asks other hosts",
        )
    return found


def _ask(paths: Sequence[Path], question: str, arguments: dict[str, int]) -> list[RankStories]:
    """The answers of those that have rooms; engines of other programs do not know the question."""
    answers, problems = [], []
    with concurrent.futures.ThreadPoolExecutor(min(16, len(paths))) as pool:
        waiting = [pool.submit(ask, path, question, arguments, _TIMEOUT_S) for path in paths]
    for one in waiting:
        try:
            answers.append(msgspec.convert(one.result(), RankStories))
        except (StatusSocketError, msgspec.ValidationError) as error:
            problems.append(str(error))
    if not answers:
        raise _Failed(EXIT_NOBODY, f"no rank answers: {'; '.join(problems)}")
    return answers


def _read(files: Sequence[Path]) -> list[RankStories]:
    told: list[RankStories] = []
    for path in files:
        try:
            if path.stat().st_size > _FILE_BYTES_MAX:
                raise _Failed(EXIT_NOBODY, f"{path} is larger than any output of --json")
            told += msgspec.json.decode(path.read_bytes(), type=list[RankStories])
        except OSError as error:
            raise _Failed(EXIT_NOBODY, f"cannot read {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise _Failed(EXIT_NOBODY, f"{path} is not an output of --json: {error}") from error
    return told


def _unknown(parsed: argparse.Namespace, told: Sequence[RankStories]) -> str:
    ended = sum(one.ended for one in told)
    if parsed.room is None:
        return f"no request has ended yet on the {len(told)} ranks that were asked"
    ages = [one.monotonic_s - one.oldest_s for one in told if one.oldest_s is not None]
    reach = f"; the oldest that is kept began {max(ages):.0f} s ago" if ages else ""
    return (
        f"none of the {len(told)} ranks that were asked knows room {parsed.room}. They have ended"
        f" {ended} rooms and keep the latest of them (SGLANG_MOONCAKE_STORY_ROOMS){reach}."
        " --on asks the ranks of other hosts"
    )
