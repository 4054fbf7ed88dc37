# SPDX-License-Identifier: Apache-2.0
"""Each command of each program prints its help: argparse formats a text only as it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from program_help import help_of

from bootstrap_server import __main__ as registry
from kvstore import cli as kvstore
from sglang_mooncake.sglang import cli as mooncake
from te import cli as te

PROGRAMS: dict[str, Callable[[Sequence[str]], object]] = {
    "te": te.main,
    "kvstore": kvstore.main,
    "sglang-mooncake": mooncake.main,
    "registry": registry.main,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_prints_its_help(name: str) -> None:
    text = help_of(PROGRAMS[name])
    assert "usage:" in text
    found = re.search(r"\{([a-z,-]+)\}", text)
    assert (found is None) == (name == "registry"), "the commands of the others are listed"
    for command in found[1].split(",") if found else ():
        assert "--help" in help_of(PROGRAMS[name], command), command


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"registry"}))
def test_without_a_command_a_program_lists_what_it_can_do(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[name]([]) == 0
    assert f"usage: {name}" in capsys.readouterr().out
