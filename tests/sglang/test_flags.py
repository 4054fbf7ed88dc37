# SPDX-License-Identifier: Apache-2.0
"""docs/sglang-flags.md against the installed SGLang: each of its flags and variables is in that
table, or in the list of those that say nothing to the hand-over."""

from __future__ import annotations

import argparse
import importlib.util
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import sglang_mooncake

# SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

TABLE = Path(__file__).parents[2] / "docs/sglang-flags.md"
ELSEWHERE = Path(__file__).with_name("flags_elsewhere.toml")
WHAT = {"honoured", "our way", "no effect", "refused"}
SEEN = {"servers", "test", "plan", "nobody"}
#: Variables of others than SGLang's list that recipes set: Mooncake's, and those that SGLang reads
#: without declaring them.
FOREIGN = re.compile(r"(MC|MOONCAKE|NCCL_IB)_[A-Z0-9_]+|SGLANG_[A-Z0-9_]+")


@dataclass(frozen=True)
class Row:
    names: tuple[str, ...]
    what: str
    how: str
    seen: str


def parse_rows(text: str) -> list[Row]:
    """The rows of all tables whose first cell begins with a name."""
    rows = []
    for line in text.splitlines():
        if line.startswith("| `"):
            first, what, how, seen = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append(Row(tuple(re.findall("`([^`]+)`", first)), what, how, seen.strip(" |")))
    return rows


ROWS = parse_rows(TABLE.read_text())


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    """The field of SGLang's ServerArgs for each option, and for `--` and its name."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    fields = ServerArgs.__struct_fields__
    found = {f"--{field.replace('_', '-')}": field for field in fields}
    for action in parser._actions:
        if action.dest in fields:
            found |= dict.fromkeys(action.option_strings, action.dest)
    return found


@pytest.fixture(scope="module")
def variables() -> set[str]:
    from sglang.srt.environ import Envs

    return {name for name in vars(Envs) if not name.startswith("__")}


@pytest.fixture(scope="module")
def code() -> str:
    """All of SGLang's server, with the pieces of each text put together."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    srt = Path(spec.origin).parent / "srt"
    return joined("".join(path.read_text() for path in srt.rglob("*.py")))


def joined(source: str) -> str:
    return re.sub(r'"\s*f?"', "", source)


def quoted(by_sglang: bool) -> list[str]:
    """What the table says that a server which is refused says."""
    return [
        quote
        for row in ROWS
        for quote in re.findall('"([^"]+)"', row.how)
        if row.what == "refused" and ("SGLang" in row.how) == by_sglang
    ]


def elsewhere(kind: str) -> dict[str, list[str]]:
    return {
        name: group["names"] for name, group in tomllib.loads(ELSEWHERE.read_text())[kind].items()
    }


def compare(there: set[str], table: list[str], groups: dict[str, list[str]]) -> None:
    ours = Counter(table) + Counter(name for names in groups.values() for name in names)
    unknown = sorted(there - ours.keys())
    assert not unknown, f"new in SGLang, say what we do with them in {TABLE.name}: {unknown}"
    gone = sorted(ours.keys() - there)
    assert not gone, f"SGLang has no such names any more: {gone}"
    assert not [name for name, times in ours.items() if times > 1], "each in one place"


@pytest.mark.sglang
def test_each_flag_of_sglang_is_in_the_table_or_said_to_be_elsewhere(options):
    named = [name for row in ROWS for name in row.names if name.startswith("--")]
    strange = [name for name in named if name not in options]
    assert not strange, f"SGLang has no such flags: {strange}"
    compare(set(options.values()), [options[name] for name in named], elsewhere("flags"))


@pytest.mark.sglang
def test_each_variable_of_sglang_is_in_the_table_or_said_to_be_elsewhere(variables):
    named = [name for row in ROWS for name in row.names if not name.startswith("--")]
    foreign = [name for name in named if name not in variables]
    assert all(FOREIGN.fullmatch(name) for name in foreign), foreign
    compare(variables, [name for name in named if name in variables], elsewhere("variables"))


@pytest.mark.sglang
def test_variables_that_sglang_does_not_declare_are_read_by_it_or_mooncakes(variables, code):
    read = set(re.findall("SGLANG_[A-Z0-9_]+", code))
    named = {name for row in ROWS for name in row.names if name.startswith("SGLANG_")}
    assert named <= read | variables


def test_each_row_uses_the_words_that_the_page_explains():
    for row in ROWS:
        assert row.names, row
        assert row.what in WHAT, row
        assert set(row.seen.split(", ")) <= SEEN, row
        assert row.how, row


def test_each_group_of_the_others_has_a_reason():
    for kind in ("flags", "variables"):
        for name, group in tomllib.loads(ELSEWHERE.read_text())[kind].items():
            assert group["reason"], name
            assert group["names"], name


def test_a_sentence_that_the_table_quotes_of_us_is_in_our_code():
    paths = Path(sglang_mooncake.__file__).parent.rglob("*.py")
    ours = joined("".join(path.read_text() for path in paths))
    assert quoted(by_sglang=False)
    for quote in quoted(by_sglang=False):
        start, _, rest = quote.partition("sglang-mooncake does not serve ")
        assert (rest.removesuffix(" yet") if rest else start) in ours, quote


@pytest.mark.sglang
def test_a_sentence_that_the_table_quotes_of_sglang_is_in_sglangs_code(code):
    assert quoted(by_sglang=True)
    assert not [quote for quote in quoted(by_sglang=True) if quote not in code]


@pytest.mark.sglang
def test_a_flag_of_a_new_release_would_be_named(options):
    there = {*options.values(), "brand_new_flag"}
    named = [options[name] for row in ROWS for name in row.names if name.startswith("--")]
    with pytest.raises(AssertionError, match="brand_new_flag"):
        compare(there, named, elsewhere("flags"))
