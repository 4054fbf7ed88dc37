# SPDX-License-Identifier: Apache-2.0
"""The servers and routers that README.md and docs/ start, read by SGLang's own parsers."""

from __future__ import annotations

import argparse

import pytest
from docs_commands import Command, commands

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

COMMANDS = commands()
SERVERS = [one for one in COMMANDS if "launch_server" in one.words]
ROUTERS = [one for one in COMMANDS if "sglang_router.launch_router" in one.words]


@pytest.fixture(scope="module")
def server_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture(scope="module")
def router_parser() -> argparse.ArgumentParser:
    from sglang_router.launch_router import RouterArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return parser


def test_there_are_servers_and_routers() -> None:
    assert len(SERVERS) > 10
    assert len(ROUTERS) > 2


@pytest.mark.parametrize("command", SERVERS, ids=str)
def test_sglang_takes_the_flags_of_this_server(
    command: Command, server_parser: argparse.ArgumentParser
) -> None:
    at = command.words.index("launch_server") + 1
    read, unknown = server_parser.parse_known_args(command.words[at:])
    assert not unknown
    assert read.disaggregation_transfer_backend == "mooncake"


@pytest.mark.parametrize("command", ROUTERS, ids=str)
def test_the_router_takes_these_flags(
    command: Command, router_parser: argparse.ArgumentParser
) -> None:
    at = command.words.index("sglang_router.launch_router") + 1
    read, unknown = router_parser.parse_known_args(command.words[at:])
    assert not unknown
    assert read.pd_disaggregation
    assert read.prefill
    assert read.decode
