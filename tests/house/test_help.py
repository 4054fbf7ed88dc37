# SPDX-License-Identifier: Apache-2.0
"""Each command of each program prints its help: argparse formats a text only as it is asked for."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence

import pytest

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


def help_of(name: str, *command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
        PROGRAMS[name]([*command, "--help"])
    assert end.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_prints_its_help(name: str) -> None:
    text = help_of(name)
    assert "usage:" in text
    found = re.search(r"\{([a-z,-]+)\}", text)
    assert (found is None) == (name == "registry"), "the commands of the others are listed"
    for command in found[1].split(",") if found else ():
        assert "--help" in help_of(name, command), command
