# SPDX-License-Identifier: Apache-2.0
"""SGLang's own decode queue over our manager: how often it asks for an instance, and when it takes
it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

ADDRESS, OTHER = "10.0.0.1:8998", "10.0.0.2:8998"


@pytest.fixture
def queue(monkeypatch):
    """A decode queue whose retry interval never ends, over a manager without an engine."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    from sglang_mooncake.instances import PrefillInstances
    from sglang_mooncake.registries import Registries
    from sglang_mooncake.sglang.manager import KVManager
    from sglang_mooncake.sglang.plugin import hook_decode_queue

    hook_decode_queue()
    hook_decode_queue()  # a second manager in one process changes nothing
    manager = KVManager.__new__(KVManager)
    manager.decode_side = SimpleNamespace(instances=PrefillInstances(Registries(), fetch()))
    queue = DecodePreallocQueue.__new__(DecodePreallocQueue)
    queue.kv_manager = manager
    queue._ensure_retry_count = {}
    queue._max_ensure_retries = 15
    queue._ensure_last_attempt_time = {}
    queue._ensure_retry_interval = float("inf")
    yield queue
    manager.decode_side.instances.close()


def fetch():
    from handover import ALONE, FIRST

    from bootstrap_server import Instance, InstanceConfig, KVFormat, Rank

    def found(address: str) -> Instance:
        assert GATE[address].wait(60)
        config = InstanceConfig(topology=ALONE, format=KVFormat(1, "bfloat16", None))
        return Instance(config, 1, (Rank(FIRST, "127.0.0.1", 1),))

    return found


GATE = {ADDRESS: threading.Event(), OTHER: threading.Event()}


@pytest.fixture(autouse=True)
def gates():
    for gate in GATE.values():
        gate.clear()
    yield
    for gate in GATE.values():
        gate.set()


def test_an_instance_that_was_looked_up_is_taken_without_waiting_for_the_next_retry(queue):
    from handover import until

    request, other = SimpleNamespace(kv_receiver=None), SimpleNamespace(kv_receiver=None)
    asked = {ADDRESS: [request], OTHER: [other]}
    ready, remaining = queue._ensure_prefill_info(asked)
    assert not ready
    assert remaining == [request, other]
    GATE[ADDRESS].set()
    until(lambda: ADDRESS in queue.kv_manager.prefill_info_table, "it is known")
    ready, remaining = queue._ensure_prefill_info(asked)
    assert ready == {ADDRESS: [request]}
    assert remaining == [other]
    assert queue._ensure_retry_count == {OTHER: 1}


class _WithoutIt:
    """A decode queue that asks in another way."""


class _WithoutTheStamp:
    """One that has no interval between its questions, or keeps it elsewhere."""

    def _ensure_prefill_info(self, addr_to_reqs):
        return {}, []


@pytest.mark.parametrize("another", [_WithoutIt, _WithoutTheStamp])
def test_a_decode_queue_that_the_hook_does_not_fit_stops_the_server(another, monkeypatch):
    from sglang.srt.disaggregation import decode

    from sglang_mooncake.sglang.plugin import hook_decode_queue

    monkeypatch.setattr(decode, "DecodePreallocQueue", another)
    with pytest.raises(LookupError, match=r"has no DecodePreallocQueue\._ensure_prefill_info"):
        hook_decode_queue()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (OTHER, "which registries of this decode server does not allow"),
        ("no port", "is not of the form host:port"),
    ],
)
def test_a_request_that_names_a_registry_in_vain_fails_at_once(address, says):
    """SGLang would ask for it fifteen times, a second apart."""
    from sglang_mooncake.instances import PrefillInstances
    from sglang_mooncake.registries import Registries
    from sglang_mooncake.sglang.receiver import KVReceiver

    failures: list[str] = []
    instances = PrefillInstances(Registries((ADDRESS,)), fetch())
    side = SimpleNamespace(
        instances=instances,
        new_room=lambda room: SimpleNamespace(room=room),
        fail=lambda use, reason: failures.append(reason),
    )
    manager = SimpleNamespace(decode_side=side, track=lambda use: None)
    KVReceiver(manager, address, 1)
    KVReceiver(manager, ADDRESS, 2)
    GATE[ADDRESS].set()
    instances.close()
    assert len(failures) == 1
    assert says in failures[0]
