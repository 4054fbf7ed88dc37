# SPDX-License-Identifier: Apache-2.0
"""``kvstore bench --disk``, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_tools.bench.disk import measure, text

MIB = 1 << 20


@pytest.mark.slow
def test_what_a_disk_gives_is_measured(tmp_path: Path) -> None:
    figures = measure(tmp_path, 100_000, 8, 2, 8 * MIB)
    assert set(figures) == {
        "put, and written to the disk",
        "get from the disk",
        "get from memory",
        "pread with O_DIRECT",
    }
    assert min(figures.values()) > 0
    assert list(tmp_path.iterdir()) == [], "the files are removed"
    rows = text(figures).splitlines()
    assert len(rows) == 4
    assert rows[-1].endswith(" 1.00")
