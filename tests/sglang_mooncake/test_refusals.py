# SPDX-License-Identifier: Apache-2.0
"""What two servers may differ in, so that they never serve each other: each difference ends the
request on both sides, with both values, and is known to the decode rank until it is mended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from handover import (
    ALONE,
    FIRST,
    HOST,
    LAYERS,
    NO_KEYS,
    PAGE_SIZE,
    WAIT_S,
    Handover,
    Memory,
    Pool,
    handover,
    make_context,
    until,
)
from msgspec import structs
from te_ports import held_port

from bootstrap_server import (
    BootstrapClient,
    KVFormat,
    Rank,
    RankLease,
    RankRecord,
    Topology,
    Why,
)
from bootstrap_server.admission.secret import Keys
from sglang_mooncake.context import Deadlines
from sglang_mooncake.given_up import GivenUpWatch
from sglang_mooncake.layout import Buffers, Layout
from sglang_mooncake.messages import PROTOCOL_VERSION
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config

ROOM = 5
OURS, THEIRS = (Keys.from_secrets([text * 43]) for text in (b"a", b"b"))
FORMAT = KVFormat(PAGE_SIZE, "float32")


class OtherPool(Pool):
    """A pool that describes itself otherwise."""

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        self._changed = changed

    def layout(self, completions: Buffers) -> Layout:
        return structs.replace(super().layout(completions), **self._changed)


class FewerLayers(Pool):
    def layout(self, completions: Buffers) -> Layout:
        whole = super().layout(completions)
        (one,) = whole.components
        held = [part[:-1] for part in structs.astuple(one.buffers)]
        less = structs.replace(one, layers=one.layers[:-1], buffers=Buffers(*held))
        return structs.replace(whole, components=(less,))


class OtherKind(Pool):
    def layout(self, completions: Buffers) -> Layout:
        whole = super().layout(completions)
        (one,) = whole.components
        return structs.replace(whole, components=(structs.replace(one, kind="k"),))


class OtherMetadata(Pool):
    def layout(self, completions: Buffers) -> Layout:
        whole = super().layout(completions)
        aux = structs.replace(whole.aux, item_nbytes=(32,))
        return structs.replace(whole, aux=aux)


@dataclass(frozen=True)
class Difference:
    """`values`: what both sides' reasons name."""

    why: Why
    values: tuple[str, ...]
    keys: Keys = NO_KEYS
    decode_keys: Keys | None = None
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    prefill_config: Config | None = None
    decode_config: Config | None = None
    target: type[Pool] | OtherPool = Pool


def of_config(why: Why, values: tuple[str, ...], **both: tuple[Any, Any]) -> Difference:
    here, there = ({name: pair[side] for name, pair in both.items()} for side in (0, 1))
    return Difference(why, values, prefill=here, decode=there)


DIFFERENCES = {
    "secret": Difference(Why.SECRET, ("secret",), OURS, THEIRS),
    "no secret on decode": Difference(Why.SECRET, ("secret",), OURS, NO_KEYS),
    "no secret on prefill": Difference(Why.SECRET, ("secret",), NO_KEYS, OURS),
    "model": of_config(Why.MODEL, ("model is A ", "B on decode"), model=("A", "B")),
    "page size": of_config(
        Why.PAGE_SIZE,
        (f"page_size is {PAGE_SIZE} on", "16 on decode"),
        format=(FORMAT, structs.replace(FORMAT, page_size=16)),
    ),
    "dtype": of_config(
        Why.DTYPE,
        ("float32 on prefill", "bfloat16 on decode"),
        format=(FORMAT, structs.replace(FORMAT, kv_cache_dtype="bfloat16")),
    ),
    "layout": of_config(
        Why.LAYOUT,
        ("kv_layout is None", "5d on decode"),
        format=(FORMAT, structs.replace(FORMAT, kv_layout="5d")),
    ),
    "release": of_config(
        Why.RELEASE,
        (f"protocol is {PROTOCOL_VERSION} on", f"{PROTOCOL_VERSION + 1} on"),
        protocol=(PROTOCOL_VERSION, PROTOCOL_VERSION + 1),
    ),
    "policy": of_config(
        Why.SETTING,
        ("early on prefill", "prefill_complete on decode"),
        decode_allocation_policy=("early", "prefill_complete"),
    ),
    "speculative layout": of_config(
        Why.SETTING,
        ("{'a': 1} on prefill", "None on decode"),
        dsv41_spec_layout=({"a": 1}, None),
    ),
    "dcp": of_config(
        Why.TOPOLOGY,
        ("cp_size 1", "enable_kv_cache_sharding True"),
        enable_kv_cache_sharding=(True, False),
        topology=(ALONE, Topology(1, 1, 2, 1)),
        dcp_size=(1, 2),
    ),
    "stages": of_config(
        Why.TOPOLOGY,
        ("pp_size is 1 on prefill", "2 on decode"),
        topology=(ALONE, Topology(1, 1, 1, 2)),
    ),
    "page size in record and hello": Difference(
        Why.PAGE_SIZE,
        (f"page_size is {PAGE_SIZE} on", "8 on decode"),
        decode={"format": structs.replace(FORMAT, page_size=8)},
        target=OtherPool(page_size=8),
    ),
    # What the records say is alike, and the hello is refused.
    "page size in the hello": Difference(
        Why.PAGE_SIZE,
        (f"prefill server has {PAGE_SIZE}", "decode server has 8"),
        target=OtherPool(page_size=8),
    ),
    "dtype in the hello": Difference(
        Why.DTYPE, ("float32", "float16"), target=OtherPool(dtype="float16")
    ),
    "layout in the hello": Difference(Why.LAYOUT, ("None", "5d"), target=OtherPool(kv_layout="5d")),
    "caches in the hello": Difference(Why.MODEL, ("latent", "has k"), target=OtherKind),
    "layers in the hello": Difference(
        Why.LAYOUT, (f"prefill has layers {LAYERS - 1}",), target=FewerLayers
    ),
    "metadata in the hello": Difference(Why.LAYOUT, ("64", "32"), target=OtherMetadata),
    # What shows when the prefill rank's engine connects to the decode rank's.
    "transports": Difference(
        Why.TRANSPORT,
        ("offers tcp", "this one samehost"),
        prefill_config=Config(transports=("samehost",)),
        decode_config=Config(transports=("tcp",)),
    ),
    "encryption": Difference(
        Why.TRANSPORT,
        ("the other engine encrypts and this one does not",),
        keys=OURS,
        prefill_config=Config(transports=("tcp",)),
        decode_config=Config(transports=("tcp",), encrypt=True),
    ),
    "keys of engines": Difference(
        Why.SECRET,
        ("none of the 1 keys of this engine",),
        keys=OURS,
        decode_keys=replace(OURS, data=THEIRS.data),
    ),
}


@contextmanager
def differing(one: Difference) -> Iterator[Handover]:
    target: Memory = one.target if isinstance(one.target, Pool) else one.target()
    with (
        handover(
            target=target,
            keys=one.keys,
            decode_keys=one.decode_keys,
            prefill_config=one.prefill_config,
            decode_config=one.decode_config,
            prefill_facts=one.prefill,
            decode_facts=one.decode,
        ) as pair,
        closing(
            GivenUpWatch(
                lambda: BootstrapClient(pair.address, keys=one.keys.registry),
                pair.prefill.side.given_up,
            )
        ) as watch,
    ):
        watch.start()
        yield pair


def ask(pair: Handover, room: int) -> Room:
    """As SGLang's decode scheduler and our receiver do."""
    side = pair.decode.side
    target = side.new_room(room)
    side.instances.ensure(pair.address)

    def is_chosen() -> bool:
        if side.instances.ensure(pair.address):
            side.choose_sources(target, pair.address, 0)
            return True
        side.check_served(target, pair.address)
        return target.view.over

    until(is_chosen, "the instance is known, or refused")
    return target


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_ends_the_request_on_both_sides_with_both_values(name, caplog):
    one = DIFFERENCES[name]
    with differing(one) as pair:
        for room in (ROOM, ROOM + 1):
            source = pair.prefill.side.open_room(room, register_dp_rank=False)
            target = ask(pair, room)
            until(lambda use=target: use.view.over, "the decode room ends")
            until(lambda use=source: use.view.over, "the prefill room ends")
            assert target.view.state is RoomState.FAILED
            for use in (source, target):
                assert use.view.reason is not None
                for value in one.values:
                    assert value in use.view.reason
        with BootstrapClient(pair.address, keys=one.keys.registry) as client:
            # Also where a prefill rank of another release does not understand what it is told.
            until(
                lambda: client.given_up(0, 0.0).rooms.keys() == {ROOM, ROOM + 1},
                "both rooms are noticed at the registry",
            )
        (refused,) = pair.decode.side.instances.refused()
        assert (refused.address, refused.why) == (pair.address, one.why)
        said = [one for one in caplog.records if one.name == "sglang_mooncake.instances"]
        assert len(said) == 1, "once, though two requests have failed of it"
        assert said[0].message.endswith(refused.sentence)


def test_a_room_whose_prefill_rank_cannot_be_reached_ends_there_too():
    """A firewall, say, rejects the port of its control links."""
    with differing(Difference(Why.SETTING, ())) as pair, held_port() as closed:
        pair.prefill.lease.close()
        rank = Rank(FIRST, HOST, closed, epoch=7)
        config = make_context("prefill", pair.address, Deadlines()).config
        with RankLease(pair.address, RankRecord(config, rank), deadline_s=WAIT_S):
            source = pair.prefill.side.open_room(ROOM, register_dp_rank=False)
            target = ask(pair, ROOM)
            until(lambda: target.view.over and source.view.over, "both rooms end")
        assert "no process listens there" in str(source.view.reason)
        assert not pair.decode.side.instances.refused(), "nobody has refused anybody"
