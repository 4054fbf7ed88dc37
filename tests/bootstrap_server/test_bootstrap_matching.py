# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bootstrap_server import (
    InstanceConfig,
    KVFormat,
    MismatchError,
    RankCoords,
    Topology,
    check_configs,
    check_formats,
    prefill_dp_rank,
    sources,
)

SIZES = st.integers(1, 8)
TOPOLOGIES = st.builds(Topology, SIZES, SIZES, SIZES, SIZES)
CONFIG = InstanceConfig(Topology(1, 1, 1, 1), KVFormat(16, "bfloat16"), protocol=1)


@given(st.data(), SIZES, SIZES, SIZES)
def test_each_decode_rank_has_one_source_and_each_group_is_a_bijection(
    data: st.DataObject, prefill_dp: int, decode_dp: int, tp: int
) -> None:
    prefill, decode = Topology(prefill_dp, 1, tp, 1), Topology(decode_dp, 1, tp, 1)
    dp_rank = data.draw(st.integers(0, prefill_dp - 1))
    for group in range(decode_dp):
        senders = [sources(prefill, decode, RankCoords(group, 0, t, 0), dp_rank) for t in range(tp)]
        assert all(len(of_one) == 1 for of_one in senders)
        assert [of_one[0] for of_one in senders] == [
            coords for coords in prefill.coords() if coords.dp == dp_rank
        ]


@given(TOPOLOGIES, TOPOLOGIES)
def test_every_other_pair_is_refused_with_both_values_and_the_flag(
    prefill: Topology, decode: Topology
) -> None:
    wrong = [
        (ours, theirs, flag)
        for ours, theirs, flag, fits in (
            (prefill.tp_size, decode.tp_size, "--tp-size", prefill.tp_size == decode.tp_size),
            (prefill.cp_size, decode.cp_size, "--attn-cp-size", prefill.cp_size == 1),
            (prefill.cp_size, decode.cp_size, "--attn-cp-size", decode.cp_size == 1),
            (prefill.pp_size, decode.pp_size, "--pp-size", prefill.pp_size == 1),
            (prefill.pp_size, decode.pp_size, "--pp-size", decode.pp_size == 1),
        )
        if not fits
    ]
    assume(wrong)
    with pytest.raises(MismatchError) as caught:
        sources(prefill, decode, RankCoords(0, 0, 0, 0), 0)
    sentence = str(caught.value)
    assert any(
        f"{ours} on prefill" in sentence and f"{theirs} on decode" in sentence and flag in sentence
        for ours, theirs, flag in wrong
    )


def test_ranks_that_do_not_exist() -> None:
    topology = Topology(2, 1, 2, 1)
    with pytest.raises(MismatchError, match=r"dp rank 2.*dp_size 2.*--dp-size"):
        sources(topology, topology, RankCoords(0, 0, 0, 0), 2)
    with pytest.raises(MismatchError, match="dp rank -1"):
        sources(topology, topology, RankCoords(0, 0, 0, 0), -1)
    with pytest.raises(ValueError, match=r"tp rank 2.*tp_size is 2"):
        sources(topology, topology, RankCoords(0, 0, 2, 0), 0)


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (KVFormat(1, "bfloat16"), ["page_size is 16 on prefill and 1 on decode", "--page-size"]),
        (KVFormat(16, "fp8_e4m3"), ["bfloat16", "fp8_e4m3", "--kv-cache-dtype"]),
        (KVFormat(16, "bfloat16", "hnd"), ["kv_layout", "None", "hnd", "--dsv4-attn-backend"]),
    ],
)
def test_formats_must_be_equal(decode: KVFormat, words: list[str]) -> None:
    with pytest.raises(MismatchError) as caught:
        check_formats(CONFIG.format, decode)
    for word in words:
        assert word in str(caught.value)


def test_equal_configs_and_free_choices_fit() -> None:
    check_formats(CONFIG.format, CONFIG.format)
    check_configs(CONFIG, CONFIG)
    check_configs(CONFIG, msgspec.structs.replace(CONFIG, load_balance_method="round_robin"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 2}, ["protocol is 2 on prefill and 1 on decode", "sglang-mooncake"]),
        ({"decode_allocation_policy": "prefill_complete"}, ["prefill_complete", "early"]),
        ({"dsv41_spec_layout": {"n": 2}}, ["{'n': 2} on prefill", "None on decode"]),
        ({"enable_kv_cache_sharding": True}, ["True on prefill", "False on decode", "--enable-kv"]),
        ({"format": KVFormat(1, "bfloat16")}, ["--page-size"]),
    ],
)
def test_configs_that_cannot_hand_over(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(MismatchError) as caught:
        check_configs(msgspec.structs.replace(CONFIG, **changes), CONFIG)
    for word in words:
        assert word in str(caught.value)


@given(st.integers(0, 2**63 - 1), st.integers(1, 64))
def test_dp_rank_follows_the_room_or_waits_for_the_query(room: int, dp_size: int) -> None:
    topology = Topology(dp_size, 1, 1, 1)
    assert prefill_dp_rank(room, topology, True, None) == room % dp_size
    assert prefill_dp_rank(room, topology, False, None) == (0 if dp_size == 1 else None)
    assert prefill_dp_rank(room, topology, True, dp_size - 1) == dp_size - 1
    with pytest.raises(MismatchError, match=f"dp_size {dp_size} "):
        prefill_dp_rank(room, topology, False, dp_size)
