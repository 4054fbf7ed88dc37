# SPDX-License-Identifier: Apache-2.0
"""The commands of scripts/test."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest
from testrun.plan import FAST_PARTS, Options, fast_lanes, lanes, shared
from testrun.turns import Turn

ROOT = Path(__file__).parents[2]


def reads(arguments: Sequence[str], file: str) -> bool:
    """Whether pytest reads a file of tests when it is called so, as its manual says."""
    folders, names, ignored = [], "test_*.py", []
    words = iter(arguments)
    for word in words:
        option, _, value = word.partition("=")
        match option:
            case "-o":
                setting, _, names = next(words).partition("=")
                assert setting == "python_files"
            case "--ignore":
                ignored.append(f"{value}/*")
            case "--ignore-glob":
                ignored.append(value)
            case _:
                folders.append(f"{word}/*")
    return (
        any(fnmatch(file, folder) for folder in folders)
        and fnmatch(file.rpartition("/")[2], names)
        and not any(fnmatch(file, one) for one in ignored)
    )


def test_each_file_is_in_one_part_of_the_fast_tests() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    parts = {file: [name for name in FAST_PARTS if reads(FAST_PARTS[name], file)] for file in files}
    assert {file: names for file, names in parts.items() if len(names) != 1} == {}
    assert {name for names in parts.values() for name in names} == set(FAST_PARTS)


def test_each_part_of_the_fast_tests_has_a_lane() -> None:
    checks, *parts = fast_lanes(Options(root=Path("/root"), scratch=Path("/root/build"), fast=True))
    assert not [step for step in checks.steps if "pytest" in step.argv]
    for lane, part in zip(parts, FAST_PARTS.values(), strict=True):
        _, tests = lane.steps
        assert tuple(tests.argv[-len(part) - 2 :]) == ("-m", "fast", *part)


WHEEL = "scripts/wheel-demo --requests 8"
WHEELS = "scripts/wheel-demo --one-more --requests 8"


@pytest.mark.parametrize(
    ("turn", "wheels", "has_rdma"),
    [(None, [WHEELS], True), (1, [WHEELS], False), (2, [WHEEL], False), (3, [], True)],
)
def test_the_demos_take_turns(turn: int | None, wheels: list[str], has_rdma: bool) -> None:
    options = Options(Path("/root"), Path("/root/build"), turn=None if turn is None else Turn(turn))
    steps = [" ".join(step.argv) for lane in lanes(options) for step in lane.steps]
    assert [step for step in steps if "wheel" in step] == wheels
    assert any("--transport rdma" in step for step in steps) == has_rdma
    written = [step for step in steps if "--write-reference" in step]
    assert len(written) == has_rdma


def test_with_arguments_for_pytest_only_pytest_is_run() -> None:
    options = Options(Path("/root"), Path("/root/build"), pytest_args=("-k", "one"))
    found = [*shared(options), *(step for lane in lanes(options) for step in lane.steps)]
    others = [step.name for step in found if step.argv[-2:] != ["-k", "one"]]
    assert others == [step.name for step in found if step.is_needed]


def test_the_fast_layer_uses_what_was_compiled_before_it() -> None:
    (here,) = (one for one in lanes(Options(Path("/"), Path("/build"))) if one.name == "here")
    first, second, *_ = (step.argv for step in here.steps)
    assert list(first) == ["scripts/setup", "serving"]
    assert list(second) == ["scripts/test-alone", "--compiled"]
