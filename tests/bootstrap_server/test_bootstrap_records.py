# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server import (
    Instance,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    SGLangParallel,
    Topology,
)
from bootstrap_server.ranks.records import (
    FLAGS,
    check_instance_name,
    differences,
    instance_name_of,
    registry_port_of,
)

SIZES = st.integers(1, 4)
TOPOLOGIES = st.builds(Topology, SIZES, SIZES, SIZES, SIZES)
CONFIG = InstanceConfig(Topology(1, 1, 2, 1), KVFormat(16, "bfloat16"))


@pytest.mark.slow
@given(TOPOLOGIES)
def test_coords_are_all_ranks_in_the_order_of_index(topology: Topology) -> None:
    coords = list(topology.coords())
    assert len(set(coords)) == topology.ranks
    assert [topology.index(c) for c in coords] == list(range(topology.ranks))
    assert coords == sorted(coords)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Topology(0, 1, 1, 1), ["dp_size is 0"]),
        (lambda: Topology(1, 1, -2, 1), ["tp_size is -2"]),
        (lambda: Topology(65_536, 1, 2, 1), ["131072 ranks"]),
        (lambda: RankCoords(0, 0, -1, 0), ["tp rank is -1"]),
        (lambda: Topology(2, 1, 1, 1).check(RankCoords(2, 0, 0, 0)), ["dp rank 2", "dp_size is 2"]),
        (lambda: KVFormat(0, "bfloat16"), ["page_size is 0"]),
        (lambda: KVFormat(1, ""), ["kv_cache_dtype has 0"]),
        (lambda: KVFormat(1, "a\n"), ["kv_cache_dtype", "control"]),
        (lambda: KVFormat(1, "a", "x" * 999), ["kv_layout has 999"]),
        (lambda: Rank(RankCoords(0, 0, 0, 0), "a b", 1), ["white space"]),
        (lambda: Rank(RankCoords(0, 0, 0, 0), "a", 65_536), ["port is 65536"]),
        (lambda: Rank(RankCoords(0, 0, 0, 0), "a", 1, -1), ["epoch is -1"]),
        (lambda: Rank(RankCoords(0, 0, 0, 0), "a", 1, 0, 0), ["prefill_http_port is 0"]),
        (lambda: Instance(CONFIG, 1, ()), ["0 ranks listed"]),
    ],
)
def test_bad_values_are_refused_by_name(make: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        make()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)


def test_an_instance_refuses_ranks_out_of_order() -> None:
    ranks = tuple(Rank(RankCoords(0, 0, tp, 0), "h", 1) for tp in (1, 0))
    with pytest.raises(ValueError, match="out of order"):
        Instance(CONFIG, 1, ranks)
    assert Instance(CONFIG, 1, ranks[::-1]).rank(RankCoords(0, 0, 1, 0)) == ranks[0]


def test_records_survive_json() -> None:
    layout = {"kv_layer_ids": [0, 1], "state_item_lens": [[1], [2, 3]], "n": None}
    config = msgspec.structs.replace(CONFIG, dsv41_spec_layout=layout, protocol=3)
    assert msgspec.json.decode(msgspec.json.encode(config), type=InstanceConfig) == config


def leaves(struct: msgspec.Struct) -> set[str]:
    names: set[str] = set()
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        names |= leaves(value) if isinstance(value, msgspec.Struct) else {name}
    return names


def test_every_value_that_can_contradict_has_a_flag() -> None:
    assert leaves(CONFIG) == set(FLAGS)


def test_differences_name_values_on_both_sides_and_stay_short() -> None:
    other = InstanceConfig(
        Topology(1, 1, 4, 1),
        KVFormat(1, "bfloat16"),
        dsv41_spec_layout={"same": 1, "ratios": [7] * 500},
    )
    mine = msgspec.structs.replace(CONFIG, dsv41_spec_layout={"same": 1, "ratios": [8]})
    found = {difference.name: difference for difference in differences(mine, other)}
    assert set(found) == {"tp_size", "page_size", "dsv41_spec_layout"}
    assert found["page_size"][1:] == ("16", "1")
    assert found["page_size"].flag == "--page-size"
    assert found["dsv41_spec_layout"].left == "{'ratios': [8]}"
    assert len(found["dsv41_spec_layout"].right) < 200


def parallel(**changes: int) -> SGLangParallel:
    numbers = {f"{axis}_size": 1 for axis in ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")}
    numbers |= {name.replace("_size", "_rank"): 0 for name in numbers}
    return SGLangParallel(**(numbers | changes))


@pytest.mark.parametrize(
    ("changes", "topology", "coords"),
    [
        ({}, (1, 1, 1, 1), (0, 0, 0, 0)),
        ({"attn_tp_size": 2, "attn_tp_rank": 1}, (1, 1, 2, 1), (0, 0, 1, 0)),
        ({"attn_dp_size": 2, "attn_dp_rank": 1}, (2, 1, 1, 1), (1, 0, 0, 0)),
        ({"system_dp_size": 3, "system_dp_rank": 2}, (3, 1, 1, 1), (2, 0, 0, 0)),
        ({"pp_size": 2, "pp_rank": 1, "attn_cp_size": 2}, (1, 2, 1, 2), (0, 0, 0, 1)),
    ],
)
def test_sglang_numbers_become_coordinates(
    changes: dict[str, int], topology: tuple[int, ...], coords: tuple[int, ...]
) -> None:
    assert parallel(**changes).place() == (Topology(*topology), RankCoords(*coords))


@pytest.mark.parametrize(
    "changes", [{"attn_dp_size": 2, "system_dp_size": 2}, {"attn_tp_rank": 1}, {"pp_size": 0}]
)
def test_sglang_numbers_that_name_no_rank_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"size|rank"):
        parallel(**changes).place()


@given(st.text(max_size=200))
def test_every_address_has_a_name_that_an_instance_may_have(address):
    check_instance_name(instance_name_of(address or "x"))


def test_names_of_instances_can_be_read():
    assert instance_name_of("10.0.0.1:8998") == "10.0.0.1-8998"
    assert instance_name_of("[fd00::1]:8998") == "ifd00--1--8998"


@given(
    host=st.text(st.characters(max_codepoint=127), min_size=1, max_size=80),
    port=st.integers(1, 65_535),
)
def test_the_port_of_an_address_is_in_the_name_that_it_gives(host: str, port: int) -> None:
    assert registry_port_of(instance_name_of(f"{host}:{port}")) == port


@pytest.mark.parametrize("name", ["default", "a-0", "a-65536", "a-1x", "8998x"])
def test_other_names_have_no_port(name: str) -> None:
    assert registry_port_of(name) is None
