# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/deepseek-recipes.md are planned as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sglang_mooncake.sglang.cli import main

pytestmark = pytest.mark.usefixtures("without_sglang")

PAGE = (Path(__file__).parents[2] / "docs" / "deepseek-recipes.md").read_text()
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_is_planned(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "sglang-mooncake"
    assert main(words[1:]) == 0
    decode = words[words.index("--decode") + 1]
    ranks = re.search(r"--tp-size (\d+)", decode)
    assert ranks
    assert re.search(rf"decode +{ranks[1]} ranks: dp", capsys.readouterr().out)


def test_the_page_has_commands_and_says_of_each_of_their_flags_whether_it_was_seen() -> None:
    assert len(COMMANDS) == 3
    table = PAGE[PAGE.index("| flag |") :]
    used = set(re.findall(r"(?<= )--[a-z0-9-]+", " ".join(COMMANDS)))
    ours = {"--model", "--prefill", "--decode", "--model-path", "--disaggregation-mode"}
    drafts = {flag for flag in used if flag.startswith("--speculative-")}
    assert {flag for flag in used - ours - drafts if f"`{flag}" not in table} == set()
