# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake config`, as a process, and the reference, written out of the same rows."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import config_doc
import pytest

from bootstrap_server.settings.server import SETTINGS as REGISTRY_SETTINGS
from kvstore.config import Config as StoreConfig
from sglang_mooncake.sglang.cli import main
from sglang_mooncake.sglang.settings import CONFIG_FILE, SETTINGS
from te.config import Config as EngineConfig

_RUN = (
    "import sys, sglang_mooncake.sglang.cli as cli\n"
    "code = cli.main(sys.argv[1:])\n"
    "assert 'torch' not in sys.modules and 'sglang' not in sys.modules\n"
    "sys.exit(code)\n"
)


def _run(*arguments, status=0, **environment):
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("SGLANG_", "MC_", "MOONCAKE_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", _RUN, "config", *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


@pytest.mark.slow
def test_it_shows_what_differs_from_the_defaults():
    assert _run() == "All settings have their defaults; --all shows them.\n"
    shown = _run(
        "--",
        "--disaggregation-ib-device",
        "mlx5_0",
        SGLANG_MOONCAKE_WORKERS="1",
        MC_GID_INDEX="3",
    )
    assert [re.split("  +", line) for line in shown.splitlines()] == [
        ["setting", "value", "from", "default"],
        ["te.nics", "mlx5_0", "--disaggregation-ib-device", "all active devices"],
        ["te.workers", "1", "SGLANG_MOONCAKE_WORKERS", "2"],
        ["te.gid_index", "3", "MC_GID_INDEX=3", "found by trying with each peer"],
    ]


def test_it_says_what_became_of_mooncakes_variables(monkeypatch, capsys):
    monkeypatch.setenv("MC_NUM_QP_PER_EP", "2")
    assert main(["config", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert said.err == (
        "sglang-mooncake config: MC_NUM_QP_PER_EP has no effect here:"
        " set SGLANG_MOONCAKE_RAILS_PER_NIC instead\n"
    )


def test_a_host_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_MOONCAKE_HOST", "10.0.0.")
    assert main(["config"]) == 2
    assert "SGLANG_MOONCAKE_HOST='10.0.0.': give an address such as" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_them_as_text_and_json():
    lines = _run("--all", SGLANG_MOONCAKE_RAILS="2").splitlines()
    assert [line.split()[0] for line in lines[1:]] == [one.key for one in SETTINGS]
    assert "te.rails 2 SGLANG_MOONCAKE_RAILS" in [" ".join(line.split()) for line in lines]
    found = json.loads(_run("--json", SGLANG_MOONCAKE_SECRET="6f1d0c8a92e47b35b7e2f90a4c81d356"))
    assert [one["setting"] for one in found] == [one.key for one in SETTINGS]
    of_secret = next(one for one in found if one["setting"] == "sglang_mooncake.secret")
    assert of_secret["value"] == "(not shown)"
    assert of_secret["from"] == "SGLANG_MOONCAKE_SECRET"
    rails = next(one for one in found if one["setting"] == "te.rails")
    assert (rails["value"], rails["from"], rails["differs"]) == ("2", "default", False)


@pytest.mark.slow
def test_its_file_gives_the_same_settings(tmp_path):
    given = {"SGLANG_MOONCAKE_TRANSPORTS": "tcp,rdma", "SGLANG_MOONCAKE_LAYERWISE": "1"}
    path = tmp_path / "settings.toml"
    path.write_text(_run("--toml", **given))
    assert path.read_text() == (
        '[sglang_mooncake]\nlayerwise = true\n\n[te]\ntransports = ["tcp", "rdma"]\n'
    )
    of_file, of_variables = (
        [one["value"] for one in json.loads(_run("--json", **environment))]
        for environment in ({CONFIG_FILE: str(path)}, given)
    )
    assert of_file == of_variables
    assert _run("--check", str(path)) == f"{path}: 2 settings, all of them can be used\n"


@pytest.mark.slow
def test_bad_settings_end_it_with_status_2(tmp_path):
    said = _run(status=2, SGLANG_MOONCAKE_TRANSPORT="tcp", SGLANG_MOONCAKE_RAILS="9")
    assert said.splitlines() == [
        f"sglang-mooncake config: SGLANG_MOONCAKE_{sentence}"
        for sentence in (
            "TRANSPORT is not a setting: did you mean SGLANG_MOONCAKE_TRANSPORTS?",
            "RAILS='9': give a whole number from 1 to 8",
        )
    ]
    path = tmp_path / "settings.toml"
    path.write_text("[te]\nrale = 1\n")
    assert "te.rale is not a setting: did you mean te.rails?" in _run(
        "--check", str(path), status=2
    )


def test_the_reference_is_up_to_date():
    assert config_doc.PATH.read_text() == config_doc.document(), (
        "docs/configuration.md is not what the code says; run:"
        " .venv/bin/python scripts/config_doc.py"
    )


def test_every_setting_has_its_place_in_the_reference():
    text = config_doc.document()
    rows = sorted((*SETTINGS, *REGISTRY_SETTINGS), key=lambda one: one.key)
    assert sorted(re.findall(r"^### (.*)$", text, re.MULTILINE)) == [one.key for one in rows]
    for one in rows:
        assert one.help.endswith(".")
        assert one.help in text
        assert one.variable in text
    fields = re.findall(r"^\| `(\w+)` \| `[^`]*` \| ", text, re.MULTILINE)
    of_store = [one.name for one in dataclasses.fields(StoreConfig) if one.name != "engine"]
    assert fields == of_store + [one.name for one in dataclasses.fields(EngineConfig)]
    assert not re.search(r"@\w+@", text)


@pytest.mark.slow
def test_the_example_of_the_reference_is_what_the_command_shows():
    shown = _run(SGLANG_MOONCAKE_TRANSPORTS="tcp", MC_GID_INDEX="3")
    assert "".join(f"    {line}\n" for line in shown.splitlines()) in config_doc.document()


@pytest.mark.slow
def test_the_file_of_the_reference_can_be_used(tmp_path):
    example = re.search(r"## TOML file\n\n((?:    .*\n|\n)+)", config_doc.document())
    path = tmp_path / "settings.toml"
    path.write_text(re.sub("^    ", "", example[1], flags=re.MULTILINE))
    assert _run("--check", str(path)) == f"{path}: 5 settings, all of them can be used\n"
