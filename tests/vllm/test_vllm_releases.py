# SPDX-License-Identifier: Apache-2.0
"""Which releases of vLLM a server runs with, and what it says of others."""

from __future__ import annotations

import pytest

from sglang_mooncake.vllm.releases import NEWEST_TESTED, OLDEST, lacks, line_of, too_old, untested


@pytest.mark.parametrize("version", ["0.31.0", "0.31.1", "0.32.0", "0.33.0", "0.33.2+cpu"])
def test_a_release_that_was_tested_runs_and_says_nothing(version: str) -> None:
    assert too_old(version) is None
    assert untested(version) is None


@pytest.mark.parametrize("version", ["0.30.1", "0.5.0", "v0.9.2"])
def test_an_older_release_is_refused_and_the_nearest_that_works_is_named(version: str) -> None:
    said = too_old(version)
    assert said is not None
    assert version in said
    assert "install 0.31.0, the nearest" in said


@pytest.mark.parametrize("version", ["0.34.0", "1.0", "0.0.0.dev0", "dev"])
def test_a_release_that_nobody_has_tried_may_run_and_is_warned_of(version: str) -> None:
    assert too_old(version) is None
    said = untested(version)
    assert said is not None
    assert "the nearest release that was is 0.33.0" in said


def test_a_release_without_what_is_needed_is_named_with_the_nearest_that_works() -> None:
    said = lacks("0.40.0", "cannot import name 'get_ip'")
    assert "vLLM 0.40.0" in said
    assert "'get_ip'" in said
    assert "install vLLM 0.33.0" in said


@pytest.mark.parametrize(
    ("version", "line"),
    [("0.32.0", "0.32"), ("0.32.1+cpu", "0.32"), ("1.2", "1.2"), ("dev", "dev")],
)
def test_patches_of_a_release_are_of_one_line(version: str, line: str) -> None:
    assert line_of(version) == line


def test_the_range_is_one() -> None:
    assert OLDEST <= NEWEST_TESTED
