# SPDX-License-Identifier: Apache-2.0
"""What the commands say to a wrong command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import pytest

from te.arguments import Parser, address, number, whole

pytestmark = pytest.mark.pure


def parser(**defaults: int) -> Parser:
    whole = Parser(prog="kv")
    commands = whole.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve")
    serve.add_argument("--memory", required=True)
    serve.add_argument("--metrics")
    serve.add_argument("rest", nargs="*")
    serve.set_defaults(**defaults)
    commands.add_parser("top")
    return whole


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serv"], r"kv: argument command: invalid choice: 'serv'.*: did you mean serve\?$"),
        (["xyz"], "kv: argument command: invalid choice: 'xyz' [^:]*$"),
        # Not that --memory is missing.
        (
            ["serve", "--memry", "1"],
            r"kv serve: there is no option --memry: did you mean --memory\?$",
        ),
        (["serve", "--memry=1"], r"kv serve: there is no option --memry: did you mean --memory\?$"),
        (["serve", "--xyz"], "kv serve: there is no option --xyz$"),
        (["top", "--once"], "kv top: there is no option --once$"),
        (["serve"], "kv serve: the following arguments are required: --memory"),
    ],
)
def test_one_sentence_names_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(said, line)


def test_a_command_may_have_an_exit_status_of_its_own() -> None:
    with pytest.raises(SystemExit) as ended:
        parser(bad_usage=3).parse_args(["serve", "--xyz"])
    assert ended.value.code == 3


def test_right_command_lines_are_taken() -> None:
    taken = parser().parse_args(["serve", "--mem", "1", "--metrics=a", "--", "--tp", "8"])
    assert (taken.memory, taken.metrics, taken.rest) == ("1", "a", ["--tp", "8"])
    # What is no single word is a value: --prefill "--tp-size 8".
    assert parser().parse_args(["serve", "--memory", "--tp-size 8"]).memory == "--tp-size 8"


def test_numbers_are_taken_within_their_limits() -> None:
    assert [whole(0, 65_535)(text) for text in ("0", "65535")] == [0, 65_535]
    assert whole(1)("9" * 30) == int("9" * 30)
    assert [number(0.01, 1e6, "s")(text) for text in ("0.01", "1e6")] == [0.01, 1e6]
    assert address("[::1]:0") == ("::1", 0)
    assert address("host:65535") == ("host", 65_535)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (whole(1, 9), "0", "'0' is not a whole number from 1 to 9"),
        (whole(1, 9), "10", "from 1 to 9"),
        (whole(0), "-1", "'-1' is not a whole number of at least 0"),
        (whole(1), "1.0", "of at least 1"),
        (whole(1), "9" * 31, "of at least 1"),
        (whole(1), "", "'' is not"),
        (number(0.01, 1e6, "s"), "0", "'0' is not a number from 0.01 to 1000000 s"),
        (number(0, 1, "s"), "nan", "'nan' is not a number from 0 to 1 s"),
        (number(0, 1, "s"), "x", "'x' is not a number"),
        (address, "9401", "'9401' is not HOST:PORT, such as"),
        (address, ":1", "is not HOST:PORT"),
        (address, "a:65536", "is not HOST:PORT"),
        (address, "a:" + "9" * 31, "is not HOST:PORT"),
    ],
)
def test_what_is_no_such_number_is_refused(
    kind: Callable[[str], object], text: str, said: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        kind(text)
