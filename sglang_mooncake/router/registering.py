# SPDX-License-Identifier: Apache-2.0
"""``sglang-mooncake register``: has a router answer for a cache that publishes KV events."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Final

from bootstrap_server import BootstrapError
from bootstrap_server.admission.secret_file import read_keys
from bootstrap_server.client.http import HttpClient
from sglang_mooncake.router.registered import REGISTER, UNREGISTER

__all__ = ["DESCRIPTION", "add_arguments", "register"]

DESCRIPTION: Final = """\
Tells a router of a cache that publishes KV events and is none of its servers', in the form of
Mooncake's RFC 1403, and proves that it may with the deployment's secret.

  sglang-mooncake register 10.0.0.1:8000 --secret-file /etc/sglang-mooncake.secret \\
      '{"endpoint": "tcp://10.0.0.7:5557", "instance_id": "http://10.0.0.7:3000", "block_size": 64}'
"""

TIMEOUT_S: Final = 10.0
EXIT_REFUSED: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("router", metavar="HOST:PORT", help="where the router listens")
    add("registration", metavar="JSON", help="what POST /register takes")
    add("--secret-file", metavar="PATH", help="the deployment's secret, where the router has it")
    add(
        "--end",
        action="store_true",
        help="end the registration: instance_id, tenant_id and dp_rank name it",
    )


def register(parsed: argparse.Namespace) -> int:
    """The exit status: 2, with the reason, where the router does not take it."""
    path = UNREGISTER if parsed.end else REGISTER
    try:
        keys = read_keys(parsed.secret_file).registry
        client = HttpClient(parsed.router, TIMEOUT_S, "the router", keys=keys)
        with contextlib.closing(client):
            status, answer = client.request("POST", path, parsed.registration.encode())
    except (ValueError, BootstrapError) as error:
        sys.stderr.write(f"sglang-mooncake register: {error}\n")
        return EXIT_REFUSED
    text = answer.decode(errors="replace")
    if status != 200:
        sys.stderr.write(f"sglang-mooncake register: {parsed.router} refuses it: {text}\n")
        return EXIT_REFUSED
    sys.stdout.write(text + "\n")
    return 0
