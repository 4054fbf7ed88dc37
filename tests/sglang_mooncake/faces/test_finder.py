# SPDX-License-Identifier: Apache-2.0
"""When a face's modules are made, and what a process pays for those that nobody imports."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

from sglang_mooncake.faces.finder import lacking, made, put_in_place

ROOT = Path(__file__).parents[3]
NAMES = ("of_a_face", "of_a_face.part")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How this process imports is as before after each test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


class Maker:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Mapping[str, ModuleType]:
        self.count += 1
        return {name: made(name, {"WHOSE": self}, "") for name in NAMES}


def test_modules_are_made_once_when_the_first_is_imported() -> None:
    maker = Maker()
    put_in_place("a face", __file__, NAMES, maker)
    assert importlib.util.find_spec(NAMES[0]) is not None
    assert not maker.count
    threads = [Thread(target=importlib.import_module, args=(name,)) for name in NAMES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maker.count == 1
    assert importlib.import_module(NAMES[1]).WHOSE is maker


def test_an_error_while_they_are_made_is_that_of_the_import_and_is_tried_again() -> None:
    maker = Maker()
    problems = [ImportError("a library is missing")]

    def make() -> Mapping[str, ModuleType]:
        if problems:
            raise problems.pop()
        return maker()

    put_in_place("a face", __file__, NAMES, make)
    with pytest.raises(ImportError, match="a library is missing"):
        importlib.import_module(NAMES[0])
    assert importlib.import_module(NAMES[0]).WHOSE is maker


def test_a_name_that_is_missing_has_its_reason(caplog) -> None:
    missing = lacking("theirs over ours", "their", {"Known": "ours needs none"})
    with pytest.raises(AttributeError, match="theirs over ours has no Known: ours needs none; it"):
        missing("Known")
    assert caplog.messages == [
        "theirs over ours has no Known: ours needs none; it is in the their package"
    ]
    with pytest.raises(AttributeError, match=r"^theirs over ours has no other$"):
        missing("other")
    assert len(caplog.messages) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "then", "loads"),
    [
        ("0", "", set()),
        ("1", "", set()),
        ("1", "import nixl", {"sglang_mooncake.faces.nixl.api"}),
        ("1", "import mooncake.engine", {"sglang_mooncake.faces.mooncake_engine.engine"}),
        (
            "1",
            "import mooncake.store",
            {"sglang_mooncake.faces.mooncake_store.store", "kvstore.store"},
        ),
    ],
)
def test_sglangs_plugin_loads_what_is_imported_and_no_more(setting, then, loads) -> None:
    code = f"""
import json, sys
from sglang_mooncake.sglang import plugin
plugin._drop_in()
{then}
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "SGLANG_MOONCAKE_DROP_IN": setting,
        },
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert done.returncode == 0, done.stderr
    heavy = {
        "kvstore.store",
        "sglang_mooncake.faces.mooncake_engine.engine",
        "sglang_mooncake.faces.mooncake_store.store",
        "sglang_mooncake.faces.nixl.api",
    }
    assert heavy & set(json.loads(done.stdout)) == loads
