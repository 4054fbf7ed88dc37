# SPDX-License-Identifier: Apache-2.0
"""`scripts/nixl-beside`: from arguments to a table."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet

from nixl_beside import agents, pairs
from nixl_beside.contenders import Absent, about
from nixl_beside.options import BesideOptions, parse
from nixl_beside.processes import AgentError
from nixl_beside.rows import AGENTS, PAIRS, ROWS, table
from nixl_beside.servers import Pair, known, start_alone

__all__ = ["main"]

EXIT_UNUSABLE = 2
EXIT_BROKEN = 3


def main(argv: Sequence[str]) -> int:
    """0: all was found out. 2: NVIDIA's package is not there. 3: something failed that no row is
    about. Bars that are not reached are said, and no failure: machines differ."""
    options = parse(argv)
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-nixl-"))
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    try:
        _agents(options, run_dir / "agents.log", found)
        _servers(options, run_dir, found)
    except Absent as error:
        print(f"nixl-beside: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except (AgentError, ServingError) as error:
        print(f"nixl-beside: {error}\nnixl-beside: logs are in {run_dir}", file=sys.stderr)
        return EXIT_BROKEN
    finally:
        ordered = {name: found[name] for name in ROWS if name in found}
        if ordered:
            print("\n".join([about(), "", *table(ordered)]))
        if options.json:
            options.json.write_text(json.dumps(ordered, default=_plain, indent=1) + "\n")
    shutil.rmtree(run_dir)
    return 0


def _agents(options: BesideOptions, log: Path, found: dict[str, dict[str, Any]]) -> None:
    for name in (one for one in options.rows if one in AGENTS):
        for contender in options.contenders:
            with Step(f"{name}, {contender}"):
                found[name][contender] = agents.row(name, contender, options.patience_s, log)
    for name in (one for one in options.rows if one in agents.SHAPES):
        with Step(f"{name}, in turn"):
            found[name] |= agents.in_turn(name, options.contenders, options.rounds, log)


def _servers(options: BesideOptions, run_dir: Path, found: dict[str, dict[str, Any]]) -> None:
    rows = [one for one in options.rows if one in PAIRS]
    is_ttft = "ttft" in options.rows
    if not rows and not is_ttft:
        return
    with tempfile.TemporaryDirectory(prefix="kv") as directory, Fleet(run_dir) as fleet:
        place = Path(directory)
        if rows:
            with Step("an ordinary server, and what it answers"):
                asked = known(start_alone(fleet, place), *pairs.KNOWN)
        for contender in options.contenders if rows else ():
            with _started(options, fleet, place, [contender]) as started:
                for name in rows:
                    with Step(f"{name}, {contender}"):
                        found[name][contender] = pairs.row(name, started[contender], asked, options)
        if is_ttft:
            with (
                _started(options, fleet, place, options.contenders) as started,
                Step("ttft, in turn"),
            ):
                found["ttft"] |= pairs.ttft(started, options.rounds)


@contextmanager
def _started(
    options: BesideOptions, fleet: Fleet, place: Path, names: Sequence[str]
) -> Iterator[Mapping[str, Pair]]:
    """A pair of servers of each contender."""
    with ExitStack() as stack:
        started = {}
        for name in names:
            with Step(f"a prefill and a decode server, {name}"):
                started[name] = Pair(fleet, place, name, options.connector)
            stack.callback(started[name].stop)
        yield started


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
