# SPDX-License-Identifier: Apache-2.0
"""What scripts/wheel finds wrong with the files of a wheel or an sdist."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from wheel_check.contents import main, problems

PACKAGES = ("te", "bootstrap_server", "kvstore", "sglang_mooncake")
TYPED = [f"{one}/py.typed" for one in PACKAGES]
INFO = "sglang_mooncake-1.2.3.dist-info"
WHEEL = [
    *TYPED,
    "te/__init__.py",
    "te/core/engine.pyi",
    "te/core/engine.cpython-311-x86_64-linux-gnu.so",
    "bootstrap_server/page/page.css",
    f"{INFO}/METADATA",
    f"{INFO}/licenses/LICENSE",
]
SDIST = [*TYPED, "LICENSE", "pyproject.toml", "setup.py", "te/core/engine.pyx", "te/core/wire.h"]


def test_a_good_wheel_and_a_good_sdist_have_no_problem() -> None:
    assert problems(WHEEL, wheel=True) == []
    assert problems(SDIST, wheel=False) == []


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("te/py.typed", "te/py.typed is missing"),
        ("te/core/engine.pyi", "te/core/engine.pyi is missing"),
        (f"{INFO}/licenses/LICENSE", "the licence is missing"),
        ("te/core/engine.cpython-311-x86_64-linux-gnu.so", "te/core/engine is not compiled"),
    ],
)
def test_what_a_wheel_needs(gone: str, said: str) -> None:
    assert problems([one for one in WHEEL if one != gone], wheel=True) == [said]


@pytest.mark.parametrize("needed", ["te/py.typed", "LICENSE", "setup.py", "te/core/engine.pyx"])
def test_what_an_sdist_needs(needed: str) -> None:
    names = [one for one in SDIST if one != needed]
    assert problems(names, wheel=False) == [f"{needed} is missing"]


@pytest.mark.parametrize(
    "name",
    [
        "tests/test_a.py",
        "scripts/demo",
        "te/core/engine.pyx",
        "te/core/engine.c",
        "te_bench/command.py",
        "kvstore_tools/replay.py",
        "te/core/__pycache__/a.cpython-311.pyc",
        "sglang_mooncake.libs/libibverbs.so.1",
    ],
)
def test_what_does_not_belong_into_a_wheel(name: str) -> None:
    (problem,) = problems([*WHEEL, name], wheel=True)
    assert problem.startswith(name)


@pytest.mark.parametrize("name", ["tests/test_a.py", "te/a.so", "te/core/engine.c", "te_bench/a.h"])
def test_what_does_not_belong_into_an_sdist(name: str) -> None:
    (problem,) = problems([*SDIST, name], wheel=False)
    assert problem.startswith(name)


def test_archives_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as zipped:
        for name in WHEEL:
            zipped.writestr(name, "")
    with tarfile.open(sdist, "w:gz") as tarred:
        for name in [*SDIST, "tests/debris.py"]:
            tarred.addfile(tarfile.TarInfo(f"a-1/{name}"), io.BytesIO())
    assert main([str(wheel)]) == 0
    assert main([str(wheel), str(sdist)]) == 1
    assert capsys.readouterr().out == "a-1.tar.gz: tests/debris.py does not belong into it\n"
    with pytest.raises(ValueError, match="neither a wheel"):
        main([str(tmp_path)])
