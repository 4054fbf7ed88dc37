# SPDX-License-Identifier: Apache-2.0
"""What stands in for libraries in C is compiled once for each state of its sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import te_built
from te_built import built_once

pytestmark = pytest.mark.pure


class Builder:
    """Writes a file instead of compiling one."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.count = 0

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "library").write_text(self.text)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(te_built, "BUILT", tmp_path / "build/built")
    path = tmp_path / "source.c"
    path.write_text("one")
    return path


def test_what_is_there_is_not_built_again(source: Path) -> None:
    first, second = Builder("first"), Builder("second")
    folder = built_once([source], first)
    assert built_once([source], second) == folder
    assert (first.count, second.count) == (1, 0)
    assert (folder / "library").read_text() == "first"


def test_another_source_or_another_flag_is_built_anew(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Builder()
    folders = [built_once([source], build)]
    source.write_text("two")
    folders.append(built_once([source], build))
    monkeypatch.setenv("CFLAGS", "-fsanitize=address")
    folders.append(built_once([source], build))
    assert len(set(folders)) == build.count == 3


def test_of_two_that_build_at_once_the_first_is_kept(source: Path) -> None:
    faster = Builder("faster")

    def slower(folder: Path) -> None:
        built_once([source], faster)
        Builder("slower")(folder)

    folder = built_once([source], slower)
    assert (folder / "library").read_text() == "faster"
    assert [path.name for path in te_built.BUILT.iterdir()] == [folder.name], "no scratch is left"


def test_what_cannot_be_built_leaves_nothing(source: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no compiler")

    with pytest.raises(OSError, match="no compiler"):
        built_once([source], fails)
    assert list(te_built.BUILT.iterdir()) == []
