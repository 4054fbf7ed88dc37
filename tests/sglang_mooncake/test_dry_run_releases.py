# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake plan` for servers of a release of SGLang: what it does not have is refused with
the sentence that ends such a server."""

from __future__ import annotations

import pytest

from sglang_mooncake.sglang import cli
from sglang_mooncake.sglang.cli import main
from sglang_mooncake.sglang.releases import Mode, lacking, too_old

pytestmark = pytest.mark.usefixtures("without_sglang")

LINKER = (
    "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic "
    """--unified-cache-external-linker-config '{"linker": "StoreLinker", """
    """"linker_module_path": "sglang_mooncake.sglang.store.linker"}'"""
)


@pytest.mark.parametrize(
    ("mode", "older", "decode"),
    [
        (Mode.DRAFTS, "0.5.19", "--speculative-algorithm EAGLE"),
        (Mode.LINKER, "0.5.21", LINKER),
        (Mode.DCP, "0.5.22", "--tp 2 --dcp-size 2"),
        (Mode.DCP, "0.5.22.post1", "tp=2 dcp=2"),
        (Mode.HISPARSE, "0.5.22", "--tp 1 --enable-hisparse"),
    ],
)
def test_a_mode_that_the_release_lacks_is_refused_as_the_server_would(capsys, mode, older, decode):
    prefill = "tp=2 dcp=2" if mode is Mode.DCP else ""
    arguments = ["plan", "--model", "deepseek-v3", "--page-size", "8", "--decode", decode]
    arguments += ["--prefill", prefill]
    assert main(arguments) == 0, "without a release nothing is lacking"
    assert main([*arguments, "--sglang", "0.5.23"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--sglang", older]) == 2
    role = "prefill" if mode is Mode.DCP else "decode"
    said = f"sglang-mooncake plan: --{role}: {lacking(mode, older)}\n"
    assert capsys.readouterr().err == said


def test_sharded_pages_are_refused_where_the_release_lacks_them(capsys):
    arguments = ["plan", "--model", "deepseek-v3", "--prefill", "tp=4 sharded=1", "--decode", ""]
    assert main([*arguments, "--sglang", "0.5.23"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--sglang", "0.5.22"]) == 2
    assert str(lacking(Mode.SHARDING, "0.5.22")) in capsys.readouterr().err


def test_ngram_and_the_linkers_of_others_are_in_all_releases(capsys):
    arguments = ["plan", "--model", "llama-70b", "--sglang", "0.5.18", "--prefill", "tp=1"]
    for decode in ("--speculative-algorithm NGRAM", LINKER.replace("sglang_mooncake", "theirs")):
        assert main([*arguments, "--decode", decode]) == 0


def test_a_release_that_is_too_old_is_refused_with_the_nearest(capsys):
    arguments = ["plan", "--model", "llama-70b", "--prefill", "tp=1", "--decode", "tp=1"]
    assert main([*arguments, "--sglang", "0.5.16"]) == 2
    assert f"--prefill: {too_old('0.5.16')}" in capsys.readouterr().err


def test_without_an_option_the_installed_release_counts(monkeypatch, capsys):
    monkeypatch.setattr(cli, "installed_release", lambda: "0.5.19")
    arguments = ["plan", "--model", "llama-70b", "--prefill", "", "--decode"]
    assert main([*arguments, "tp=1"]) == 0
    assert main([*arguments, "--speculative-algorithm EAGLE"]) == 2
    assert "SGLang 0.5.19 is installed" in capsys.readouterr().err
