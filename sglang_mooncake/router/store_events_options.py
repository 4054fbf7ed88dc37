# SPDX-License-Identifier: Apache-2.0
"""The command line of ``sglang-mooncake store-events``. Pure."""

from __future__ import annotations

import argparse
import re
from typing import Final

import msgspec

from te.arguments import whole

__all__ = ["DESCRIPTION", "StoreEventsOptions", "add_arguments", "options_of"]

DESCRIPTION: Final = """\
Tells other routers and indexers what the store has: publishes KV events as SGLang's servers do, of
the medium EXTERNAL, and repeats the last ones when it is asked. Needs no server and no router.

  sglang-mooncake store-events --page-size 64 --store '{"index": "redis://10.0.0.9:6379"}' \\
      --secret-file /etc/sglang-mooncake.secret
"""

_ENDPOINT: Final = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.%\w]+\]|[^\s/*:\[\]]+):\d{1,5}")
BATCHES_MAX: Final = 1_000_000


class StoreEventsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. The endpoints are listened at, and have the forms of ZeroMQ."""

    #: Settings of the store, a JSON object.
    store: str
    secret_file: str | None
    #: Tokens of a page.
    page_size: int
    endpoint: str
    replay_endpoint: str
    topic: str
    #: How many batches are kept.
    batches: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command. Those about events have the names of SGLang's
    ``--kv-events-config``."""
    add = parser.add_argument
    add(
        "--page-size",
        type=whole(1, 65_536),
        required=True,
        metavar="N",
        help="tokens of a page, as the servers have it (--page-size there)",
    )
    add(
        "--store",
        default="{}",
        metavar="JSON",
        help="the store's settings, as the servers have them, such as"
        """ '{"index": "redis://10.0.0.9:6379"}' ('{}': this host's)""",
    )
    add("--secret-file", metavar="PATH", help="the deployment's secret, where the store needs it")
    add(
        "--endpoint",
        type=_endpoint,
        default="tcp://*:5557",
        metavar="URL",
        help="publish there (tcp://*:5557)",
    )
    add(
        "--replay-endpoint",
        type=_endpoint,
        default="tcp://*:5558",
        metavar="URL",
        help="repeat events there for those who have missed some (tcp://*:5558)",
    )
    add("--topic", default="", metavar="TEXT", help="topic of the events (none)")
    add(
        "--buffer-steps",
        type=whole(1, BATCHES_MAX),
        default=10_000,
        metavar="N",
        help="so many batches of up to 1,000 pages are kept to be repeated (10000: up to 90 MB, and"
        " twice that for each asker that does not read)",
    )


def options_of(parsed: argparse.Namespace) -> StoreEventsOptions:
    """Of a command line that ``add_arguments`` has read."""
    return StoreEventsOptions(
        store=parsed.store,
        secret_file=parsed.secret_file,
        page_size=parsed.page_size,
        endpoint=parsed.endpoint,
        replay_endpoint=parsed.replay_endpoint,
        topic=parsed.topic,
        batches=parsed.buffer_steps,
    )


def _endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form tcp://HOST:PORT")
    return text
