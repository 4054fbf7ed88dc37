# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake plan`: the figures add up, the lines stay few, and what the hand-over would
refuse is refused with the same sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server import MismatchError, Topology
from sglang_mooncake.sglang.cli import main
from sglang_mooncake.sglang.dry_run.flags import FlagError, parse_flags
from sglang_mooncake.sglang.dry_run.models import KNOWN, ModelError, ModelShape, load_model
from sglang_mooncake.sglang.dry_run.pairs import TOKENS, Server, plan_pairs
from sglang_mooncake.sglang.dry_run.report import Report

pytestmark = pytest.mark.usefixtures("without_sglang")

ISSUE = [
    "plan",
    "--model",
    "deepseek-v3",
    "--prefill",
    "tp=16 dp=4 ep=16",
    "--decode",
    "tp=32 dp=32 ep=32",
]


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("tp=16 dp=4 ep=16", Topology(4, 1, 4, 1)),
        ("tp=8, pp=2", Topology(1, 1, 8, 2)),
        ("", Topology(1, 1, 1, 1)),
        ("replicas=2 tp=4", Topology(2, 1, 4, 1)),
        ("--tp 16 --attn-dp-size 4 --ep-size 16", Topology(4, 1, 4, 1)),
        ("--tp-size 16 --dp-size 4 --enable-dp-attention", Topology(4, 1, 4, 1)),
        ("--tensor-parallel-size 4 --data-parallel-size 2", Topology(2, 1, 4, 1)),
        ("--tp-siz 8 --stream-interval 3 --pp 2", Topology(1, 1, 8, 2)),
        ("--tp 8 --served-model-name serve --pp 2", Topology(1, 1, 8, 2)),
        ("sglang serve --tp 8", Topology(1, 1, 8, 1)),
        (
            (
                "python -m sglang.launch_server --model-path /m --tp 8 --attn-cp-size 4 --pp-size=2"
                " --disaggregation-mode prefill --trust-remote-code"
            ),
            Topology(1, 4, 2, 2),
        ),
    ],
)
def test_flags_are_read_as_sglang_reads_them(text, topology):
    assert parse_flags(text).topology == topology


def test_the_command_line_also_names_model_page_and_dtype():
    flags = parse_flags("--model-path /m --page-size 16 --kv-cache-dtype fp8_e4m3")
    assert (flags.model, flags.page_size, flags.kv_cache_dtype) == ("/m", 16, "fp8_e4m3")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tp=6 dp=4", ["--tp-size 6", "--attn-dp-size 4"]),
        ("tp=0", ["tp=0", "--tp-size", "1 to 65536"]),
        ("tp=8 tp=4", ["twice"]),
        ("tensor=8", ["'tensor=8'", "tp, dp"]),
        ("tp=8 dp=2 replicas=2", ["--attn-dp-size 2", "--dp-size 2"]),
        ("--tp-size", ["expected one argument"]),
        ("--tp 4 'unclosed", ["no command line"]),
        ("tp=65536 pp=65536", ["ranks"]),
        ("--tp 4 --page-sise 64", ["--page-sise is no flag of", "mean --page-size?"]),
        ("python -m sglang.launch_server --tp 4 -x", ["-x is no flag"]),
        ("--disaggregation-m prefill --disagg decode", ["--disagg", "ambiguous"]),
    ],
)
def test_flags_that_fit_no_server_are_refused(text, parts):
    with pytest.raises(FlagError) as refused:
        parse_flags(text)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("prefill", "decode", "parts"),
    [
        ("--model-path A", "--model-path B", ["serves A", "serves B", "--model"]),
        ("--model-path m --disaggregation-mode decode", "tp=1", ["--prefill", "mode decode"]),
        ("tp=1", "--model-path m --disaggregation-mode prefill", ["--decode", "mode prefill"]),
        (
            "--model-path m --disaggregation-transfer-backend nixl",
            "tp=1",
            ["--prefill", "nixl", "mooncake"],
        ),
    ],
)
def test_two_command_lines_that_are_no_pair_are_refused(prefill, decode, parts, capsys):
    assert main(["plan", "--prefill", prefill, "--decode", decode]) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said


def test_two_places_are_one_model_if_their_config_says_so(tmp_path, capsys):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    for place, more in (("a", {}), ("b", {"transformers_version": "5"}), ("c", {"vocab_size": 9})):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(config | more))
    a, b, c = (f"--model-path {tmp_path / place}" for place in "abc")
    assert main(["plan", "--prefill", a, "--decode", b]) == 0
    assert main(["plan", "--prefill", a, "--decode", c]) == 2
    assert "two models: vocab_size None against 9" in capsys.readouterr().err
    assert main(["plan", "--model", "llama-70b", "--prefill", a, "--decode", c]) == 0


CONFIGS = {
    "mla": (
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "torch_dtype": "float32",
        },
        3 * 48 * 2,  # SGLang serves float32 weights as float16, unless --dtype says otherwise.
    ),
    "gqa": (
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "dtype": "bfloat16",
        },
        2 * 2 * 32 * 2,
    ),
    "mha without head_dim": (
        {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64},
        2 * 4 * 32 * 2,
    ),
    "multimodal": (
        {"text_config": {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}},
        1 * 4 * 32 * 2,
    ),
    "another width of V": (
        {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "v_head_dim": 4},
        1 * 2 * 12 * 2,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_says_what_a_token_takes(name, tmp_path):
    config, token_nbytes = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path)).token_nbytes == token_nbytes
    assert load_model(str(tmp_path / "config.json")).token_nbytes == token_nbytes


def test_known_models_take_what_is_published_of_them():
    sizes = {name: model.token_nbytes for name, model in KNOWN.items()}
    assert sizes == {"deepseek-v3": 70_272, "llama-70b": 327_680, "qwen3-235b": 192_512}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"num_hidden_layers": 2', "not JSON"),
        ("[]", "no JSON object"),
        ('{"num_hidden_layers": -2}', "num_hidden_layers is -2"),
        ('{"num_hidden_layers": 2, "num_attention_heads": "8"}', "num_attention_heads is '8'"),
        ('{"layer_types": ["full_attention", "linear_attention"]}', "linear_attention"),
        ('{"index_topk": 2048, "kv_lora_rank": 512}', "index_topk"),
        (
            '{"num_hidden_layers": 2, "num_attention_heads": 8, "dtype": "int3"}',
            "KV cache of int3",
        ),
    ],
)
def test_a_model_that_cannot_be_described_is_refused(config, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(config)
    with pytest.raises(ModelError, match=says):
        load_model(str(path))


def test_an_unknown_model_is_named_beside_the_known_ones():
    with pytest.raises(ModelError, match=r"'gpt-9'.*deepseek-v3, llama-70b"):
        load_model("gpt-9")


def topologies(heads: int | None) -> st.SearchStrategy[Topology]:
    sizes = (
        [1, 2, 4, 8, 16]
        if heads is None
        else [n for n in (1, 2, 3, 4, 6, 8, 16) if heads % n == 0 or n % heads == 0]
    )
    return st.builds(
        Topology, st.integers(1, 3), st.just(1), st.sampled_from(sizes), st.sampled_from([1, 2])
    )


@pytest.mark.slow
@given(st.data(), st.sampled_from([None, 2, 4, 6]), st.sampled_from([1, 16, 64]))
def test_every_decode_rank_gets_exactly_what_it_stores(data, heads, page_size):
    model = ModelShape("m", 4, heads, (8, 0) if heads is None else (8, 8), "bfloat16")
    prefill, decode = data.draw(topologies(heads)), data.draw(topologies(heads))
    if decode.pp_size not in (1, prefill.pp_size):
        decode = Topology(decode.dp_size, 1, decode.tp_size, 1)
    pairs = list(plan_pairs(Server(model, prefill, page_size), Server(model, decode, page_size)))
    received: Counter[object] = Counter()
    for pair in pairs:
        received[pair.decode] += pair.move.nbytes if pair.move is not None else 0
        if pair.move is not None:
            assert pair.move.blocks >= pair.move.blocks_in_runs >= 1
    tokens = -(-TOKENS // page_size) * page_size
    held = 1 if heads is None else max(1, heads // decode.tp_size)
    per_token = model.token_nbytes // (heads or 1) * held // decode.pp_size
    assert set(received.values()) == {tokens * per_token}
    assert len(received) == decode.ranks
    assert sum(pair.has_aux for pair in pairs) == decode.ranks


def test_cp_ranks_share_the_pages_when_told_to():
    model = KNOWN["deepseek-v3"]
    prefill, decode = (
        Server(model, Topology(1, 4, 1, 1), 64),
        Server(model, Topology(1, 1, 1, 1), 64),
    )
    shares = [
        pair.move.nbytes for pair in plan_pairs(prefill, decode, all_cp_ranks=True) if pair.move
    ]
    assert len(shares) == 4
    assert sum(shares) == 16 * 64 * model.token_nbytes
    first = [pair.move is not None for pair in plan_pairs(prefill, decode)]
    assert first == [True, False, False, False]


def test_whole_pages_and_slices_are_told_apart():
    model = KNOWN["llama-70b"]
    (whole,) = plan_pairs(
        Server(model, Topology(1, 1, 1, 1), 16), Server(model, Topology(1, 1, 1, 1), 16)
    )
    assert whole.move is not None
    assert (whole.move.is_sliced, whole.move.blocks, whole.move.blocks_in_runs) == (
        False,
        63 * 160,
        160,
    )
    sliced, _ = plan_pairs(
        Server(model, Topology(1, 1, 2, 1), 16), Server(model, Topology(1, 1, 1, 1), 16)
    )
    assert sliced.move is not None
    assert sliced.move.is_sliced
    assert sliced.move.blocks == 63 * 16 * 160


def test_other_page_sizes_are_refused_by_the_rule_of_the_hand_over():
    model = KNOWN["deepseek-v3"]
    one, other = (Server(model, Topology(1, 1, 1, 1), page) for page in (16, 64))
    with pytest.raises(MismatchError, match=r"page_size is 16 on prefill and 64 on decode"):
        list(plan_pairs(one, other))


def test_the_text_does_not_grow_with_the_ranks():
    model = KNOWN["deepseek-v3"]
    lengths = []
    for size in (4, 64):
        prefill = Server(model, Topology(1, 1, size, 1), 64)
        decode = Server(model, Topology(size, 1, 1, 1), 64)
        pairs = list(plan_pairs(prefill, decode))
        assert len(pairs) == size * size
        lengths.append(len(Report(prefill, decode, pairs, 400.0).text().splitlines()))
    assert lengths[0] == lengths[1]


def test_the_time_follows_from_the_bytes_of_the_busiest_rank(capsys):
    assert main([*ISSUE, "--rail-gbit", "100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    nbytes = 16 * 64 * 70_272
    assert report["request"] == {
        "nbytes_sent_max": nbytes,
        "nbytes_received_max": nbytes,
        "time_ms": pytest.approx(nbytes * 8 / 100e6),
    }
    assert len(report["pairs"]) == 32 * 4
    busy = Counter(pair["prefill"]["tp"] for pair in report["pairs"] if pair["nbytes"])
    assert set(busy.values()) == {8}, "replicas take turns"


def test_the_command_of_the_issue_prints_a_table(capsys):
    assert main(ISSUE) == 0
    text = capsys.readouterr().out
    for part in ("16 ranks", "32 ranks", "71,958,528", "latent", "61 of 61", "400 Gbit/s"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model", "llama-70b", "--prefill", "tp=3", "--decode", "tp=4"], ["8 KV heads", "3"]),
        (
            ["--model", "llama-70b", "--prefill", "tp=8 pp=4", "--decode", "tp=8 pp=2"],
            ["4 on prefill", "2 on decode", "--pp-size"],
        ),
        (
            ["--model", "llama-70b", "--prefill", "dtype=fp8_e4m3", "--decode", "tp=1"],
            ["fp8_e4m3 on prefill", "bfloat16 on decode", "--kv-cache-dtype"],
        ),
        (["--prefill", "tp=1", "--decode", "tp=1"], ["--model"]),
        (["--model", "no-such", "--prefill", "tp=1", "--decode", "tp=1"], ["no-such"]),
        (["--model", "llama-70b", "--prefill", "tp=x", "--decode", "tp=1"], ["--prefill", "tp=x"]),
    ],
)
def test_impossible_pairs_end_with_status_2_and_one_sentence(arguments, parts, capsys):
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


@pytest.mark.parametrize(
    "option", [["--rail-gbit", "0"], ["--page-size", "x"], ["--sglang", "new"], ["--what"]]
)
def test_bad_options_end_with_status_2_and_one_sentence(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*ISSUE, *option])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_dry_run_imports_neither_sglang_nor_torch():
    check = (
        "import sys; from sglang_mooncake.sglang.cli import main; "
        f"assert main({ISSUE!r}) == 0; "
        "assert not {'sglang', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("prefill", "decode", "says"),
    [
        ("tp=4", "tp=4 dcp=3", "--dcp-size 3 does not divide an attention TP size of 4"),
        ("tp=4 dcp=4", "tp=4", "dcp_size is 4 on prefill and 1 on decode"),
        ("tp=8 cp=2", "tp=4 dcp=2", "start decode without --dcp-size"),
        ("tp=4", "tp=4 sharded=1", "for prefill servers alone"),
        ("tp=4 sharded=yes", "tp=4", "sharded=yes"),
        ("policy=prefill_complete", "", "decode_allocation_policy is prefill_complete on prefill"),
        ("tp=2 policy=prefill_complete", "tp=2 policy=prefill_complete", "one rank in each DP"),
        ("policy=late", "", "policy=late"),
    ],
)
def test_modes_that_do_not_fit_are_refused_as_the_servers_would(capsys, prefill, decode, says):
    arguments = ["plan", "--model", "deepseek-v3", "--prefill", prefill, "--decode", decode]
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_page_size_that_one_command_line_alone_names_is_refused(capsys):
    one, none = "--page-size 64", "--tp-size 1"
    for prefill, decode, says in (
        (one, none, "--prefill has a page size of 64, and --decode names none"),
        (none, one, "--decode has a page size of 64, and --prefill names none"),
    ):
        arguments = ["plan", "--model", "llama-70b", "--prefill", prefill, "--decode", decode]
        assert main(arguments) == 2
        assert says in capsys.readouterr().err
        assert main([*arguments, "--page-size", "64"]) == 0
        assert main([*arguments, "--page-size", "1"]) == 2
        assert "page_size is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prefill", "decode", "status"),
    [
        ("--dtype float16", "--tp-size 1", 2),
        ("--dtype float16", "--dtype half", 0),
        ("--dtype bfloat16", "--dtype auto", 0),
        ("--dtype float16 --kv-cache-dtype bf16", "--kv-cache-dtype auto", 0),
        ("--dtype float16 --kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3", 0),
    ],
)
def test_the_kv_cache_has_the_dtype_of_the_weights(capsys, prefill, decode, status):
    arguments = ["plan", "--model", "llama-70b", "--prefill", prefill, "--decode", decode]
    assert main(arguments) == status
    refused = "dtype is float16 on prefill and bfloat16 on decode" in capsys.readouterr().err
    assert refused == (status == 2)


def test_heads_of_pages_that_are_dealt_out_over_tp_ranks_are_refused(capsys):
    model = ["plan", "--model", "llama-70b"]
    assert main([*model, "--prefill", "tp=4 sharded=1", "--decode", "tp=4"]) == 2
    assert "without --enable-kv-cache-sharding" in capsys.readouterr().err
    assert main([*model, "--prefill", "tp=4", "--decode", "tp=4 dcp=2"]) == 2
    assert "must be MLA latents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prefill", "decode", "senders", "shares"),
    [
        ("tp=4", "tp=4 dcp=4", 4, 4),
        ("tp=4 dcp=4", "tp=4 dcp=4", 4, 1),
        ("--tp 4 --enable-kv-cache-sharding", "--tp-size 4", 16, 4),
        ("--tp 4 --attn-cp-size 4 --enable-kv-cache-sharding", "--tp-size 4", 16, 4),
        ("", "--disaggregation-decode-allocation-policy early", 1, 1),
    ],
)
def test_dealt_out_caches_move_their_parts(capsys, prefill, decode, senders, shares):
    arguments = ["plan", "--json", "--page-size", "8", "--model", "deepseek-v3"]
    assert main([*arguments, "--prefill", prefill, "--decode", decode]) == 0
    pairs = [pair for pair in json.loads(capsys.readouterr().out)["pairs"] if pair["nbytes"]]
    assert len(pairs) == senders
    whole = 61 * 576 * 2 * 1_000
    for pair in pairs:
        assert abs(pair["nbytes"] * shares - whole) <= whole / 20
