# SPDX-License-Identifier: Apache-2.0
"""What ``import nixl`` gets, who installs it, and what `sglang-mooncake run` makes of a command."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from nixl_agents import options

from bootstrap_server.admission.secret import new_secret
from sglang_mooncake.faces.nixl import PACKAGES, Options, install
from sglang_mooncake.faces.nixl.descriptors import XferDList
from sglang_mooncake.sglang import drop_in, running
from sglang_mooncake.sglang.cli import main
from sglang_mooncake.sglang.config import Config

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch):
    """How this process imports is as before after each test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    yield
    for name in [one for one in sys.modules if one.split(".")[0] in drop_in.NAMES]:
        del sys.modules[name]


def test_all_names_of_nixls_packages_mean_the_same() -> None:
    assert importlib.util.find_spec("nixl") is None
    given = options()
    install(given)
    assert importlib.util.find_spec("nixl") is not None
    api = importlib.import_module("nixl._api")
    bindings = importlib.import_module("nixl._bindings")
    for package in PACKAGES:
        assert importlib.import_module(f"{package}._api") is api
        assert importlib.import_module(f"{package}._bindings") is bindings
        assert importlib.import_module(package).nixl_agent is api.nixl_agent
    assert api.nixlBind is bindings
    assert bindings.nixlAgent.options is given
    assert not issubclass(bindings.nixlRemoteDisconnectError, RuntimeError), "as NIXL 1.5.1's"
    assert (bindings.DRAM_SEG, bindings.NIXL_SUCCESS, bindings.NIXL_INIT_AGENT) == (0, 0, "")
    assert bindings.NIXL_THREAD_SYNC_DEFAULT == bindings.NIXL_THREAD_SYNC_NONE
    utils = importlib.import_module("nixl._utils")
    first, second = utils.malloc_passthru(8), utils.malloc_passthru(8)
    utils.ba_buf(first, 8)
    utils.ba_buf(second, 8)
    utils.verify_transfer(first, second, 8)
    utils.free_passthru(first)
    utils.free_passthru(second)


def test_the_last_call_wins_for_what_is_imported_after_it() -> None:
    one, other = options(), options()
    install(one)
    before = importlib.import_module("nixl._bindings")
    install(other)
    after = importlib.import_module("nixl._bindings")
    assert before.nixlAgent.options is one
    assert after.nixlAgent.options is other
    assert sum(getattr(one, "face", "") == "nixl" for one in sys.meta_path) == 1


def test_nvidias_package_that_was_imported_before_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("WHOSE = 'theirs'\n")
    sys.path.insert(0, str(tmp_path))
    theirs = importlib.import_module("nixl")
    with pytest.raises(RuntimeError, match="has imported nixl already, and not te's"):
        install(options())
    assert sys.modules["nixl"] is theirs


def test_nvidias_package_that_is_installed_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('theirs')\n")
    sys.path.insert(0, str(tmp_path))
    install(options())
    assert importlib.import_module("nixl").nixl_agent


def test_lists_are_read_by_processes_without_the_face() -> None:
    install(options())
    made = importlib.import_module("nixl._bindings").nixlXferDList(0, [(1, 2, 3)])
    assert b"nixl._bindings" not in pickle.dumps(made)
    assert pickle.loads(pickle.dumps(made)) == XferDList(0, [(1, 2, 3)])


def nixl_options(**environment: str) -> Options:
    return drop_in.nixl_options(Config.from_environment(environment))


def test_the_settings_of_the_hand_over_count(monkeypatch: pytest.MonkeyPatch) -> None:
    given = nixl_options(
        SGLANG_MOONCAKE_HOST="127.0.0.1",
        SGLANG_MOONCAKE_SECRET=new_secret(),
        SGLANG_MOONCAKE_INSECURE="1",
        SGLANG_MOONCAKE_TRANSPORTS="tcp",
    )
    assert (given.host, given.has_secret, given.insecure) == ("127.0.0.1", True, True)
    engine = given.open_engine(given.host, (), 1)
    assert engine.stats().transports == ("tcp",)
    engine.close()
    assert nixl_options(SGLANG_HOST_IP="10.1.2.3").host == "10.1.2.3"
    assert nixl_options().host  # The default route's, or the loopback's.
    said = nixl_options().telemetry
    monkeypatch.delenv("NIXL_TELEMETRY_ENABLE", raising=False)
    assert said() is None
    for text, value in [("y", True), ("no", False), ("?", None)]:
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", text)
        assert said() is value


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": "/nowhere"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=dict(running.environment_for(base | environment)),
        capture_output=True,
        text=True,
        timeout=60.0,
    )


@pytest.mark.slow
def test_a_program_that_is_run_has_te_once_it_imports_nixl() -> None:
    done = python(
        "import sys; print('te' in sys.modules);"
        "import nixl_cu12._api as api; print(api.nixl_agent.bindings.__name__)"
    )
    assert done.stdout.split() == ["False", "nixl._bindings"], done.stderr
    assert "mooncake.engine and nixl are te, and mooncake.store is kvstore" in done.stderr


@pytest.mark.slow
def test_a_setting_that_is_wrong_ends_the_program() -> None:
    done = python("import nixl; print('went on')", SGLANG_MOONCAKE_PORTS="many")
    assert (done.returncode, done.stdout) == (70, "")
    assert "SGLANG_MOONCAKE_PORTS" in done.stderr
    assert "The process stops here" in done.stderr


@pytest.mark.slow
def test_the_switch_can_stay_off_and_others_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    done = python(
        "import importlib.util; print(importlib.util.find_spec('nixl'))",
        SGLANG_MOONCAKE_DROP_IN="0",
        PYTHONPATH=os.pathsep.join((str(ROOT), str(tmp_path))),
    )
    assert done.stdout.split() == ["theirs", "None"], done.stderr


def test_run_becomes_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: seen.append(call))
    main(["run", "--", "vllm", "serve", "m", "--kv-transfer-config", "{}"])
    ((file, words, environment),) = seen
    assert (file, words) == ("vllm", ["vllm", "serve", "m", "--kv-transfer-config", "{}"])
    assert environment["SGLANG_MOONCAKE_DROP_IN"] == "1"
    first = environment["PYTHONPATH"].split(os.pathsep)[0]
    assert (Path(first) / "sitecustomize.py").is_file()
    assert running.environment_for(environment) == environment


def test_run_says_what_is_wrong_before_it_runs_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--", "/nowhere/at/all"]) == 127
    monkeypatch.setenv("SGLANG_MOONCAKE_PORTS", "many")
    assert main(["run", "--", "vllm"]) == 2
    assert "SGLANG_MOONCAKE_PORTS" in capsys.readouterr().err


def test_vllms_plugin_does_nothing_unless_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Config] = []
    monkeypatch.setattr(drop_in, "install", installed.append)
    monkeypatch.delenv("SGLANG_MOONCAKE_DROP_IN", raising=False)
    drop_in.register()
    assert not installed
    monkeypatch.setenv("SGLANG_MOONCAKE_DROP_IN", "1")
    monkeypatch.setenv("VLLM_HOST_IP", "10.9.8.7")
    drop_in.register()
    assert drop_in.nixl_options(installed[0]).host == "10.9.8.7"


def test_the_names_that_wait_are_those_that_are_replaced() -> None:
    at_start = (ROOT / "sglang_mooncake/sglang/at_start/sitecustomize.py").read_text()
    line = next(one for one in at_start.splitlines() if one.startswith("_NAMES = "))
    assert json.loads(line.partition("= ")[2].replace("(", "[").replace(")", "]")) == list(
        drop_in.NAMES
    )
