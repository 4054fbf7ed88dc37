# SPDX-License-Identifier: Apache-2.0
"""setup.py: which modules an editable install compiles, and that what it copies is whole."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path

import pytest
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

SETUP = Path(__file__).parents[2] / "setup.py"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
#: When the C file and the header were written, and when the module was built, in seconds.
MODULES = {
    "young": (1, 2, 3),
    "of_then": (1, 2, 2),
    "older_than_source": (3, 2, 2),
    "older_than_header": (1, 3, 2),
    "not_there": (1, 2, None),
}


@pytest.mark.parametrize(
    ("is_editable", "compiled"),
    [
        (True, ["older_than_source", "older_than_header", "not_there"]),
        (False, list(MODULES)),
    ],
)
def test_modules_that_are_up_to_date_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_editable: bool, compiled: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, times in MODULES.items():
        for ending, time_s in zip((".c", ".h", SUFFIX), times, strict=True):
            if time_s is not None:
                Path(f"{name}{ending}").touch()
                os.utime(f"{name}{ending}", (time_s, time_s))
    found: list[str] = []

    def build(self: build_ext) -> None:
        found.extend(one.name for one in self.extensions)

    monkeypatch.setattr(build_ext, "build_extensions", build)
    command = runpy.run_path(str(SETUP))["BuildOnAllCores"](Distribution())
    command.extensions = [Extension(one, [f"{one}.c"], depends=[f"{one}.h"]) for one in MODULES]
    command.parallel = 1
    command.editable_mode = is_editable
    command.build_extensions()
    assert found == compiled


def test_a_copy_that_is_cut_short_leaves_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, module = tmp_path / "built.so", tmp_path / "module.so"
    built.write_bytes(b"all of it")
    command = runpy.run_path(str(SETUP))["BuildOnAllCores"](Distribution())

    def killed(self: build_ext, _infile: str, outfile: str, **_: object) -> None:
        Path(outfile).write_bytes(b"all")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_ext, "copy_file", killed)
        with pytest.raises(KeyboardInterrupt):
            command.copy_file(str(built), str(module), level=1)
    assert not module.exists()
    # What is left of it is younger than what was built.
    command.copy_file(str(built), str(module), level=1)
    assert module.read_bytes() == b"all of it"
    assert sorted(tmp_path.iterdir()) == [built, module]
