# SPDX-License-Identifier: Apache-2.0
"""The command ``te`` where a part of it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from te import checkout, cli

pytestmark = pytest.mark.pure


def test_a_wheel_says_that_it_has_no_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "CHECKOUT", tmp_path)
    assert cli.main(["bench", "--shape", "kv"]) == 2
    assert "te bench is not part of the wheel" in capsys.readouterr().err
