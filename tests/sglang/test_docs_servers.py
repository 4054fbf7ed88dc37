# SPDX-License-Identifier: Apache-2.0
"""The servers and routers that README.md, docs/ and their manifests start: the program that each
line names is there, and its own parser reads the flags."""

from __future__ import annotations

import argparse
import runpy
import sys

import pytest
from docs_commands import Command, commands, manifest_commands, unit_commands

from sglang_mooncake.sglang.dry_run.options import (
    OPTIONS,
    RELEASE,
    Options,
    ServerOptions,
    server_options,
)

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

COMMANDS = [*commands(), *manifest_commands(), *unit_commands()]
SERVER, ROUTER = "sglang.launch_server", "sglang_router.launch_router"
SERVERS = [one for one in COMMANDS if SERVER in one.words]
ROUTERS = [one for one in COMMANDS if ROUTER in one.words]
#: Programs of SGLang as the lines call them.
PROGRAMS = sorted(
    {
        one.words[max(at - 2, 0) : at + 1]
        for one in COMMANDS
        for at, word in enumerate(one.words)
        if word in (SERVER, ROUTER)
    }
)


@pytest.fixture(scope="module")
def server_parser() -> Options:
    from sglang.srt.server_args import ServerArgs

    parser = Options(exit_on_error=False)
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
    assert {one.page for one in SERVERS} >= {"README.md", "docs/deployment/leaderworkerset.yaml"}
    assert ("python", "-m", SERVER) in PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize("words", PROGRAMS, ids=" ".join)
def test_the_program_is_there(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words[0].rpartition("/")[2] in ("python", "python3"), "it is so in each release"
    assert words[1] == "-m"
    monkeypatch.setattr(sys, "argv", [words[2], "--help"])
    monkeypatch.delitem(sys.modules, words[2], raising=False)  # to be run as a program
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(words[2], run_name="__main__")
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    assert "--host" in said.out


def test_plan_knows_the_options_of_this_release(server_parser: Options) -> None:
    from sglang.version import __version__

    assert __version__ == RELEASE
    theirs = server_parser.names() - {"-h", "--help"}
    assert set(OPTIONS.split()) == theirs


def test_plan_asks_the_installed_sglang() -> None:
    server_options.cache_clear()
    assert server_options() == ServerOptions(frozenset(OPTIONS.split()), "the installed SGLang")


@pytest.mark.parametrize("command", SERVERS, ids=str)
def test_sglang_takes_the_flags_of_this_server(
    command: Command, server_parser: argparse.ArgumentParser
) -> None:
    at = command.words.index(SERVER) + 1
    read, unknown = server_parser.parse_known_args(command.words[at:])
    assert not unknown
    assert read.disaggregation_transfer_backend == "mooncake"


@pytest.mark.parametrize("command", ROUTERS, ids=str)
def test_the_router_takes_these_flags(
    command: Command, router_parser: argparse.ArgumentParser
) -> None:
    at = command.words.index(ROUTER) + 1
    read, unknown = router_parser.parse_known_args(command.words[at:])
    assert not unknown
    assert read.pd_disaggregation
    assert read.prefill
    assert read.decode
