# SPDX-License-Identifier: Apache-2.0
"""What operators say of ports and of packets: how it is taken, and what is refused."""

from __future__ import annotations

import ast
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from te_direct import NullEngine
from te_far import wait_until
from te_ports import two_ports

import te
from te.errors import DeviceError
from te.topology import Gid, GidKind
from te.transports.base import Local
from te.transports.rdma import direct, transport
from te.transports.rdma import link as link_module
from te.transports.rdma.direct import paths
from te.transports.rdma.messages import CardNic, RailAnswer, RailOffer
from te.transports.rdma.transport import _idle_settings
from te.verbs import _core as verbs
from te.verbs.fabric import Nic, _with_gid
from te_bench._null import Device, Wires

HOST = "127.0.0.1"
TIMEOUT_S = 60.0


def nic(family: str = "ib", index: int = 0, gids: tuple[Gid, ...] = ()) -> Nic:
    return Nic(
        index=index,
        name=f"nic{index}",
        port=1,
        device=cast(verbs.Device, Device(Wires())),
        family=family,
        gids=gids,
        lid=1,
        mtu=5,
        max_message_bytes=1 << 30,
        max_region_bytes=1 << 62,
        netdev="eth0",
        bytes_per_s=0.0,
    )


def gid(index: int, text: str, roce: int = 2) -> Gid:
    return Gid(index=index, text=text, kind=GidKind.IPV4, roce=roce, netdev="eth0")


@pytest.mark.parametrize("taken", [0, 1])
def test_an_engine_listens_on_the_first_free_port_of_its_range(taken: int) -> None:
    with (
        two_ports(taken) as first,
        te.Engine(te.Config(host=HOST, port=first, port_last=first + 1)) as engine,
    ):
        assert f"port {first + taken}" in repr(engine)


def test_two_engines_share_a_range_and_a_third_is_told_which_is_full() -> None:
    with two_ports(0) as first:
        config = te.Config(host=HOST, port=first, port_last=first + 1)
        with te.Engine(config) as one, te.Engine(config) as other:
            assert {f"port {first + i}" in repr(e) for i, e in enumerate((one, other))} == {True}
            with pytest.raises(te.ListenError, match=f"from {first} to {first + 1} is free"):
                te.Engine(config)


def test_an_address_that_is_not_ours_is_said_whatever_the_range() -> None:
    with pytest.raises(te.ListenError, match=r"192\.0\.2\.1:20000: Cannot assign"):
        te.Engine(te.Config(host="192.0.2.1", port=20_000, port_last=30_000))


@pytest.mark.parametrize(
    ("per_pair", "near", "far", "made"),
    [(1, 2, 2, [0, 1]), (2, 2, 2, [0, 1, 0, 1]), (8, 1, 1, [0] * 8), (3, 3, 1, [0, 1, 2] * 2)],
)
def test_each_pair_of_devices_has_its_first_rail_before_one_has_a_second(
    per_pair: int, near: int, far: int, made: list[int]
) -> None:
    there = [CardNic(name=f"far{i}", family="ib", lid=2, mtu=5, gids=[]) for i in range(far)]
    found = paths(tuple(nic(index=i) for i in range(near)), there, per_pair, 6 if near > 1 else 8)
    assert [ways[0].nic.index for ways in found] == made


def test_a_link_has_so_many_queue_pairs_for_each_pair_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    add_queue_pair = direct.add_queue_pair

    def count(queue_pair: Any, link: Any, offer: RailOffer, nic: int, *rest: int) -> None:
        made.append((offer.rail, nic))
        add_queue_pair(queue_pair, link, offer, nic, *rest)

    monkeypatch.setattr(direct, "add_queue_pair", count)
    # No rail is made anew because a thread has stood still.
    for module in (link_module, transport):
        monkeypatch.setattr(module, "BUILD_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(link_module, "PROBE_TIMEOUT_S", TIMEOUT_S)
    patient: dict[str, Any] = {"connect_timeout_s": TIMEOUT_S, "rail_timeout_s": TIMEOUT_S}
    wires = Wires()
    with (
        NullEngine(wires, rails_per_nic=3, **patient) as source,
        NullEngine(wires, **patient) as target,
    ):
        source.connect(target.card())
        wait_until(lambda: len(made) == 12, "both ends of six rails are made")
    assert Counter(made) == {(rail, rail % 2): 2 for rail in range(6)}


GIDS = (gid(0, "fe80::1"), gid(2, "::ffff:10.0.0.1", roce=1), gid(3, "::ffff:10.0.0.1"))


def test_the_gid_that_is_asked_for_is_the_only_one() -> None:
    assert _with_gid(nic("roce", gids=GIDS), None).gids == GIDS
    assert _with_gid(nic("roce", gids=GIDS), 3).gids == GIDS[2:]
    assert _with_gid(nic("ib", gids=GIDS), 3).gids == GIDS


@pytest.mark.parametrize("index", [1, 2])
def test_a_gid_that_the_port_lacks_is_refused_with_those_that_it_has(index: int) -> None:
    says = rf"gid_index={index} is no RoCE v2 GID of its port 1, which has 0 \(fe80::1\), 3 "
    with pytest.raises(DeviceError, match=says):
        _with_gid(nic("roce", gids=GIDS), index)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("roce", {"traffic_class": 96, "gid_index": 3}, []),
        ("iwarp", {}, []),
        ("ib", {"service_level": 3}, []),
        ("ib", {"gid_index": 3}, ["gid_index=3: no effect on nic0: within an InfiniBand subnet"]),
        (
            "iwarp",
            {"traffic_class": 96, "partition_key_index": 1},
            ["traffic_class=96, partition_key_index=1: no effect on nic0: iWARP connects by"],
        ),
    ],
)
def test_what_says_nothing_to_a_device_is_said(
    family: str, settings: dict[str, Any], says: list[str]
) -> None:
    found = _idle_settings(te.Config(**settings), (nic(family),))
    assert len(found) == len(says)
    assert all(one.startswith(start) for one, start in zip(found, says, strict=True))


def test_it_is_said_once_in_the_log_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), NullEngine(Wires(), nics=1, gid_index=3):
        pass
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == ["gid_index=3"]


def test_what_is_configured_of_packets_is_given_to_the_queue_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends, in the order of verbs.QueuePair.connect. Soft devices tell the traffic class
    (tests/rdma), but no service level, and have one partition key."""
    told: list[dict[str, Any]] = []
    names = parameters_of_connect()

    class Recorded:
        number = 1

        def connect(self, *values: Any, is_target: bool) -> None:
            told.append(dict(zip(names, (*values, is_target), strict=True)))

    monkeypatch.setattr(direct, "add_queue_pair", lambda *_: None)
    monkeypatch.setattr(Nic, "check_port", lambda _: None)
    device = cast(verbs.Device, SimpleNamespace(queue_pair=lambda *_: Recorded()))
    near = replace(nic(), device=device)
    config = te.Config(traffic_class=106, service_level=3, partition_key_index=7)
    local = cast(Local, SimpleNamespace(config=config))
    link = cast(Any, SimpleNamespace(fences=0))
    far = CardNic(name="far", family="ib", lid=2, mtu=5, gids=[])

    def greet(offer: RailOffer) -> RailAnswer:
        return direct.accept_rail(local, link, offer, near, 1)

    direct.build_rail(local, link, far, 0, 0, direct.Path(near, 0, None), greet)
    assert [one["is_target"] for one in told] == [True, False]
    for one in told:
        assert one["traffic_class"] == 106
        assert one["service_level"] == 3
        assert one["partition_key_index"] == 7


def parameters_of_connect() -> list[str]:
    """Of verbs.QueuePair.connect, as its stub declares it: the compiled one tells no signature."""
    source = Path(verbs.__file__).with_name("_core.pyi").read_text()
    tree = ast.parse(source)
    (cls,) = [one for one in tree.body if getattr(one, "name", "") == "QueuePair"]
    assert isinstance(cls, ast.ClassDef)
    (method,) = [one for one in cls.body if getattr(one, "name", "") == "connect"]
    assert isinstance(method, ast.FunctionDef)
    return [one.arg for one in method.args.args if one.arg != "self"]
