# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap_server import (
    CPTransfer,
    InstanceConfig,
    KVFormat,
    MismatchError,
    PageShare,
    RankCoords,
    Source,
    Topology,
    check_configs,
    check_formats,
    cp_transfer,
    dealt_over,
    holding,
    prefill_dp_rank,
    sending,
    sources,
)

SIZES = st.integers(1, 8)
CONFIG = InstanceConfig(Topology(1, 1, 1, 1), KVFormat(16, "bfloat16"), protocol=1)


def fits(units: int, tp_size: int) -> bool:
    return units % tp_size == 0 or tp_size % units == 0


@st.composite
def tp_sizes(draw: st.DrawFn, limit: int = 64) -> int:
    """Powers of two as they are deployed, and everything else as well."""
    powers = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= limit]
    return draw(st.sampled_from(powers) | st.integers(1, limit))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Topology, Topology]:
    """Two topologies that can be paired, each with at most 64 ranks in a DP group."""
    prefill_tp = draw(tp_sizes())
    cp = draw(st.integers(1, 64 // prefill_tp))
    pp = draw(st.integers(1, 64 // (prefill_tp * cp)))
    decode_pp = draw(st.sampled_from([1, pp]))
    decode_tp = draw(tp_sizes(64 // decode_pp))
    dp = draw(st.tuples(SIZES, SIZES))
    return Topology(dp[0], cp, prefill_tp, pp), Topology(dp[1], 1, decode_tp, decode_pp)


@st.composite
def units_for(draw: st.DrawFn, *sizes: int) -> int:
    """Numbers of pieces that can be laid out over all of `sizes`."""
    common = math.lcm(*sizes)
    some = {n for n in range(1, common + 1) if common % n == 0} | {2 * common, 3 * common}
    return draw(st.sampled_from(sorted(n for n in some if all(fits(n, size) for size in sizes))))


def group_sources(
    prefill: Topology, decode: Topology, dp: int, prefill_dp: int, cp: CPTransfer
) -> dict[RankCoords, tuple[Source, ...]]:
    ranks = [coords for coords in decode.coords() if coords.dp == dp]
    return {coords: sources(prefill, decode, coords, prefill_dp, cp) for coords in ranks}


@pytest.mark.slow
@given(st.data(), pairs(), st.sampled_from(CPTransfer), st.integers(0, 5))
@settings(max_examples=500)
def test_each_piece_of_a_decode_rank_is_sent_by_exactly_one_source(
    data: st.DataObject, pair: tuple[Topology, Topology], cp: CPTransfer, pages: int
) -> None:
    prefill, decode = pair
    units = data.draw(units_for(prefill.tp_size, decode.tp_size))
    prefill_dp = data.draw(st.integers(0, prefill.dp_size - 1))
    dp = data.draw(st.integers(0, decode.dp_size - 1))
    group = group_sources(prefill, decode, dp, prefill_dp, cp)
    asked = Counter(source.coords for found in group.values() for source in found)
    someone = data.draw(st.sampled_from(list(group)))
    for me, found in group.items():
        stages = range(prefill.pp_size) if decode.pp_size == 1 else [me.pp]
        # With split layers each CP rank stores layers of its own, so its pages are its own, too;
        # and where pages are dealt out by their numbers, it sends what it has of each.
        is_owner = cp in (CPTransfer.LAYERS, CPTransfer.NUMBERS)
        owners = range(prefill.cp_size) if is_owner else [0]
        held = holding(units, decode.tp_size, me.tp)
        sent: Counter[tuple[int, int, int, int]] = Counter()
        state: Counter[tuple[int, int, int]] = Counter()
        for source in found:
            place = source.coords
            # The prefill rank waits for as many requests as it was told to expect.
            assert source.destinations == asked[place]
            assert place.dp == prefill_dp
            owner = place.cp if is_owner else 0
            for unit in sending(units, prefill.tp_size, place.tp, decode.tp_size, me.tp, me.dp):
                assert unit in holding(units, prefill.tp_size, place.tp)
                state[place.pp, owner, unit] += source.state
                for page in source.pages.bounds(pages):
                    sent[place.pp, owner, unit, page] += 1
        wanted = {(pp, owner, unit) for pp in stages for owner in owners for unit in held}
        assert +state == dict.fromkeys(wanted, 1)
        assert sent == dict.fromkeys(((*key, page) for key in wanted for page in range(pages)), 1)
        aux = [source for source in found if source.aux]
        assert len(aux) == 1
        assert aux[0].coords.pp == stages[-1]
        # Metadata comes from a rank that has something to send anyway (of an MLA latent, all).
        assert aux[0].state
        assert sending(1, prefill.tp_size, aux[0].coords.tp, decode.tp_size, me.tp, me.dp)
    # Every rank of the prefill DP group is asked; who is not asked has nothing to send.
    assert set(asked) == {coords for coords in prefill.coords() if coords.dp == prefill_dp}
    for p in set(range(prefill.tp_size)) - {source.coords.tp for source in group[someone]}:
        assert not sending(units, prefill.tp_size, p, decode.tp_size, someone.tp, someone.dp)


def loads(units: int, prefill_tp: int, decode: Topology) -> list[int]:
    """How many units each prefill TP rank sends when all ranks of `decode` ask once."""
    load = [0] * prefill_tp
    prefill = Topology(1, 1, prefill_tp, 1)
    for me in decode.coords():
        for source in sources(prefill, decode, me, 0):
            p = source.coords.tp
            load[p] += len(sending(units, prefill_tp, p, decode.tp_size, me.tp, me.dp))
    return load


@pytest.mark.slow
@given(st.data(), tp_sizes(), tp_sizes(), st.integers(1, 20))
@settings(max_examples=200)
def test_replicas_of_a_unit_are_loaded_alike(
    data: st.DataObject, prefill_tp: int, decode_tp: int, decode_dp: int
) -> None:
    units = data.draw(units_for(prefill_tp, decode_tp))
    if not fits(prefill_tp, decode_tp):
        # Sizes of which none divides the other are balanced by whole rounds of turns.
        decode_dp = prefill_tp // math.gcd(prefill_tp, decode_tp)
    load = loads(units, prefill_tp, Topology(decode_dp, 1, decode_tp, 1))
    assert sum(load) == decode_dp * sum(len(holding(units, decode_tp, d)) for d in range(decode_tp))
    assert max(load) - min(load) <= 1 or units % prefill_tp == 0


@given(st.integers(1, 64), tp_sizes(), st.data())
def test_units_that_do_not_fit_are_refused_with_both_numbers(
    units: int, tp_size: int, data: st.DataObject
) -> None:
    tp = data.draw(st.integers(0, tp_size - 1))
    if fits(units, tp_size):
        assert len(holding(units, tp_size, tp)) == max(1, units // tp_size)
        return
    with pytest.raises(MismatchError, match=rf"{units} Mamba shards .* {tp_size}: .*--tp-size"):
        holding(units, tp_size, tp, "Mamba shards")
    with pytest.raises(MismatchError, match=f"{units} KV heads"):
        sending(units, tp_size, tp, units, 0)
    with pytest.raises(MismatchError, match=f"{units} KV heads"):
        sending(units, units, 0, tp_size, tp)


@given(st.builds(Topology, SIZES, SIZES, SIZES, SIZES), st.builds(Topology, SIZES, *[SIZES] * 3))
def test_axes_that_cannot_be_paired_are_refused_with_both_values_and_the_flag(
    prefill: Topology, decode: Topology
) -> None:
    wrong = [
        (name, getattr(prefill, name), getattr(decode, name), flag)
        for name, flag, served in (
            ("cp_size", "--attn-cp-size", decode.cp_size == 1),
            ("pp_size", "--pp-size", decode.pp_size in (1, prefill.pp_size)),
        )
        if not served
    ]
    if not wrong:
        assert sources(prefill, decode, RankCoords(0, 0, 0, 0), 0)
        return
    with pytest.raises(MismatchError) as caught:
        sources(prefill, decode, RankCoords(0, 0, 0, 0), 0)
    name, ours, theirs, flag = wrong[0]
    for words in (f"{name} is {ours} on prefill and {theirs} on decode", flag):
        assert words in str(caught.value)


@given(st.data(), st.integers(0, 200), st.integers(1, 9))
def test_page_shares_split_every_request_and_every_chunk_of_it(
    data: st.DataObject, total: int, parts: int
) -> None:
    shares = [PageShare(index, parts) for index in range(parts)]
    assert [page for share in shares for page in share.bounds(total)] == list(range(total))
    sizes = [len(share.bounds(total)) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=5)))
    chunks = [range(a, b) for a, b in itertools.pairwise([0, *cuts, total])]
    for share in shares:
        in_chunks = [share.within(chunk, total) for chunk in chunks]
        assert [page for part in in_chunks for page in part] == list(share.bounds(total))
        for part, chunk in zip(in_chunks, chunks, strict=True):
            assert chunk.start <= part.start <= part.stop <= chunk.stop
    assert (
        len(PageShare(0, 0).bounds(total)) == len(PageShare(0, 0).within(range(total), total)) == 0
    )


@pytest.mark.parametrize(("index", "of"), [(-1, 1), (1, 1), (1, 0), (3, 2)])
def test_page_shares_that_do_not_exist(index: int, of: int) -> None:
    with pytest.raises(ValueError, match=f"no part {index} of {of}"):
        PageShare(index, of)


@pytest.mark.parametrize(
    ("layer_split", "all_cp_ranks", "expected"),
    [
        (False, False, CPTransfer.FIRST),
        (False, True, CPTransfer.PAGES),
        (True, False, CPTransfer.LAYERS),
        (True, True, CPTransfer.LAYERS),
    ],
)
def test_how_cp_ranks_share_the_sending(
    layer_split: bool, all_cp_ranks: bool, expected: CPTransfer
) -> None:
    config = msgspec.structs.replace(CONFIG, enable_dsa_cache_layer_split=layer_split)
    assert cp_transfer(config, all_cp_ranks) is expected


def test_one_pair_spelt_out() -> None:
    """GQA with 8 heads from TP 4 to TP 2, PP 2 to 1: what a reader would draw."""
    found = sources(Topology(2, 1, 4, 2), Topology(1, 1, 2, 1), RankCoords(0, 0, 1, 0), 1)
    whole = PageShare(0, 1)
    assert found == (
        Source(RankCoords(1, 0, 2, 0), 1, aux=False, state=True, pages=whole),
        Source(RankCoords(1, 0, 2, 1), 1, aux=True, state=True, pages=whole),
        Source(RankCoords(1, 0, 3, 0), 1, aux=False, state=True, pages=whole),
        Source(RankCoords(1, 0, 3, 1), 1, aux=False, state=True, pages=whole),
    )
    assert [sending(8, 4, p, 2, 1) for p in (2, 3)] == [range(4, 6), range(6, 8)]
    # Two heads: ranks 2 and 3 hold the same one, and take turns.
    for turn in range(4):
        senders = [p for p in range(4) if sending(2, 4, p, 2, 1, turn)]
        assert senders == [2 + turn % 2]


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
        ({"format": KVFormat(1, "bfloat16")}, ["--page-size"]),
    ],
)
def test_configs_that_cannot_hand_over(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(MismatchError) as caught:
        check_configs(msgspec.structs.replace(CONFIG, **changes), CONFIG)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({"dcp_size": 2}, {}, ["dcp_size is 2 on prefill and 1 on decode", "--dcp-size"]),
        ({"dcp_size": 2}, {"dcp_size": 4}, ["2 on prefill and 4 on decode"]),
        (
            {"dcp_size": 2, "topology": Topology(1, 1, 8, 1)},
            {"dcp_size": 2},
            ["tp_size is 8 on prefill and 4 on decode"],
        ),
        ({"topology": Topology(1, 2, 4, 1)}, {"dcp_size": 2}, ["cp_size 2", "--attn-cp-size"]),
        ({"enable_kv_cache_sharding": True}, {"dcp_size": 2}, ["--enable-kv-cache-sharding"]),
    ],
)
def test_context_parallelism_that_does_not_fit(prefill, decode, words) -> None:
    four = msgspec.structs.replace(CONFIG, topology=Topology(1, 1, 4, 1))
    ours, theirs = (msgspec.structs.replace(four, **changes) for changes in (prefill, decode))
    with pytest.raises(MismatchError) as caught:
        check_configs(ours, theirs)
    for word in words:
        assert word in str(caught.value)


def test_context_parallelism_that_fits() -> None:
    four = msgspec.structs.replace(CONFIG, topology=Topology(1, 1, 4, 1))
    dealt = msgspec.structs.replace(four, dcp_size=4)
    for ours in (four, dealt, CONFIG):
        check_configs(ours, dealt)
    check_configs(msgspec.structs.replace(four, enable_kv_cache_sharding=True), four)


@pytest.mark.parametrize(
    ("topology", "parts", "cp"),
    [
        (Topology(1, 1, 4, 1), 4, CPTransfer.FIRST),
        (Topology(1, 2, 4, 1), 2, CPTransfer.NUMBERS),
    ],
)
def test_sharded_pages_are_dealt_out_over_the_ranks_that_else_hold_them_alike(topology, parts, cp):
    sharded = msgspec.structs.replace(CONFIG, topology=topology, enable_kv_cache_sharding=True)
    assert dealt_over(sharded) == parts
    assert dealt_over(CONFIG) == 1
    assert cp_transfer(sharded, all_cp_ranks=False) is cp


def test_each_tp_rank_is_asked_where_each_has_pages_of_its_own() -> None:
    prefill, decode = Topology(1, 1, 4, 1), Topology(2, 1, 2, 1)
    for coords in decode.coords():
        found = sources(prefill, decode, coords, 0, every_tp_rank=True)
        assert [source.coords.tp for source in found] == [0, 1, 2, 3]
        assert {source.destinations for source in found} == {2}
        assert sum(source.aux for source in found) == 1


@pytest.mark.slow
@given(st.integers(0, 2**63 - 1), st.integers(1, 64))
def test_dp_rank_follows_the_room_or_waits_for_the_query(room: int, dp_size: int) -> None:
    topology = Topology(dp_size, 1, 1, 1)
    assert prefill_dp_rank(room, topology, True, None) == room % dp_size
    assert prefill_dp_rank(room, topology, False, None) == (0 if dp_size == 1 else None)
    assert prefill_dp_rank(room, topology, True, dp_size - 1) == dp_size - 1
    with pytest.raises(MismatchError, match=f"dp_size {dp_size} "):
        prefill_dp_rank(room, topology, False, dp_size)
