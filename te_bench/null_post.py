# SPDX-License-Identifier: Apache-2.0
"""What handing blocks to RDMA devices costs te itself: ``te bench --null-post``.

Two engines in this process, connected as over RDMA, whose devices take every work request and move
nothing (``te_bench._null``). All else is real: the checks, the division over the rails, the words
between the engines, the worker that builds the requests, completions, marks, the outcome.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

import te
from te.peers import Peer
from te.topology import ANYWHERE, Locality, Topology
from te.transports.base import Transport
from te.transports.rdma.transport import Rdma
from te.verbs import _core as verbs
from te.verbs.fabric import Fabric, Nic
from te_bench import machine
from te_bench._floors import post
from te_bench._null import Device, Wires
from te_bench.shapes import Plan, Shape, plan
from te_bench.system_calls import CountError, counted

__all__ = ["BAR_NS", "RAILS", "NullPost", "NullPostError", "measure", "null_fabric", "text"]

RAILS: Final = 4
CALLS: Final = 20
"""Calls of a round."""

COUNTED_CALLS: Final = 10
TIMEOUT_S: Final = 30.0
BAR_NS: Final = 40.0
IB_MTU_4096: Final = 5


class NullPostError(Exception):
    """Not every byte was handed over, or there was no outcome."""


@dataclass(frozen=True)
class Costs:
    """Costs of a round or, as medians, of all; in ns a block unless a field says otherwise."""

    #: Making ``te.Blocks`` from arrays of addresses.
    describe_ns: float
    #: ``peer.write``: checks, the division over the rails, asking the destination.
    submit_ns: float
    #: In the source's worker, from the first chain to the last: building work requests and handing
    #: them over, completions.
    post_ns: float
    #: All processor time of that worker: waking up and the words with the destination, too.
    worker_ns: float
    #: A bare C loop that builds as many requests and hands them over to nobody.
    floor_ns: float
    #: From before ``te.Blocks`` until ``wait`` has returned.
    total_ns: float
    #: Work requests for each block, with the marks.
    requests: float

    @property
    def own_ns(self) -> float:
        """What the bar is about."""
        return self.describe_ns + self.submit_ns + self.post_ns


@dataclass(frozen=True)
class NullPost(Costs):
    """What ``measure`` found."""

    shape: str
    blocks: int
    nbytes: int
    rails: int
    rounds: int
    #: Of all threads of the source, or why they were not counted.
    system_calls: float | None
    system_calls_problem: str
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"null_post": True, "transport": "rdma", **asdict(self), "own_ns": self.own_ns}


class _Engine(te.Engine):
    """An engine with devices that move nothing."""

    def __init__(self, wires: Wires, spin_s: float) -> None:
        self._wires = wires
        # One worker: the link's, whose time is measured.
        super().__init__(te.Config(transports=("rdma",), workers=1, spin_s=spin_s))

    def _transport(self, name: str) -> Transport:
        assert name == Rdma.name
        return Rdma(self._config, null_fabric(self._wires, RAILS))

    @property
    def worker_ids(self) -> tuple[int, int]:
        """The worker's clock of processor time, and its number for the kernel."""
        (worker,) = self._workers
        assert worker.ident is not None
        assert worker.native_id is not None
        return time.pthread_getcpuclockid(worker.ident), worker.native_id


def null_fabric(wires: Wires, nics: int, region_bytes_max: int = 1 << 62) -> Fabric:
    """Devices that move nothing, for an engine of this process."""
    found = tuple(_nic(i, wires, region_bytes_max) for i in range(nics))
    anywhere = Locality(tuple(nic.name for nic in found))
    return Fabric(found, Topology((), {ANYWHERE: anywhere}, gpus={}, far={}), (0,))


def _nic(index: int, wires: Wires, region_bytes_max: int) -> Nic:
    return Nic(
        index=index,
        name=f"null{index}",
        port=1,
        device=cast(verbs.Device, Device(wires)),
        family="ib",
        gids=(),
        lid=index + 1,
        mtu=IB_MTU_4096,
        max_message_bytes=1 << 30,
        max_region_bytes=region_bytes_max,
        netdev="",
        bytes_per_s=0.0,
    )


@dataclass(frozen=True)
class _Bench:
    source: _Engine
    peer: Peer
    wires: Wires
    plan: Plan
    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]

    def blocks(self) -> te.Blocks:
        return te.Blocks.of(self.src, self.dst, self.plan.shape.nbytes)


def measure(
    shape: Shape, rounds: int, seed: int, progress: Callable[[float, str], None]
) -> NullPost:
    """Raises ``NullPostError``, ``te.Error``."""
    about = machine.describe()
    with _bench(plan(shape, seed)) as bench:
        _round(bench)
        found = []
        for i in range(rounds):
            progress(i / rounds, f"round {i + 1}")
            found.append(_round(bench))
        calls, problem = _system_calls(bench)
    return NullPost(
        **{
            name: statistics.median(getattr(one, name) for one in found)
            for name in Costs.__dataclass_fields__
        },
        shape=shape.name,
        blocks=shape.blocks,
        nbytes=shape.nbytes,
        rails=RAILS,
        rounds=rounds,
        system_calls=calls,
        system_calls_problem=problem,
        machine=about,
    )


@contextlib.contextmanager
def _bench(laid_out: Plan) -> Iterator[_Bench]:
    wires = Wires()
    # The source's worker does not spin: what it uses of the processor is work. The destination's
    # does, as always, and so is rarely asleep when a mark comes.
    with _Engine(wires, spin_s=50e-6) as target, _Engine(wires, spin_s=2e-6) as source:
        near, far = (np.empty(laid_out.memory_nbytes, np.uint8) for _ in range(2))
        source.register(near, remote="none")
        target.register(far, remote="read-write")  # The writes have no tag.
        peer = source.connect(target.card())
        if peer.rails != RAILS:
            raise NullPostError(f"{peer.rails} rails instead of {RAILS}")
        yield _Bench(
            source=source,
            peer=peer,
            wires=wires,
            plan=laid_out,
            src=laid_out.addresses(near.ctypes.data, laid_out.source),
            dst=laid_out.addresses(far.ctypes.data, laid_out.destination),
        )


def _round(bench: _Bench) -> Costs:
    clock, _ = bench.source.worker_ids
    shape = bench.plan.shape
    spent: list[tuple[float, ...]] = []
    cpu_before = time.clock_gettime_ns(clock)
    for _ in range(CALLS):
        bench.wires.expect(shape.total_nbytes)
        begun = time.perf_counter_ns()
        blocks = bench.blocks()
        made = time.perf_counter_ns()
        transfer = bench.peer.write(blocks)
        submitted = time.perf_counter_ns()
        _await(transfer)
        ended = time.perf_counter_ns()
        requests, nbytes, first, post_ns = bench.wires.posted()
        if nbytes != shape.total_nbytes:
            raise NullPostError(f"{nbytes} bytes handed over, not {shape.total_nbytes}")
        # The first call's requests were built before the time began.
        post_all_ns = post_ns * requests / max(requests - first, 1)
        spent.append((made - begun, submitted - made, post_all_ns, ended - begun, requests))
    cpu_ns = (time.clock_gettime_ns(clock) - cpu_before) / CALLS
    bounds = np.linspace(0, shape.blocks, RAILS + 1).astype(np.int64)
    floor_ns = statistics.median(post(bench.blocks().array, bounds) for _ in range(CALLS))
    describe, submit, posting, total, requests_of_all = (
        statistics.median(column) / shape.blocks for column in zip(*spent, strict=True)
    )
    return Costs(
        describe_ns=describe,
        submit_ns=submit,
        post_ns=posting,
        worker_ns=cpu_ns / shape.blocks,
        floor_ns=floor_ns / shape.blocks,
        total_ns=total,
        requests=requests_of_all,
    )


def _await(transfer: te.Transfer) -> None:
    if not transfer.wait(TIMEOUT_S):
        raise NullPostError(f"no outcome within {TIMEOUT_S} s")


def _system_calls(bench: _Bench) -> tuple[float | None, str]:
    """For each block, of the threads that work for the source: the caller's and the worker."""
    _, worker = bench.source.worker_ids
    try:
        with counted((threading.get_native_id(), worker)) as found:
            for _ in range(COUNTED_CALLS):
                _await(bench.peer.write(bench.blocks()))
    except CountError as exc:
        return None, str(exc)
    return found.calls / COUNTED_CALLS / bench.plan.shape.blocks, ""


def text(result: NullPost) -> str:
    """A table, and how te stands to the bar."""
    rows = [
        ("te.Blocks", result.describe_ns),
        ("peer.write: checks, division over the rails", result.submit_ns),
        ("worker: work requests built and handed over", result.post_ns),
        ("all of these", result.own_ns),
        ("a bare C loop that builds and hands over", result.floor_ns),
        ("the worker's processor time, with its waking up", result.worker_ns),
        ("from te.Blocks to the outcome, with the words between the engines", result.total_ns),
    ]
    width = max(len(what) for what, _ in rows)
    calls = "not counted: " + result.system_calls_problem
    if result.system_calls is not None:
        calls = f"{result.system_calls:.4f}"
    verdict = "reached" if result.own_ns <= BAR_NS else "NOT reached"
    how = f"{result.blocks} × {result.nbytes:,} B over {result.rails} rails"
    lines = [
        f"{result.shape}, rdma, null post: {how}; {result.rounds} rounds of {CALLS}; ns a block",
        *(f"  {what.ljust(width)}  {value:7.1f}" for what, value in rows),
        f"  work requests a block: {result.requests:.3f}",
        f"  system calls a block: {calls}",
        f"  bar: all of these ≤ {BAR_NS:g} ns: {result.own_ns:.1f}, {verdict}",
    ]
    return "\n".join(lines) + "\n"
