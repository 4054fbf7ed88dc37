# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bootstrap_server import (
    BootstrapError,
    Instance,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    Topology,
)
from bootstrap_server.admission.signatures import check_signatures, key_index, signed

OLD, NEW = b"o" * 32, b"n" * 32
LAYOUT = {"kv_layer_ids": [0, 1], "state_item_lens": [[1], [2, 3]], "ratio": 1.0, "n": None}
CONFIG = InstanceConfig(Topology(1, 1, 1, 1), KVFormat(1, "bfloat16"), dsv41_spec_layout=LAYOUT)
RANK = Rank(RankCoords(0, 0, 0, 0), "10.0.0.1", 40_000, 7, 30_000)
RECORD = RankRecord(CONFIG, RANK)
SIGNED = signed(RECORD, [OLD, NEW])


def test_a_record_is_signed_with_the_first_key() -> None:
    assert key_index(SIGNED.config, SIGNED.rank, [OLD]) == 0
    assert key_index(SIGNED.config, SIGNED.rank, [NEW, OLD]) == 1
    assert key_index(SIGNED.config, SIGNED.rank, [NEW]) is None
    assert key_index(SIGNED.config, SIGNED.rank, []) is None
    assert signed(SIGNED, [OLD]) == SIGNED
    assert key_index(CONFIG, RANK, [OLD, NEW]) is None


def test_without_a_key_a_record_stays_as_it_is() -> None:
    assert signed(RECORD, ()) is RECORD


def test_a_signature_survives_a_registry() -> None:
    instance = Instance(SIGNED.config, 1, (SIGNED.rank,), 5)
    there = msgspec.json.decode(msgspec.json.encode(instance), type=Instance)
    shuffled = {name: LAYOUT[name] for name in reversed(LAYOUT)}
    config = msgspec.structs.replace(there.config, dsv41_spec_layout=shuffled)
    assert key_index(config, there.rank(RANK.coords), [OLD]) == 0


def changed(struct: msgspec.Struct, name: str) -> Any:
    """The struct with another value there."""
    value = getattr(struct, name)
    match value:
        case bool():
            new: object = not value
        case int():
            new = value + 1
        case str() if name == "control_key":
            new = "x" * 40
        case str():
            new = f"{value}x"
        case dict():
            new = value | {"n": 1}
        case None:
            new = {"n": 1} if name == "dsv41_spec_layout" else "x"
        case RankCoords():
            new = RankCoords(0, 0, 1, 0)
        case msgspec.Struct():
            new = changed(value, value.__struct_fields__[-1 if name == "topology" else 0])
    return msgspec.structs.replace(struct, **{name: new})


@pytest.mark.parametrize("name", [n for n in Rank.__struct_fields__ if n != "signature"])
def test_it_covers_all_that_a_rank_says(name: str) -> None:
    assert key_index(CONFIG, changed(SIGNED.rank, name), [OLD]) is None


@pytest.mark.parametrize("name", InstanceConfig.__struct_fields__)
def test_it_covers_all_that_ranks_agree_on(name: str) -> None:
    config = msgspec.structs.replace(CONFIG, topology=Topology(1, 1, 2, 1))
    rank = signed(RankRecord(config, RANK), [OLD]).rank
    assert key_index(config, rank, [OLD]) == 0
    assert key_index(changed(config, name), rank, [OLD]) is None


def test_it_covers_the_name_of_the_instance() -> None:
    assert key_index(CONFIG, SIGNED.rank, [OLD], "other") is None


@pytest.mark.parametrize("text", ["x" * 64, "0" * 63, "A" * 64, "0" * 65, "\u0660" * 64])
def test_what_is_no_signature_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not 64 hexadecimal digits"):
        Rank(RANK.coords, RANK.host, RANK.port, signature=text)


def test_an_instance_with_a_record_that_is_not_ours_is_refused() -> None:
    check_signatures(Instance(CONFIG, 1, (SIGNED.rank,)), [NEW, OLD], "registry:1")
    check_signatures(Instance(CONFIG, 1, (RANK,)), (), "registry:1")
    for rank, cause in ((RANK, "is not signed"), (SIGNED.rank, "is signed, but not with our")):
        with pytest.raises(BootstrapError) as refusal:
            check_signatures(Instance(CONFIG, 1, (rank,)), [NEW], "registry:1")
        for part in ("rank dp 0 cp 0 tp 0 pp 0 at 10.0.0.1 port 40000", "registry:1", cause):
            assert part in str(refusal.value)
