# SPDX-License-Identifier: Apache-2.0
"""The command `sglang-mooncake`. It needs neither SGLang nor torch."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from bootstrap_server import MismatchError
from bootstrap_server.admission.secret import new_secret
from bootstrap_server.admission.secret_file import write_secret_file
from sglang_mooncake.layout import LayoutMismatch
from sglang_mooncake.router import options as router_options
from sglang_mooncake.router import registering, store_events_options
from sglang_mooncake.sglang import configuring, explaining, running
from sglang_mooncake.sglang.dry_run.flags import (
    FlagError,
    ServerFlags,
    check_page_sizes,
    check_release,
    check_roles,
    parse_flags,
)
from sglang_mooncake.sglang.dry_run.models import KNOWN, ModelError, load_model, one_model
from sglang_mooncake.sglang.dry_run.options import installed_release
from sglang_mooncake.sglang.dry_run.pairs import Server, plan_pairs
from sglang_mooncake.sglang.dry_run.report import Report
from te.arguments import Parser, number, whole
from te.version import version

__all__ = ["main"]

EXIT_REFUSED = 2
#: What most of SGLang's GPU attention backends choose or allow; its own default is theirs to set.
PAGE_SIZE = 64
#: One NIC of today's GPU servers per GPU.
RAIL_GBIT = 400.0
_RELEASE = re.compile(r"\d+\.\d+\.\d+[a-z0-9.]*")

_PLAN = """\
Shows which prefill rank would send what to which decode rank, in how many bytes and pieces, without
starting a server. Exit status 2, with the reason, if the hand-over would refuse the two servers.

  sglang-mooncake plan --model deepseek-v3 --prefill "tp=16 dp=4 ep=16" --decode "tp=32 dp=32"
  sglang-mooncake plan --prefill "--model-path /models/m --tp 8" --decode "--tp 4 --pp-size 1"
"""

_SECRET = """\
Makes a secret of 256 random bits for a deployment, and prints it or writes it to a new file that
only its owner may read. Give the same file to all servers (SGLANG_MOONCAKE_SECRET_FILE).

  sglang-mooncake secret --file /etc/sglang-mooncake.secret
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command."""
    parser = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words:  # What it can do.
        parser.print_help()
        return 0
    parsed = parser.parse_args(words)
    match parsed.command:
        case "secret":
            return _secret(parsed.file)
        case "explain":
            return explaining.explain(parsed)
        case "config":
            return configuring.show_config(parsed)
        case "router":
            return _router(parsed)
        case "register":
            return registering.register(parsed)
        case "store-events":
            return _store_events(parsed)
        case "run":
            return running.run(parsed.words)
        case _:
            return _planned(parsed)


def _secret(path: str | None) -> int:
    if path is None:
        sys.stdout.write(new_secret() + "\n")
        return 0
    try:
        write_secret_file(path)
    except ValueError as error:
        sys.stderr.write(f"sglang-mooncake secret: {error}\n")
        return EXIT_REFUSED
    sys.stdout.write(
        f"{path} has a new secret, which only its owner may read. Copy the file to all servers, and"
        f" name it in their environment: SGLANG_MOONCAKE_SECRET_FILE={path}\n"
    )
    return 0


def _router(parsed: argparse.Namespace) -> int:
    try:
        options = router_options.options_of(parsed)
    except router_options.OptionsError as error:
        sys.stderr.write(f"sglang-mooncake router: {error}\n")
        return EXIT_REFUSED
    # Here, since an HTTP server takes longer to import than the other commands take to run.
    from sglang_mooncake.router.serving import serve

    return serve(options)


def _store_events(parsed: argparse.Namespace) -> int:
    # Here, since the store takes longer to import than the other commands take to run.
    from sglang_mooncake.router.publishing import publish_store

    return publish_store(store_events_options.options_of(parsed))


def _planned(parsed: argparse.Namespace) -> int:
    try:
        report = _plan(parsed)
    except (FlagError, ModelError, MismatchError, LayoutMismatch) as error:
        sys.stderr.write(f"sglang-mooncake plan: {error}\n")
        return EXIT_REFUSED
    text = json.dumps(report.as_json()) if parsed.json else report.text()
    sys.stdout.write(text + "\n")
    return 0


def _plan(parsed: argparse.Namespace) -> Report:
    prefill, decode = _flags("--prefill", parsed.prefill), _flags("--decode", parsed.decode)
    if decode.kv_cache_sharding:
        raise FlagError("--decode: --enable-kv-cache-sharding is for prefill servers alone")
    check_roles(prefill, decode)
    release = parsed.sglang or installed_release()
    if release is not None:
        check_release("prefill", prefill, release)
        check_release("decode", decode, release)
    if parsed.page_size is None:
        check_page_sizes(prefill, decode)
    model = parsed.model or one_model(prefill.model, decode.model)
    servers = [
        Server(
            load_model(model).with_dtype(flags.dtype).with_dtype(flags.kv_cache_dtype),
            flags.topology,
            flags.page_size or parsed.page_size or PAGE_SIZE,
            flags.dcp_size,
            flags.kv_cache_sharding,
            flags.decode_allocation_policy,
        )
        for flags in (prefill, decode)
    ]
    pairs = list(plan_pairs(servers[0], servers[1], all_cp_ranks=parsed.all_cp_ranks))
    return Report(servers[0], servers[1], pairs, parsed.rail_gbit)


def _flags(option: str, text: str) -> ServerFlags:
    try:
        return parse_flags(text)
    except FlagError as error:
        raise FlagError(f"{option}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sglang-mooncake", description="KV-cache hand-over between servers.")
    parser.add_argument("--version", action="version", version=f"sglang-mooncake {version()}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, does: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=does,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    plan = command(
        "plan", "show what would be sent between two servers, without starting them", _PLAN
    )
    add = plan.add_argument
    add("--model", metavar="M", help=f"{', '.join(KNOWN)}, or a config.json or its directory")
    add(
        "--prefill",
        required=True,
        metavar="FLAGS",
        help="prefill's: words like 'tp=8 dp=2', or SGLang's flags",
    )
    add("--decode", required=True, metavar="FLAGS", help="decode's, likewise")
    add(
        "--sglang",
        type=_release,
        metavar="RELEASE",
        help="of both servers, such as 0.5.21: modes that it does not have are refused (the "
        "installed one, if there is one)",
    )
    add(
        "--page-size",
        type=whole(1, 65_536),
        metavar="N",
        help=f"tokens per page where the flags do not say it ({PAGE_SIZE})",
    )
    add(
        "--rail-gbit",
        type=number(0.001, 1e6, "Gbit/s"),
        default=RAIL_GBIT,
        metavar="G",
        help=f"rate at which one rank can send or receive, in Gbit/s ({RAIL_GBIT:g})",
    )
    add(
        "--all-cp-ranks",
        action="store_true",
        help="plan as if both servers had SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER set",
    )
    add("--json", action="store_true", help="print every pair of ranks as one JSON object")
    secret = command("secret", "make the secret that all servers of a deployment share", _SECRET)
    secret.add_argument("--file", metavar="PATH", help="write it to this new file")
    explain = command(
        "explain", "show where the time of a request's hand-over went", explaining.DESCRIPTION
    )
    explaining.add_arguments(explain)
    config = command(
        "config",
        "show the settings that a server would have, and where they come from",
        configuring.DESCRIPTION,
    )
    configuring.add_arguments(config)
    router = command(
        "router",
        "take clients' requests for prefill and decode servers, in mini-lb's place",
        router_options.DESCRIPTION,
    )
    router_options.add_arguments(router)
    register = command(
        "register", "have a router answer for a cache of another server", registering.DESCRIPTION
    )
    registering.add_arguments(register)
    store_events = command(
        "store-events",
        "tell other routers what the store has, by KV events",
        store_events_options.DESCRIPTION,
    )
    store_events_options.add_arguments(store_events)
    run = command(
        "run",
        "run another program, such as vLLM, with mooncake.engine and nixl over te",
        running.DESCRIPTION,
    )
    run.add_argument("words", nargs="+", metavar="COMMAND", help="behind --, with its arguments")
    return parser


def _release(text: str) -> str:
    if not _RELEASE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no release of SGLang, such as 0.5.21")
    return text


if __name__ == "__main__":
    sys.exit(main())
