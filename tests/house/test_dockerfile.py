# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile copies what exists and is not ignored, and starts what there is. No test builds an
image: that needs Docker and SGLang's image of many gigabytes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from bootstrap_server.settings.server import Config
from sglang_mooncake.sglang.releases import NEWEST_TESTED

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
INSTRUCTIONS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line[:1].isupper()]
KEPT = {
    line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
}


def given(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


@pytest.mark.parametrize("copied", [one for one in given("COPY") if "--from" not in one])
def test_what_is_copied_is_there_and_not_ignored(copied: str) -> None:
    *sources, _ = copied.split()
    for source in sources:
        assert (ROOT / source).exists()
        assert source in KEPT


def test_all_that_is_kept_for_the_build_is_copied() -> None:
    copied = [one.split()[:-1] for one in given("COPY") if "--from" not in one]
    assert {source for sources in copied for source in sources} == KEPT


def test_stages_copy_from_those_before_them() -> None:
    stages: set[str] = set()
    for name, rest in INSTRUCTIONS:
        if name == "FROM" and (found := re.search(r" AS (\w+)", rest)):
            stages.add(found[1])
        if found := re.search(r"--from=(\w+)", rest):
            assert found[1] in stages


def test_it_begins_with_the_release_of_sglang_that_was_tested() -> None:
    assert f"SGLANG=v{'.'.join(map(str, NEWEST_TESTED))}" in given("ARG")


def test_its_python_is_one_that_the_package_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = project["requires-python"].removeprefix(">=")
    (python,) = (one.partition("=")[2] for one in given("ARG") if one.startswith("PYTHON="))
    assert tuple(map(int, python.split("."))) >= tuple(map(int, lowest.split(".")))


def test_the_registry_starts_with_arguments_that_it_knows() -> None:
    (entry,) = map(json.loads, given("ENTRYPOINT"))
    assert entry[:3] == ["python", "-m", "bootstrap_server"]
    config = Config.from_arguments(entry[3:])
    assert given("EXPOSE") == [str(config.port)]
    (health,) = given("HEALTHCHECK")
    assert f"http://127.0.0.1:{config.port}/health" in health
