# SPDX-License-Identifier: Apache-2.0
"""Which releases of SGLang are refused, and of which the log warns."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest

from sglang_mooncake.sglang import plugin
from sglang_mooncake.sglang.releases import (
    NEWEST_TESTED,
    OLDEST,
    SERVED,
    Mode,
    lacking,
    too_old,
    untested,
)

ROOT = Path(__file__).parents[2]
OLD, NEW = "0.5.17", "0.5.24"


@pytest.mark.parametrize("version", [OLD, "0.4.99", "0.5.17.post1", "v0.5.9"])
def test_what_is_too_old(version: str) -> None:
    said = too_old(version)
    assert said is not None
    assert f"SGLang {version} is installed" in said
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST_TESTED))
    assert f"works with {oldest} to {newest}: the nearest to yours is {oldest}" in said


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post2", "0.5.23rc1"])
def test_what_was_tested(version: str) -> None:
    assert too_old(version) is None
    assert untested(version) is None


@pytest.mark.parametrize("version", [NEW, "0.6.0", "1.0.0", "0.0.0.dev0", "main"])
def test_what_was_not_tested(version: str) -> None:
    assert too_old(version) is None
    said = untested(version)
    assert said is not None
    assert f"SGLang {version}" in said
    assert f"the nearest release that was is {'.'.join(map(str, NEWEST_TESTED))}" in said


def test_releases_rise() -> None:
    assert list(SERVED) == sorted(set(SERVED))


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_that_a_release_lacks_is_refused_with_the_first_that_has_it(mode: Mode) -> None:
    what, first, reason = mode.value
    older = f"{first[0]}.{first[1]}.{first[2] - 1}.post2"
    said = lacking(mode, older)
    assert said is not None
    for part in (what, ".".join(map(str, first)), f"SGLang {older} is installed", reason):
        assert part in said
    for version in (".".join(map(str, first)), "0.6.0", "0.0.0.dev0", "main"):
        assert lacking(mode, version) is None


def test_the_extra_begins_with_the_oldest_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sglang = project["optional-dependencies"]["sglang"][0]
    assert sglang == f"sglang>={'.'.join(map(str, OLDEST))},<0.6"


class Ended(Exception):
    """Stands for the end of the process."""


def test_the_plugin_stops_a_server_that_is_too_old(monkeypatch, capfd) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(importlib.metadata, "version", {"sglang": OLD}.__getitem__)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended) as ended:
        plugin.register()
    assert ended.value.args == (70,)
    said = capfd.readouterr().err
    assert f"transfer backend 'mooncake': {too_old(OLD)}\n" in said


def test_the_log_warns_of_a_release_that_was_not_tested(monkeypatch, caplog) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"sglang": NEW}.__getitem__)
    plugin.check_release()
    assert [one.getMessage() for one in caplog.records] == [untested(NEW)]


def test_sources_of_sglang_that_are_not_installed_have_no_release(monkeypatch, caplog) -> None:
    def look_up(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", look_up)
    plugin.check_release()
    assert "the installed SGLang without metadata" in caplog.text
