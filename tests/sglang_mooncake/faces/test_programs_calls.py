# SPDX-License-Identifier: Apache-2.0
"""The calls that programs make which need a GPU or a NIC to run: those of LMDeploy's migration
backend of Mooncake (0.18), and of TensorRT-LLM's Python agent of NIXL, in their order and with
their arguments. Host memory stands for the GPU's, and no line of theirs runs here."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from nixl_agents import ended, messages, options
from te_far import pattern, wait_until

from sglang_mooncake.faces import mooncake_engine, nixl
from sglang_mooncake.sglang import drop_in
from sglang_mooncake.sglang.config import Config
from sglang_mooncake.sglang.drop_in import engine_options

HOST = "127.0.0.1"
LAYERS, NBYTES, BLOCK = 3, 1 << 16, 1 << 12


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How this process imports is as before after each test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [one for one in sys.modules if one.split(".")[0] in drop_in.NAMES]:
        del sys.modules[name]


def layers(seed: int | None) -> list[np.ndarray]:
    """A KV cache, a buffer for each layer."""
    if seed is None:
        return [np.zeros(NBYTES, np.uint8) for _ in range(LAYERS)]
    return [pattern(seed + at, NBYTES) for at in range(LAYERS)]


# --- LMDeploy ---


@dataclass
class Link:
    """One engine for each peer: `links[remote_engine_id]`. The device is named by its rank."""

    engine: Any
    device: str
    local: dict[str, dict[str, int]] = field(default_factory=dict)
    remote: dict[str, dict[str, int]] = field(default_factory=dict)
    url: str = ""

    def initialize(self) -> None:
        """And the port at once, which goes into the endpoint's information."""
        assert self.engine.initialize(HOST, "P2PHANDSHAKE", "rdma", self.device) == 0
        self.port = self.engine.get_rpc_port()

    def register(self, key: int, memory: np.ndarray) -> None:
        """Keys of memory regions are texts from then on."""
        assert self.engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
        self.local[str(key)] = {"addr": memory.ctypes.data, "length": memory.nbytes, "offset": 0}

    @property
    def endpoint(self) -> str:
        return json.dumps({"mr_info": self.local, "session_id": f"{HOST}:{self.port}"})

    def connect(self, endpoint: str) -> None:
        """Says nothing to the engine."""
        told = json.loads(endpoint)
        self.url, self.remote = told["session_id"], told["mr_info"]

    def migrate(self, key: int, source_offset: int, target_offset: int, nbytes: int) -> int:
        """One read after another; a result that is not 0 fails the request."""
        here = self.local[str(key)]["addr"] + source_offset
        there = self.remote[str(key)]["addr"] + target_offset
        result: int = self.engine.transfer_sync_read(self.url, here, there, nbytes)
        return result


@pytest.fixture
def links() -> tuple[Link, Link]:
    """Of a decode and of a prefill engine."""
    environment = {"SGLANG_MOONCAKE_TRANSPORTS": "tcp", "SGLANG_MOONCAKE_STALL_TIMEOUT_S": "60"}
    mooncake_engine.install(engine_options(Config.from_environment(environment)))
    module = importlib.import_module("mooncake.engine")
    decode, prefill = (Link(module.TransferEngine(), "erdma_0") for _ in range(2))
    for one in (decode, prefill):
        one.initialize()
    return decode, prefill


def test_lmdeploys_migration_reads_pages_of_every_layer(links) -> None:
    decode, prefill = links
    here, there = layers(None), layers(7)
    for key in range(LAYERS):
        decode.register(key, here[key])
        prefill.register(key, there[key])
    decode.connect(prefill.endpoint)
    prefill.connect(decode.endpoint)
    for key in range(LAYERS):
        for page, other in ((0, 9), (5, 2), (15, 15)):
            assert decode.migrate(key, page * BLOCK, other * BLOCK, BLOCK) == 0
    for mine, theirs in zip(here, there, strict=True):
        expected = np.zeros_like(mine)
        for page, other in ((0, 9), (5, 2), (15, 15)):
            expected[page * BLOCK :][:BLOCK] = theirs[other * BLOCK :][:BLOCK]
        np.testing.assert_array_equal(mine, expected)


def test_lmdeploys_migration_has_a_result_for_what_cannot_be_read(links) -> None:
    decode, prefill = links
    here, there = layers(None), layers(7)
    decode.register(0, here[0])
    prefill.register(0, there[0])
    decode.connect(prefill.endpoint)
    assert decode.migrate(0, 0, NBYTES - BLOCK + 1, BLOCK) != 0
    assert decode.migrate(0, 0, 0, BLOCK) == 0, "the next request is served"
    decode.remote["0"]["addr"] = here[1].ctypes.data  # of a region that the peer never registered
    assert decode.migrate(0, 0, 0, BLOCK) != 0
    np.testing.assert_array_equal(here[0][:BLOCK], there[0][:BLOCK])


def test_lmdeploy_registers_one_cache_with_the_engines_of_several_peers(links) -> None:
    """A decode engine has a link, with an engine of its own, to each prefill engine."""
    decode, prefill = links
    module = importlib.import_module("mooncake.engine")
    other, more = Link(module.TransferEngine(), "erdma_0"), Link(module.TransferEngine(), "erdma_1")
    here, first, second = layers(None), layers(7), layers(70)
    for one, memory in ((decode, here), (other, here), (prefill, first), (more, second)):
        if one in (other, more):
            one.initialize()
        one.register(0, memory[0])
    decode.connect(prefill.endpoint)
    other.connect(more.endpoint)
    assert decode.migrate(0, 0, 0, BLOCK) == other.migrate(0, BLOCK, 0, BLOCK) == 0
    np.testing.assert_array_equal(here[0][:BLOCK], first[0][:BLOCK])
    np.testing.assert_array_equal(here[0][BLOCK : 2 * BLOCK], second[0][:BLOCK])


# --- TensorRT-LLM ---


def first_of_nixls_packages() -> ModuleType:
    """In the order in which it looks for them."""
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise AssertionError("none can be imported")


class TransferAgent:
    """What it does with an agent. Nothing but this class holds the agent."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        module = first_of_nixls_packages()
        assert module.nixl_xfer_handle
        config = module.nixl_agent_config(
            enable_prog_thread=True, backends=["UCX"], num_threads=num_threads
        )
        self.agent = module.nixl_agent(name, config)

    def shutdown(self) -> None:
        self.agent = None

    def registration(self, memory: list[np.ndarray]) -> Any:
        """A list of its own for each call, of whole buffers with names."""
        rows = [(one.ctypes.data, one.nbytes, 0, f"kv {at}") for at, one in enumerate(memory)]
        found = self.agent.get_reg_descs(rows, "VRAM")
        assert found is not None
        return found

    def submit(self, op: str, here: list[tuple], there: list[tuple], name: str, said: str) -> Any:
        ours = self.agent.get_xfer_descs(here, "VRAM")
        theirs = self.agent.get_xfer_descs(there, "VRAM")
        assert ours is not None
        assert theirs is not None
        handle = self.agent.initialize_xfer(op, ours, theirs, name, said)
        assert self.agent.transfer(handle) != "ERROR"
        return handle


@pytest.fixture
def agents() -> Iterator[tuple[TransferAgent, TransferAgent]]:
    nixl.install(options(transports=("tcp",)))
    both = TransferAgent("context"), TransferAgent("generation", num_threads=2)
    yield both
    for one in both:
        one.shutdown()


def pages(memory: list[np.ndarray], *numbers: int) -> list[tuple[int, int, int]]:
    """Of every buffer."""
    return [(one.ctypes.data + at * BLOCK, BLOCK, 0) for one in memory for at in numbers]


@pytest.mark.parametrize("said", ["", "request 7 is there"])
def test_tensorrt_llms_agent_writes_pages_and_its_message(agents, said: str) -> None:
    context, generation = agents
    here, there = layers(7), layers(None)
    context.agent.register_memory(context.registration(here))
    generation.agent.register_memory(generation.registration(there))
    context.agent.add_remote_agent(generation.agent.get_agent_metadata())
    generation.agent.add_remote_agent(context.agent.get_agent_metadata())
    handle = context.submit(
        "WRITE", pages(here, 1, 2, 8), pages(there, 0, 5, 3), "generation", said
    )
    assert ended(context.agent, handle) == "DONE", "one of the four words that it knows"
    for mine, theirs in zip(here, there, strict=True):
        for source, target in ((1, 0), (2, 5), (8, 3)):
            np.testing.assert_array_equal(
                theirs[target * BLOCK :][:BLOCK], mine[source * BLOCK :][:BLOCK]
            )
    last = context.submit("WRITE", pages(here, 1), pages(there, 0), "generation", "last")
    assert ended(context.agent, last) == "DONE"
    expected = [one.encode() for one in (said, "last") if one]  # An empty one is none.
    assert messages(generation.agent, len(expected)) == {"context": expected}
    for one, memory in ((context, here), (generation, there)):
        one.agent.deregister_memory(one.registration(memory))
    context.agent.remove_remote_agent("generation")


def test_tensorrt_llms_agent_reads_and_meets_a_peer_again_under_its_name(agents) -> None:
    """`invalidate_remote_agent`, and another process with that name."""
    context, generation = agents
    here, there = layers(None), layers(7)
    context.agent.register_memory(context.registration(here))
    generation.agent.register_memory(generation.registration(there))
    context.agent.add_remote_agent(generation.agent.get_agent_metadata())
    handle = context.submit("READ", pages(here, 4), pages(there, 6), "generation", "")
    assert ended(context.agent, handle) == "DONE"
    generation.shutdown()
    context.agent.remove_remote_agent("generation")
    again, other = TransferAgent("generation"), layers(70)
    again.agent.register_memory(again.registration(other))
    context.agent.add_remote_agent(again.agent.get_agent_metadata())
    handle = context.submit("READ", pages(here, 5), pages(other, 6), "generation", "")
    assert ended(context.agent, handle) == "DONE"
    for mine, first, second in zip(here, there, other, strict=True):
        np.testing.assert_array_equal(mine[4 * BLOCK :][:BLOCK], first[6 * BLOCK :][:BLOCK])
        np.testing.assert_array_equal(mine[5 * BLOCK :][:BLOCK], second[6 * BLOCK :][:BLOCK])
    again.shutdown()


def test_a_transfer_that_failed_is_a_word_that_tensorrt_llm_does_not_know(agents) -> None:
    """`ERR`, as NVIDIA's: its enumeration has ERROR, so that it raises ValueError, and ends too."""
    context, generation = agents
    here, there = layers(None), layers(7)
    context.agent.register_memory(context.registration(here))
    generation.agent.register_memory(generation.registration(there))
    context.agent.add_remote_agent(generation.agent.get_agent_metadata())
    generation.agent.deregister_memory(generation.registration(there))
    handle = context.submit("READ", pages(here, 4), pages(there, 6), "generation", "")
    states: list[str] = []

    def is_over() -> bool:
        states.append(context.agent.check_xfer_state(handle))
        return states[-1] not in ("PENDING", "PROC")

    wait_until(is_over, "the transfer has ended")
    assert states[-1] == "ERR"
    assert not here[0].any()
