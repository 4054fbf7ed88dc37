# SPDX-License-Identifier: Apache-2.0
"""A prefill rank and a decode rank without SGLang: real engines, sockets and registry, pools of
numpy memory filled from an oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

import te
from bootstrap_server import (
    BootstrapServer,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankLease,
    RankRecord,
    Topology,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.context import Deadlines, RankContext, Role
from sglang_mooncake.decode_side import CompletionBuffer, DecodeSide
from sglang_mooncake.explain.questions import answers
from sglang_mooncake.layout import Buffers, Component, Layout, Units, Verify
from sglang_mooncake.messages import PROTOCOL_VERSION
from sglang_mooncake.prefill_side import PrefillSide
from sglang_mooncake.rank_report import RankReport
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.prefill_events import StreamEvent
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config
from sglang_mooncake.stats import Recorder
from te.config import TRANSPORTS
from te.memory import Remote

HOST = "127.0.0.1"
PAGES, PAGE_SIZE, PAGE_BYTES, LAYERS = 64, 4, 512, 3
AUX_SLOTS, AUX_BYTES = 16, 64
CANARY = 0xEE
ALONE, FIRST = Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)
WAIT_S = 60.0
#: For deadlines that must not pass: a loaded machine stops any thread for seconds.
NEVER_S = 1_000.0
#: Nobody is lost because he is silent.
PATIENT = Deadlines(heartbeat_failures_max=10_000_000)
NO_KEYS = Keys()


def until(condition: Callable[[], object], what: str) -> None:
    """Waits for a condition, with a deadline that only a hang reaches."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.002)


class Memory(Protocol):
    """What a rank registers, and how it describes it."""

    def ranges(self) -> list[tuple[int, int]]: ...
    def layout(self, completions: Buffers) -> Layout: ...


class Pool:
    """KV and metadata memory of numpy: random bytes from a seed, or the canary everywhere."""

    def __init__(self, seed: int | None = None, page_size: int = PAGE_SIZE) -> None:
        self.page_size = page_size
        self.kv = self._filled((LAYERS, PAGES, PAGE_BYTES), seed)
        self.aux = self._filled((AUX_SLOTS, AUX_BYTES), seed)

    def ranges(self) -> list[tuple[int, int]]:
        return [(memory.ctypes.data, memory.nbytes) for memory in (self.kv, self.aux)]

    def layout(self, completions: Buffers) -> Layout:
        base, layer_bytes = self.kv.ctypes.data, PAGES * PAGE_BYTES
        return Layout(
            page_size=self.page_size,
            dtype="float32",
            kv_layout=None,
            components=(
                Component(
                    "latent",
                    layers=tuple(range(LAYERS)),
                    buffers=Buffers(
                        tuple(base + layer * layer_bytes for layer in range(LAYERS)),
                        (PAGE_BYTES,) * LAYERS,
                        (layer_bytes,) * LAYERS,
                    ),
                    cuts=(Units(1, PAGE_BYTES),),
                ),
            ),
            aux=Buffers((self.aux.ctypes.data,), (AUX_BYTES,), (self.aux.nbytes,)),
            completions=completions,
        )

    @staticmethod
    def _filled(shape: tuple[int, ...], seed: int | None) -> npt.NDArray[np.uint8]:
        if seed is None:
            return np.full(shape, CANARY, np.uint8)
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def make_context(
    role: Role,
    address: str,
    deadlines: Deadlines,
    page_size: int = PAGE_SIZE,
    topology: Topology = ALONE,
    coords: RankCoords = FIRST,
    keys: Keys = NO_KEYS,
    verify: Verify = Verify.ALL,
    **config: Any,
) -> RankContext:
    """`config`: further fields of the instance's. `verify`: false alarms of digests would show in
    every test that hands something over."""
    return RankContext(
        role=role,
        coords=coords,
        config=InstanceConfig(
            topology, KVFormat(page_size, "float32"), protocol=PROTOCOL_VERSION, **config
        ),
        host=HOST,
        bootstrap_address=address,
        prefill_http_port=None,
        register_dp_rank=False,
        deadlines=deadlines,
        keys=keys,
        verify=verify,
    )


class PrefillRank:
    def __init__(self, context: RankContext, config: Config, memory: Memory) -> None:
        self.memory = memory  # which is written and read for as long as the rank lives
        self.engine = _engine(memory, config, context.keys, "none")
        with _closed_if_it_fails(self.engine):
            self._open(context, config)

    def _open(self, context: RankContext, config: Config) -> None:
        layout = self.memory.layout(Buffers((), (), ()))
        self.recorder = Recorder(context, {}, self.engine.stats, config.stats_dir)
        self.engine.add_answers(answers(self.recorder, context))
        self.side = PrefillSide(context, self.engine, layout, self.recorder)
        self.report = RankReport(
            self.engine.stats,
            self.engine.links,
            self.side.decode_peers,
            self.recorder.rooms,
            self.recorder.failures.last,
        )
        self.port = self.side.start()
        rank = Rank(
            context.coords,
            HOST,
            self.port,
            self.engine.epoch,
            control_key=self.side.control_key,
        )
        self.lease = RankLease(
            context.bootstrap_address,
            signed(RankRecord(context.config, rank), context.keys.record),
            deadline_s=WAIT_S,
            keys=context.keys.registry,
            status=self.report,
        )

    def send(
        self,
        room: Room,
        pages: list[int],
        first: int,
        aux_slot: int | None,
        events: Sequence[StreamEvent] = (),
    ) -> None:
        """One chunk, and the poll that SGLang's scheduler makes after it."""
        chunk = Chunk(np.array(pages, np.int64), first, aux_slot, time.monotonic())
        self.side.send_chunk(room, chunk, events)
        self.side.polled(room, sent=aux_slot is not None)

    def close(self) -> None:
        self.lease.close()
        self.side.close()
        self.engine.close()


class DecodeRank:
    def __init__(self, context: RankContext, config: Config, memory: Memory) -> None:
        self.memory = memory  # which is written and read for as long as the rank lives
        self.engine = _engine(memory, config, context.keys, "tagged")
        with _closed_if_it_fails(self.engine):
            self._open(context, config)

    def _open(self, context: RankContext, config: Config) -> None:
        self.completions = CompletionBuffer(self.engine)
        layout = self.memory.layout(self.completions.buffers)
        self.recorder = Recorder(context, {}, self.engine.stats, config.stats_dir)
        self.engine.add_answers(answers(self.recorder, context))
        self.side = DecodeSide(
            context,
            self.engine,
            layout,
            self.completions,
            self.recorder,
            config.registries,
            config.link_timeout_s,
        )
        self.side.start()

    def know(self, address: str) -> None:
        until(lambda: self.side.instances.ensure(address), "the instance is known")

    def close(self) -> None:
        self.side.close()
        self.engine.close()


@contextmanager
def _closed_if_it_fails(engine: te.Engine) -> Iterator[None]:
    """One that stayed open would answer later tests for a rank of theirs."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def _engine(memory: Memory, config: Config, keys: Keys, remote: Remote) -> te.Engine:
    transports = config.transports or TRANSPORTS
    engine = te.Engine(
        te.Config(
            host=HOST,
            connect_timeout_s=config.stall_timeout_s,  # by default these are the same
            stall_timeout_s=config.stall_timeout_s,
            transports=transports,
            keys=keys.data,
            encrypt=config.encrypt,
        )
    )
    for address, nbytes in memory.ranges():
        engine.register(address, nbytes, remote=remote)
    return engine


def patient(config: Config) -> Config:
    """With deadlines that do not pass."""
    return replace(config, link_timeout_s=NEVER_S, stall_timeout_s=NEVER_S)


@dataclass
class Handover:
    address: str
    prefill: PrefillRank
    decode: DecodeRank
    source: Memory
    target: Memory

    def open_both(self, room: int) -> tuple[Room, Room]:
        """A room on both sides, with the data path up."""
        source = self.prefill.side.open_room(room, register_dp_rank=False)
        target = self.decode.side.new_room(room)
        self.decode.side.choose_sources(target, self.address, 0)
        until(lambda: target.view.state is RoomState.READY, "the decode room is ready")
        return source, target

    def name_pages(self, room: Room, pages: list[int], aux: int, prefix: int = 0) -> None:
        self.decode.side.name_pages(room, np.array(pages), aux, prefix)

    def complete(self, room: int, sources: list[int], targets: list[int], aux: int) -> None:
        """One whole hand-over, in one chunk; metadata goes from slot aux to slot aux."""
        source, target = self.open_both(room)
        self.name_pages(target, targets, aux)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        self.prefill.send(source, sources, 0, aux)
        until(lambda: self.decode.side.has_arrived(target), "the room has arrived")


@contextmanager
def handover(
    prefill_config: Config | None = None,
    deadlines: Deadlines | None = None,
    source: Memory | None = None,
    target: Memory | None = None,
    decode_page_size: int = PAGE_SIZE,
    policy: str = "early",
    keys: Keys = NO_KEYS,
    decode_keys: Keys | None = None,
    decode_config: Config | None = None,
    prefill_facts: Mapping[str, Any] | None = None,
    decode_facts: Mapping[str, Any] | None = None,
    verify: tuple[Verify, Verify] = (Verify.ALL, Verify.ALL),
    verify_dir: Path | None = None,
    source_verify_dir: Path | None = None,
) -> Iterator[Handover]:
    """One prefill and one decode rank around a registry; all of it is gone afterwards. `keys` are
    those of all three, unless the decode rank has its own. `prefill_facts`, `decode_facts`: what
    their instances' configurations say otherwise. `verify`: of the prefill and of the decode rank.
    `source_verify_dir`, `verify_dir`: the same.
    """
    deadlines = deadlines or PATIENT
    source = source or Pool(seed=1)
    target = target or Pool(page_size=decode_page_size)
    server = BootstrapServer(host=HOST, port=0, lease_s=NEVER_S, keys=keys.registry)
    address = f"{HOST}:{server.port}"
    alike: dict[str, Any] = {"decode_allocation_policy": policy}
    here = make_context("prefill", address, deadlines, keys=keys, verify=verify[0], **alike)
    here_config = structs.replace(here.config, **(prefill_facts or {}))
    here = replace(here, config=here_config, verify_dir=source_verify_dir)
    decode_keys = keys if decode_keys is None else decode_keys
    there = make_context(
        "decode", "", deadlines, decode_page_size, keys=decode_keys, verify=verify[1], **alike
    )
    there_config = structs.replace(there.config, **(decode_facts or {}))
    there = replace(there, config=there_config, verify_dir=verify_dir)
    with ExitStack() as open_:
        open_.callback(server.close)
        prefill = PrefillRank(here, patient(prefill_config or Config()), source)
        open_.callback(prefill.close)
        decode = DecodeRank(there, patient(decode_config or Config()), target)
        open_.callback(decode.close)
        yield Handover(address, prefill, decode, source, target)
