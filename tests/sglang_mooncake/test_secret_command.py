# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from bootstrap_server.admission.secret import split_secrets
from bootstrap_server.admission.secret_file import read_secret_file
from sglang_mooncake.sglang.cli import main


def test_a_secret_is_printed(capsys):
    assert main(["secret"]) == 0
    printed = capsys.readouterr().out
    assert split_secrets(printed) == [printed.strip().encode()]


def test_a_secret_is_written_and_not_printed(tmp_path, capsys):
    path = tmp_path / "secret"
    assert main(["secret", "--file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"SGLANG_MOONCAKE_SECRET_FILE={path}" in printed, "what to do with it"
    (secret,) = read_secret_file(path)
    assert secret.decode() not in printed


def test_no_file_is_overwritten(tmp_path, capsys):
    path = tmp_path / "secret"
    path.write_text("mine")
    assert main(["secret", "--file", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"sglang-mooncake secret: {path} exists already and stays as it is\n"
    )
    assert path.read_text() == "mine"
