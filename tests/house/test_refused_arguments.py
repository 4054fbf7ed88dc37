# SPDX-License-Identifier: Apache-2.0
"""Words that a command line refuses: one sentence, which names the word, and exit status 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import chaos_run.options
import healing_run.options
import nixl_beside.options
import pytest
import release_trial.options
import route_bench.options
import soak_run.options
import ttft_bench.options
from cpu_serving.options import parse as demo

from sglang_mooncake.sglang.cli import main

PROGRAMS: dict[str, Callable[[Sequence[str]], object]] = {
    "chaos": chaos_run.options.parse,
    "demo": demo,
    "healing": healing_run.options.parse,
    "nixl-beside": nixl_beside.options.parse,
    "route-bench": route_bench.options.parse,
    "sglang-mooncake store-events": lambda words: main(["store-events", *words]),
    "sglang-releases": release_trial.options.parse,
    "soak": soak_run.options.parse,
    "ttft": ttft_bench.options.parse,
}
REFUSED = {
    "chaos": [
        ("--minutes 0", "'0' is not a positive number"),
        ("--seed -1", "whole number, 0 or more"),
        ("--kinds kill,flood", "'flood' is none of kill, "),
        ("--clients 0", "--clients 0 is not from 1 to 64"),
        ("--aborts 1", "'1' is not a share"),
        ("--kinds kill,intruder", "give --secret"),
        ("--backend gloo", "invalid choice: 'gloo'"),
        ("--backend nixl --kinds kill,registry", "not registry"),
        ("--backend ours --kinds none", "not none"),
        ("--backend mooncake --secret", "knows neither --secret nor --layerwise"),
    ],
    "demo": [("--reference a --write-reference b", "--reference and --write-reference together")],
    "healing": [("--rows storm", "'storm' is none of"), ("--repeat 0", "is not from 1 to 100")],
    "nixl-beside": [
        ("--rows storm", "'storm' is none of"),
        ("--contenders ucx", "'ucx' is none of"),
        ("--patience 0", "is not a positive number"),
    ],
    "route-bench": [
        ("no-such", "is no file"),
        (f"{__file__} --block-tokens 17", "no multiple of a page"),
        (f"{__file__} --hidden 65", "the size of a head"),
        (f"{__file__} --rounds 0", "'0' is not a positive whole number"),
    ],
    "sglang-mooncake store-events": [
        ("", "--page-size"),
        ("--page-size 0", "'0' is not a whole number from 1"),
        ("--page-size 4 --endpoint ipc://x", "'ipc://x' is not of the form tcp://HOST:PORT"),
        ("--page-size 4 --replay-endpoint tcp://*", "'tcp://*' is not of the form"),
        ("--page-size 4 --buffer-steps 0", "'0' is not a whole number from 1"),
    ],
    "sglang-releases": [
        ("", ""),
        ("0.5.22 --pre", ""),
        ("main", ""),
        ("0.5.22 --chaos 0", ""),
    ],
    "soak": [
        ("--scenario fire", "'fire' is none of lora, "),
        ("--minutes 0", "'0' is not a positive number"),
        ("--clients 0", "--clients 0 is not from 1 to 32"),
        ("--seed -1", "--seed -1 is negative"),
    ],
    "ttft": [
        ("--rate quick", "'quick' is no rate"),
        ("--prompt 8", "8 is not from 16 to"),
        ("--prompt 1k", "'1k' is not a positive whole number"),
        ("--kinds pd,two", "'two' is none of one, pd, layers"),
        ("--hidden 100 --heads 8", "no multiple of --heads"),
        ("--hidden 24 --heads 8", "is odd"),
        ("--seed -1", "whole number, 0 or more"),
        ("--chunked-prefill-size 100", "no multiple of --page-size"),
    ],
}


@pytest.mark.parametrize(
    ("program", "words", "sentence"),
    [(program, *one) for program, refused in REFUSED.items() for one in refused],
)
def test_words_are_refused_with_a_sentence(
    program: str, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program](words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{program}: ")
    assert sentence in said
    assert said.count("\n") == 1
