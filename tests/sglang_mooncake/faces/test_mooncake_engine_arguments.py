# SPDX-License-Identifier: Apache-2.0
"""What calls of Mooncake's engine class may name, and give by place."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from engine_far import near
from te_far import pattern

from sglang_mooncake.faces.mooncake_engine.engine import TransferEngine

ONE = "target_hostname buffer peer_buffer_address length"
MANY = "target_hostname buffers peer_buffer_addresses lengths"
HINT, NOTIFY = {"transport_hint": ""}, {"notify": None, "transport_hint": ""}
ANYWHERE = {"location": "*"}
#: The methods of 0.3.13 that copy: the arguments that a call has to give, and the others' defaults.
#: Mooncake does not name those of methods with None; they are given by place.
METHODS: dict[str, tuple[str | None, dict[str, object]]] = {
    "initialize": (None, {}),
    "initialize_ext": (None, {}),
    "get_rpc_port": (None, {}),
    "get_notifies": (None, {}),
    "get_local_topology": ("", {"device_name": None}),
    "allocate_managed_buffer": (None, {}),
    "free_managed_buffer": (None, {}),
    "write_bytes_to_buffer": (None, {}),
    "read_bytes_from_buffer": (None, {}),
    "get_first_buffer_address": (None, {}),
    "unregister_memory": (None, {}),
    "batch_unregister_memory": (None, {}),
    "get_batch_transfer_status": (None, {}),
    "transfer_check_status": (None, {}),
    "register_memory": ("buffer_addr capacity", ANYWHERE),
    "batch_register_memory": ("buffer_addresses capacities", ANYWHERE),
    "send_probe": ("peer_server_name", {}),
    "warmup_efa_segment": ("segment_name", {}),
    "transfer_sync_write": (ONE, HINT),
    "transfer_sync_read": (ONE, HINT),
    "transfer_submit_write": (ONE, HINT),
    "transfer_sync": (ONE + " opcode", NOTIFY),
    "batch_transfer_sync_write": (MANY, HINT),
    "batch_transfer_sync_read": (MANY, HINT),
    "batch_transfer_async_write": (MANY, HINT),
    "batch_transfer_async_read": (MANY, HINT),
    "batch_transfer_sync": (MANY + " opcode", NOTIFY),
    "batch_transfer_async": (MANY + " opcode", HINT),
}
PLACES = {
    "initialize": 4,
    "initialize_ext": 5,
    "get_rpc_port": 0,
    "get_notifies": 0,
    "allocate_managed_buffer": 1,
}
PLACES |= {"get_notifies": 0}
PLACES |= {"free_managed_buffer": 2, "write_bytes_to_buffer": 3, "read_bytes_from_buffer": 2}


def test_no_method_is_left_out() -> None:
    ours = {name for name in vars_of(TransferEngine) if not name.startswith("_")}
    assert ours == {*METHODS, "get_engine"}


def vars_of(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction)}


@pytest.mark.parametrize("name", METHODS)
def test_arguments_have_mooncakes_names_and_order(name) -> None:
    given = list(inspect.signature(getattr(TransferEngine, name)).parameters.values())[1:]
    needed, optional = METHODS[name]
    if needed is None:
        assert len(given) == PLACES.get(name, 1)
        assert all(one.default is one.empty for one in given)
        return
    assert [one.name for one in given] == [*needed.split(), *optional]
    assert {one.name: one.default for one in given if one.default is not one.empty} == optional


def test_where_memory_is_and_how_it_goes_may_be_said() -> None:
    engine, peer = near("tcp"), near("tcp")
    here, there = pattern(1, 100), np.zeros(100, np.uint8)
    addresses = [here.ctypes.data]
    where = {"buffer_addresses": addresses, "capacities": [100], "location": "cpu:0"}
    assert engine.batch_register_memory(**where) == 0
    assert peer.register_memory(there.ctypes.data, 100, location="cuda:0") == 0
    session = f"127.0.0.1:{peer.get_rpc_port()}"
    blocks = {"buffers": addresses, "peer_buffer_addresses": [there.ctypes.data], "lengths": [100]}
    hint = {"transport_hint": "rdma"}
    assert engine.batch_transfer_sync_write(session, **blocks, **hint) == 0
    assert (there == here).all()
    number = engine.batch_transfer_async_read(target_hostname=session, **blocks, **hint)
    assert engine.get_batch_transfer_status([number]) == 0
    assert engine.send_probe(peer_server_name=session) == 0
    assert engine.warmup_efa_segment(segment_name=session) == 0


def test_the_longer_initialize_is_the_same() -> None:
    engine = type("TransferEngine", (TransferEngine,), {"options": near("tcp").options})()
    assert engine.initialize_ext("127.0.0.1", "P2PHANDSHAKE", "tcp", "", "p2p") == 0
    assert engine.get_rpc_port() > 0
