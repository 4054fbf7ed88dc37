# SPDX-License-Identifier: Apache-2.0
"""The command ``kvstore``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

import te
from kvstore.client.status import QUESTION, StoreStatus, lines, status_of
from kvstore.config import Config
from kvstore.host.directory import Directory
from kvstore.host.place import Place
from kvstore.memory.policies import POLICIES
from kvstore.metrics.http import MetricsServer
from kvstore.networking import config_of
from kvstore.owning import OwningStore
from kvstore.serving import allow_open_files, lock_of, serve
from kvstore.values import parse_bytes
from te import status
from te.arguments import BAD_USAGE, Parser, address
from te.checkout import of_checkout
from te.version import version

__all__ = ["main"]

#: Processes that `top` shows without --all.
ROWS_MAX = 40
TOOLS: Final = {
    "bench": "measure the store on this host beside its peers and beside plain copies",
    "replay": "hit ratios of a recorded trace, by policy and capacity",
}
"""Commands that stand beside the store in a checkout, and are not released."""


def _parser(tools: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = Parser(prog="kvstore", description="A pool of KV-cache objects for LLM servers.")
    parser.add_argument("--version", action="version", version=f"kvstore {version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="lend memory that outlives the engines of this host",
        description="Lends memory to the store until it is told to end (SIGTERM, Ctrl-C). Engines"
        " of the same user on this host find it by the directory of sockets.",
    )
    _add_what_is_kept(serve)
    _add_how_it_is_reached(serve)
    serve.set_defaults(run=_serve)
    top = commands.add_parser(
        "top",
        help="show what the store's processes of this user hold and do",
        description="Prints a line for each process. LENDS: memory for the store. OBJECTS, EVICTED:"
        " pages there, and pages that had to go. LOWER, PROMOTED, DROPPED: pages on its disk, read"
        " from there, and gone without a copy there. OWNERS: of a server, whether its host's"
        " owner answers (1/1); of an owner, those of other hosts, usable/known. HITS:"
        " part of the pages asked for that were found. REJECTED: found under other weights, dtype,"
        " TP or page size. LOST: found, and did not come. DECLINED: found, and computed since that"
        " was expected to be faster. UNPAID: loads that took longer than computing, of those whose"
        " time was estimated.",
    )
    top.add_argument("--once", action="store_true", help="print once, and end")
    top.add_argument(
        "--all",
        action="store_true",
        help=f"show every process, and not the {ROWS_MAX} that have moved the most bytes",
    )
    top.add_argument("--json", action="store_true", help="print one JSON array a time")
    top.add_argument("--interval", type=float, default=2.0, help="seconds between two prints")
    top.add_argument(
        "--dir", type=Path, help="where the engines' status sockets are (default: as te has it)"
    )
    top.set_defaults(run=_top)
    for name, summary in TOOLS.items():
        module = tools.get(name)
        if module is None:
            commands.add_parser(name, help=f"{summary} (not part of the wheel)")
            continue
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _tools() -> dict[str, Any]:
    """The modules of ``TOOLS`` that are there."""
    found = {
        "bench": of_checkout("kvstore_tools.bench.command"),
        "replay": of_checkout("kvstore_tools.replay"),
    }
    return {name: module for name, module in found.items() if module is not None}


def _add_what_is_kept(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--memory", type=_size, required=True, help="how much, such as 64GiB or 512MiB"
    )
    serve.add_argument(
        "--directory", type=Path, help="where the store's sockets are (default: /tmp/kvstore-UID)"
    )
    serve.add_argument(
        "--file", type=Path, help="keep it in this file, so that a restart finds it again"
    )
    serve.add_argument(
        "--disk", type=Path, help="a directory for what is evicted; a restart finds it again"
    )
    serve.add_argument(
        "--disk-size", type=_size, help="how much of that disk, such as 500GiB; needed with --disk"
    )
    serve.add_argument(
        "--objects",
        default="",
        metavar="URL",
        help="object storage, below a disk or without one: s3://BUCKET/PREFIX, gs://…, az://… or"
        " file:///DIR",
    )
    serve.add_argument(
        "--objects-size", type=_size, help="how much is stored there; needed with --objects"
    )
    serve.add_argument("--policy", choices=sorted(POLICIES), default=Config().policy)


def _add_how_it_is_reached(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--index",
        default="",
        help="where the processes of several hosts meet: redis://HOST:6379, etcd://HOST:2379 or"
        " registry://HOST:8998",
    )
    serve.add_argument(
        "--secret-file", type=Path, help="the deployment's secret; needed with --index"
    )
    serve.add_argument(
        "--host",
        default="",
        help="the address for others (default: the one that leads to the index, or 127.0.0.1)",
    )
    serve.add_argument(
        "--transports",
        default="",
        help="how others reach the memory, the preferred one first: some of samehost,rdma,tcp"
        " (default: all with --index, else samehost,tcp)",
    )
    serve.add_argument(
        "--nics", default="", help="RDMA devices to use: mlx5_*,!mlx5_1 (default: all)"
    )
    serve.add_argument(
        "--ports",
        default="",
        metavar="FIRST-LAST",
        help="listen at two of these ports: 20000-20100 (default: any free ones)",
    )
    serve.add_argument(
        "--encrypt",
        action="store_true",
        help="encrypt what goes over the network, as all processes at the index must",
    )
    serve.add_argument(
        "--metrics",
        type=address,
        metavar="HOST:PORT",
        help="answer GET /metrics there, for Prometheus; 0.0.0.0 is every address of this host",
    )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    given = {
        "memory": options.memory,
        "policy": options.policy,
        "directory": options.directory,
        "file": options.file,
        "disk": options.disk,
        "disk_size": options.disk_size,
        "objects": options.objects,
        "objects_size": options.objects_size,
        "index": options.index,
        "secret_file": options.secret_file,
        "host": options.host,
        "transports": options.transports,
        "nics": options.nics,
        "ports": options.ports,
        "encrypt": options.encrypt,
    }
    config = config_of({name: value for name, value in given.items() if value is not None})
    allow_open_files()

    @contextlib.contextmanager
    def told(store: OwningStore) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if options.metrics is not None:
                store.teller.keep()
                server = stack.enter_context(MetricsServer(store.status, *options.metrics))
                print(f"kvstore: metrics at {server.url}", flush=True)  # noqa: T201
            place = "at the index" if config.index else f"in {config.directory}"
            print(f"kvstore: lends {config.memory} bytes, {place}", flush=True)  # noqa: T201
            yield

    with contextlib.closing(Directory(config.directory)):
        place = Place(config.directory)
        serve(config, place, lock_of(config, place), None, told)
    return 0


def _top(options: argparse.Namespace) -> int:
    said = ""
    while True:
        found = list(_statuses(options.dir))
        if options.json:
            text = json.dumps([msgspec.to_builtins(one) for one in found])
        elif found:
            text = "\n".join(lines(found, None if options.all else ROWS_MAX))
        else:
            text = f"no process of this user has a store (looked in {_places(options.dir)})"
        if found or text != said:  # That there is none is said once, not once a second.
            print(text, flush=True)  # noqa: T201
        said = text
        if options.once:
            return 0
        time.sleep(options.interval)


def _places(directory: Path | None) -> str:
    return ", ".join(map(str, [directory] if directory else status.default_directories()))


def _statuses(directory: Path | None) -> list[StoreStatus]:
    found: list[StoreStatus] = []
    for live in status.running(directory):
        # Other engines do not know the question, and a process may end meanwhile.
        with contextlib.suppress(te.StatusSocketError):
            found.append(status_of(status.ask(live.path, QUESTION)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    tools = _tools()
    if words and words[0] in TOOLS and words[0] not in tools:
        sys.stderr.write(
            f"kvstore {words[0]} is not part of the wheel: use a checkout (pip install -e .)\n"
        )
        return BAD_USAGE
    parser = _parser(tools)
    if not words:  # What it can do.
        parser.print_help()
        return 0
    parsed = parser.parse_args(words)
    try:
        result: int = parsed.run(parsed)
    except (te.Error, ValueError, OSError) as error:
        sys.stderr.write(f"kvstore {parsed.command}: {error}\n")
        return BAD_USAGE
    except KeyboardInterrupt:
        return 130
    return result


if __name__ == "__main__":
    sys.exit(main())
