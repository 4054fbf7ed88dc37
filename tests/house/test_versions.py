# SPDX-License-Identifier: Apache-2.0
"""One version, in pyproject.toml: all commands and the changelog name it."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from bootstrap_server import __main__ as registry
from sglang_mooncake.sglang import cli as mooncake
from te import cli as te

ROOT = Path(__file__).parents[2]


def declared() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


@pytest.fixture(params=["installed", "not installed"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What importlib.metadata knows of the package: its metadata, or nothing."""

    def look_up(name: str) -> str:
        assert name == "sglang-mooncake"
        if request.param == "installed":
            return "4.5.6"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", look_up)
    return "4.5.6" if request.param == "installed" else "of a checkout"


@pytest.mark.parametrize(
    ("name", "command"),
    [("te", te.main), ("sglang-mooncake", mooncake.main), ("bootstrap_server", registry.main)],
)
def test_each_command_tells_the_installed_version(name, command, version, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        command(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{name} {version}\n"


@pytest.mark.parametrize("package", ["te", "kvstore", "bootstrap_server", "sglang_mooncake"])
def test_each_package_has_it(package: str, version: str) -> None:
    module = importlib.import_module(package)
    assert module.__version__ == version
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        _ = module.versoin


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d\S*)\]", text, re.MULTILINE)
    assert released[0] == declared()
