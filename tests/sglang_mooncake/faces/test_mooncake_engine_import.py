# SPDX-License-Identifier: Apache-2.0
"""What ``from mooncake.engine import TransferEngine`` gets."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from sglang_mooncake.faces.mooncake_engine import Options, install
from sglang_mooncake.faces.mooncake_engine.engine import TransferEngine


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """How this process imports is as before after each test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mooncake", "mooncake.engine", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def forgotten():
    yield
    for name in [one for one in sys.modules if one.split(".")[0] == "mooncake"]:
        del sys.modules[name]


def options() -> Options:
    def open_engine(*_: object) -> None:
        raise AssertionError("nothing is opened")

    return Options(open_engine)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A mooncake package as pip installs one."""
    folder = tmp_path / "mooncake"
    folder.mkdir()
    (folder / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (folder / "engine.py").write_text("class TransferEngine: ...\n")
    (folder / "store.py").write_text("WHOSE = 'theirs'\n")
    sys.path.insert(0, str(tmp_path))
    return tmp_path


def test_without_the_package_the_engine_alone_is_there() -> None:
    assert importlib.util.find_spec("mooncake") is None
    given = options()
    install(given)
    assert importlib.util.find_spec("mooncake.engine") is not None
    engine = importlib.import_module("mooncake.engine")
    assert issubclass(engine.TransferEngine, TransferEngine)
    assert engine.TransferEngine.__name__ == "TransferEngine"
    assert engine.TransferEngine.options is given
    with pytest.raises(ModuleNotFoundError, match=r"mooncake\.store"):
        importlib.import_module("mooncake.store")


def test_the_packages_other_modules_stay_its_own(package) -> None:
    install(options())
    assert issubclass(importlib.import_module("mooncake.engine").TransferEngine, TransferEngine)
    assert importlib.import_module("mooncake.store").WHOSE == "theirs"
    assert importlib.import_module("mooncake").WHOSE == "theirs"


def test_an_engine_that_was_imported_is_not_replaced(package) -> None:
    theirs = importlib.import_module("mooncake.engine")
    with pytest.raises(RuntimeError, match=r"has imported mooncake\.engine already"):
        install(options())
    assert importlib.import_module("mooncake.engine") is theirs
    assert not [one for one in sys.meta_path if getattr(one, "face", "") == "mooncake.engine"]


def test_of_several_the_last_counts() -> None:
    first, second = options(), options()
    install(first)
    assert importlib.import_module("mooncake.engine").TransferEngine.options is first
    before = len(sys.meta_path)
    install(second)
    assert importlib.import_module("mooncake.engine").TransferEngine.options is second
    assert len(sys.meta_path) == before


def test_the_names_beside_the_class_are_there() -> None:
    install(options())
    engine = importlib.import_module("mooncake.engine")
    assert (int(engine.Read), int(engine.Write)) == (0, 1)
    assert engine.TransferOpcode.Read is engine.Read
    assert engine.TransferEngine.TransferOpcode is engine.TransferOpcode
    assert engine.TransferNotify("name", msg="text").msg == "text"
    for name in ("CUDA", "EFA", "HIP", "MNNVL", "MUSA", "INTRA_NVLINK"):
        assert getattr(engine, f"SUPPORT_{name}") is False


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SharedSegment", "it shares memory between processes"),
        ("RpcInterface", "it sends Python's messages and tensors"),
        ("create_rpc_server", "it sends Python's messages and tensors"),
        ("InnerTransferEngine", "Mooncake's store and Mooncake's EP alone use it"),
    ],
)
def test_a_name_that_is_missing_is_told(caplog, name, says) -> None:
    install(options())
    engine = importlib.import_module("mooncake.engine")
    assert not hasattr(engine, name)
    assert f"mooncake.engine over te has no {name}: {says}" in caplog.text
    with pytest.raises(AttributeError, match=f"has no {name}: {says}"):
        getattr(engine, name)
    with pytest.raises(ImportError, match=rf"'{name}' from 'mooncake\.engine' \(.*mooncake_engine"):
        exec(f"from mooncake.engine import {name}")


def test_a_name_that_mooncake_has_not_either_is_no_line_in_the_log(caplog) -> None:
    install(options())
    engine = importlib.import_module("mooncake.engine")
    with pytest.raises(AttributeError, match="over te has no __wrapped__"):
        engine.__wrapped__  # noqa: B018 - as `inspect` asks any module
    assert not caplog.text
