# SPDX-License-Identifier: Apache-2.0
"""Processes of one host that map each other's GPU memory, on a driver without a GPU."""

from __future__ import annotations

import base64
import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_cuda import GRANULARITY, CudaMemory, StandIn, cuda
from te_far import pattern, wait_until
from te_far_gpu import FarGpu, allocate, is_shared

import te
from te.memory import _say_not_mapped
from te.memory_kinds import kind_of
from te.memory_kinds.cuda import handles

TIMEOUT_S = 60.0
TAG = 0x1BC
PAGE = 4096
NBYTES = 2 * GRANULARITY
#: A thread, or the other process, may stand still for seconds.
PATIENT: Final[dict[str, Any]] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
COPIES = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", "cuMemcpyAsync")


@contextlib.contextmanager
def far_gpu(**config: object) -> Iterator[FarGpu]:
    far = FarGpu(transports=["samehost"], **(PATIENT | config))
    try:
        yield far
    finally:
        far.end()


@contextlib.contextmanager
def near_gpu(**config: object) -> Iterator[tuple[StandIn, te.Engine, CudaMemory]]:
    """This process has the destination."""
    with cuda() as driver:
        memory = driver.allocate(NBYTES)
        changed = te.Config(transports=("samehost",), segment_bytes=1 << 20, **(PATIENT | config))  # type: ignore[arg-type]
        with te.Engine(changed) as engine:
            engine.register(memory.address, NBYTES)
            engine.expect(TAG)
            driver.forget_calls()
            yield driver, engine, memory
        driver.free(memory)


def copies_of(driver: StandIn) -> int:
    return sum(driver.calls(name=one) for one in COPIES)


def connect(far: FarGpu, engine: te.Engine, *addresses: int) -> str:
    """The far source's peer, which has mapped this memory of the source."""
    peer = str(far.connect(card=base64.b64encode(engine.card()).decode()))
    for address in addresses:
        wait_until(lambda address=address: far.is_shared(address=address), "it is mapped")
    return peer


def pages(generator: np.random.Generator) -> list[int]:
    """Of a region, in any order."""
    return [int(one) * PAGE for one in generator.permutation(NBYTES // PAGE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "opens", "closes", "count"),
    [
        ("block", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle", 1),
        ("pieces", "cuMemImportFromShareableHandle", "cuMemUnmap", 2),
    ],
)
@pytest.mark.parametrize("ordinal", [0, 1])
def test_the_destinations_gpu_copies_out_of_the_sources_memory(
    how: str, opens: str, closes: str, count: int, ordinal: int
) -> None:
    generator = np.random.default_rng(7)
    with near_gpu() as (driver, engine, here), far_gpu() as far:
        there = far.allocate(how=how, nbytes=NBYTES, seed=3, ordinal=ordinal)
        peer = connect(far, engine, there)
        assert driver.calls(name=opens) == count
        srcs, dsts = pages(generator), pages(generator)
        number = far.write(
            peer=peer,
            src=[there + one for one in srcs],
            dst=[here.address + one for one in dsts],
            nbytes=PAGE,
            tag=TAG,
        )
        assert far.outcome(number=number) == ["done", None]
        assert engine.arrived(TAG) == 1
        data = pattern(3, NBYTES)
        for src, dst in zip(srcs, dsts, strict=True):
            assert (here.view[dst : dst + PAGE] == data[src : src + PAGE]).all()
        assert copies_of(driver) > 0
        assert all(
            far.calls(name=one) == 0 for one in COPIES
        )  # The source's GPU had nothing to do.
        far.deregister(address=there)
        assert driver.calls(name=closes) == count
        if how == "block" and ordinal == 0:
            assert far.free(address=there) == 0


@pytest.mark.slow
def test_a_part_of_an_expandable_segment_at_an_odd_place() -> None:
    with near_gpu() as (driver, engine, here), far_gpu() as far:
        whole = far.allocate(how="pieces", nbytes=3 * GRANULARITY, seed=4)
        start = GRANULARITY - 12_345
        there = far.part(address=whole + start, nbytes=NBYTES)
        peer = connect(far, engine, there)
        assert driver.calls(name="cuMemMap") == 3
        number = far.write(peer=peer, src=there, dst=here.address, nbytes=NBYTES, tag=TAG)
        assert far.outcome(number=number) == ["done", None]
        assert (here.view == pattern(4, 3 * GRANULARITY)[start : start + NBYTES]).all()


def exported_files() -> int:
    """Descriptors of this process that the stand-in has of virtual memory, or gave out."""
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of this listing
            count += "virtual memory" in str(one.readlink())
    return count


@pytest.mark.slow
def test_a_region_of_more_pieces_than_a_message_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "_PIECES_MAX", 2)
    nbytes = 5 * GRANULARITY
    with cuda() as driver, far_gpu() as far:
        memory = allocate(driver, "pieces", nbytes)
        data = pattern(5, nbytes)
        for at in range(0, nbytes, GRANULARITY):
            driver.memory(memory.address + at, GRANULARITY).view[:] = data[at : at + GRANULARITY]
        there = far.allocate(how="block", nbytes=nbytes, seed=0)
        far.expect(tag=TAG)
        before = exported_files()
        with te.Engine(te.Config(transports=("samehost",), **PATIENT)) as engine:
            region = engine.register(memory.address, nbytes)
            peer = engine.connect(far.bytes_card())
            wait_until(lambda: is_shared(engine, region), "it is mapped")
            assert far.calls(name="cuMemMap") == 5
            transfer = peer.write(te.Blocks.of(memory.address, there, nbytes), tag=TAG)
            assert transfer.wait(TIMEOUT_S) is te.Status.DONE
            assert copies_of(driver) == 0
            assert bytes(far.bytes_of(address=there, nbytes=PAGE)) == data[:PAGE].tobytes()
            last = there + nbytes - PAGE
            assert bytes(far.bytes_of(address=last, nbytes=PAGE)) == data[-PAGE:].tobytes()
            engine.deregister(region)
            assert far.calls(name="cuMemUnmap") == 5
        assert exported_files() == before


@pytest.mark.slow
def test_what_cannot_be_mapped_is_staged_and_why_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with cuda() as driver, far_gpu() as far:
        memory = [allocate(driver, "private", NBYTES), driver.allocate(NBYTES)]
        there = far.allocate(how="block", nbytes=NBYTES, seed=0)
        far.expect(tag=TAG)
        far.fail(name="cuIpcOpenMemHandle", error=217)
        with te.Engine(te.Config(transports=("samehost",), **PATIENT)) as engine:
            for one in memory:
                one.view[:PAGE] = 9
                engine.register(one.address, NBYTES)
            with caplog.at_level(logging.WARNING):
                peer = engine.connect(far.bytes_card())
                wait_until(lambda: "UNSUPPORTED" in caplog.text, "why it is not mapped is said")
            assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in caplog.text
            for one in memory:
                blocks = te.Blocks.of(one.address, there, PAGE)
                assert peer.write(blocks, tag=TAG).wait(TIMEOUT_S) is te.Status.DONE
                assert far.bytes_of(address=there, nbytes=PAGE) == [9] * PAGE
            assert copies_of(driver) > 0
    # The memory of the process ends with it: what is mapped privately is not freed one by one.


@pytest.mark.slow
def test_memory_of_gpus_and_of_hosts_in_one_transfer_whatever_goes_where() -> None:
    """Also from a GPU to host memory, which the destination's GPU copies into a slot first."""
    generator = np.random.default_rng(11)
    with near_gpu() as (driver, engine, here), far_gpu() as far:
        host = np.zeros(NBYTES, np.uint8)
        engine.register(host)
        sources = [
            (far.allocate(how="block", nbytes=NBYTES, seed=21), pattern(21, NBYTES)),
            (far.allocate(how="pieces", nbytes=NBYTES, seed=22), pattern(22, NBYTES)),
            (far.register(nbytes=NBYTES, seed=23), pattern(23, NBYTES)),
        ]
        targets = [(here.address, here.view), (host.ctypes.data, host)]
        peer = connect(far, engine, *(one for one, _ in sources[:2]))
        src, dst, expected = [], [], []
        sizes = []
        for number, at in enumerate(range(0, NBYTES, 3 * PAGE)):
            size = min([700, PAGE, 3 * PAGE][number % 3], NBYTES - at)
            address, data = sources[int(generator.integers(len(sources)))]
            target, view = targets[int(generator.integers(2))]
            src.append(address + at)
            dst.append(target + at)
            sizes.append(size)
            expected.append((view[at : at + size], data[at : at + size]))
        number = far.write(peer=peer, src=src, dst=dst, nbytes=sizes, tag=TAG)
        assert far.outcome(number=number) == ["done", None]
        for found, wanted in expected:
            assert (found == wanted).all()
        assert all(far.calls(name=one) == 0 for one in COPIES)
        assert driver.count("pageable_copies") == 0


@pytest.mark.slow
def test_a_fence_waits_for_a_copy_out_of_another_processs_memory() -> None:
    with near_gpu() as (driver, engine, here), far_gpu() as far:
        there = far.allocate(how="block", nbytes=NBYTES, seed=5)
        peer = connect(far, engine, there)
        with driver.stuck():
            number = far.write(peer=peer, src=there, dst=here.address, nbytes=NBYTES, tag=TAG)
            wait_until(lambda: driver.calls(name="cuEventRecord"), "a copy is under way")
            with pytest.raises(te.FenceTimeout):
                engine.fence(TAG, 0.05)
        assert engine.fence(TAG, TIMEOUT_S) == 0
        before = here.view.copy()
        state, reason = far.outcome(number=number)
        assert state == "failed"
        assert "fenced" in str(reason)
        assert (here.view == before).all()


@pytest.mark.slow
def test_a_source_that_is_killed_in_the_middle_counts_for_nothing() -> None:
    with near_gpu() as (driver, engine, here), far_gpu() as far:
        there = far.allocate(how="block", nbytes=NBYTES, seed=5)
        peer = connect(far, engine, there)
        with driver.stuck():
            far.write(peer=peer, src=there, dst=here.address, nbytes=NBYTES, tag=TAG)
            wait_until(lambda: driver.calls(name="cuEventRecord"), "a copy is under way")
            far.signal(signal.SIGKILL)
            far.process.wait()
            wait_until(lambda: not _lives(engine), "the link dies with its process")
            assert driver.calls(name="cuIpcCloseMemHandle") == 0  # A copy still reads there.
        wait_until(lambda: driver.calls(name="cuIpcCloseMemHandle") == 1, "it is unmapped")
        assert engine.arrived(TAG) == 0
        assert engine.fence(TAG, TIMEOUT_S) == 0


def _lives(engine: te.Engine) -> bool:
    return any(link.handle.alive for link in engine._acceptor._links)


@pytest.mark.slow
def test_a_frozen_peer_that_has_memory_mapped_is_reported_and_holds_nothing_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with cuda() as driver, far_gpu() as far:
        memory = driver.allocate(NBYTES)
        far.allocate(how="block", nbytes=NBYTES, seed=0)
        with te.Engine(te.Config(transports=("samehost",), connect_timeout_s=0.5)) as engine:
            region = engine.register(memory.address, NBYTES)
            peer = engine.connect(far.bytes_card(), TIMEOUT_S)
            wait_until(lambda: is_shared(engine, region), "it is mapped")
            assert far.calls(name="cuIpcOpenMemHandle") == 1
            far.signal(signal.SIGSTOP)
            with caplog.at_level(logging.WARNING):
                engine.deregister(region)
            assert "does not unmap" in caplog.text
            assert not peer.alive
            far.signal(signal.SIGCONT)
        wait_until(lambda: far.calls(name="cuIpcCloseMemHandle") == 1, "it unmaps it after all")
        driver.free(memory)


@pytest.mark.slow
def test_memory_that_is_registered_again_is_mapped_again() -> None:
    """SGLang's release_memory_occupation and resume: the same addresses, other memory."""
    with cuda() as driver, far_gpu() as far:
        there = far.allocate(how="block", nbytes=NBYTES, seed=0)
        far.expect(tag=TAG)
        address = driver.reserve(NBYTES)
        with te.Engine(te.Config(transports=("samehost",), **PATIENT)) as engine:
            for turn in (1, 2, 3):
                for at in range(0, NBYTES, GRANULARITY):
                    driver.map(address + at, GRANULARITY, 1)
                    driver.memory(address + at, GRANULARITY).view[:] = turn
                region = engine.register(address, NBYTES)
                peer = engine.connect(far.bytes_card())
                wait_until(lambda region=region: is_shared(engine, region), "it is mapped")
                transfer = peer.write(te.Blocks.of(address, there, NBYTES), tag=TAG)
                assert transfer.wait(TIMEOUT_S) is te.Status.DONE
                assert far.bytes_of(address=there, nbytes=16) == [turn] * 16
                assert copies_of(driver) == 0
                engine.deregister(region)
                assert far.calls(name="cuMemUnmap") == 2 * turn
                for at in range(0, NBYTES, GRANULARITY):
                    driver.unmap(address + at, GRANULARITY)


# -- what a peer may say


def refused(_: int) -> int:
    raise OSError("no descriptor is to be taken")


@given(handle=st.binary(max_size=200))
def test_a_handle_that_is_none_is_refused(handle: bytes) -> None:
    with pytest.raises((ValueError, OSError)):
        handles.map_exported(None, handle, PAGE, refused)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_block_that_is_shorter_than_is_said_is_refused() -> None:
    with near_gpu() as (driver, engine, here), far_gpu() as far:
        there = far.allocate(how="block", nbytes=PAGE, seed=1)
        connect(far, engine, there)
        kind = kind_of(here.address)
        (handle,) = far.handles()
        calls = driver.calls(name="cuIpcCloseMemHandle")
        with pytest.raises(OSError, match="CUDA_ERROR_INVALID_VALUE"):
            kind.map(base64.b64decode(handle), 2 * PAGE, refused)
        assert driver.calls(name="cuIpcCloseMemHandle") == calls + 1


def pieces_of(fds: list[int], sizes: list[int], offset: int) -> bytes:
    return handles._encode(handles._Pieces(fds, sizes, offset))


@pytest.mark.parametrize(
    ("sizes", "offset"),
    [
        ([GRANULARITY] * 3, 0),  # The last two have nothing of it.
        ([GRANULARITY] * 2, GRANULARITY),  # The first has nothing of it.
        ([GRANULARITY], GRANULARITY - 1),  # It ends behind the only one.
    ],
)
def test_pieces_that_the_range_does_not_touch_are_refused(sizes: list[int], offset: int) -> None:
    """A message of a few bytes must not take any number of addresses."""
    handle = pieces_of([1] * len(sizes), sizes, offset)
    with pytest.raises(ValueError, match="pieces of"):
        handles.map_exported(None, handle, 2, refused)  # type: ignore[arg-type]


def test_memory_that_cannot_be_exported_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_not_mapped.cache_clear()
    with cuda() as driver, te.Engine() as engine:
        memory = allocate(driver, "private", NBYTES)
        for at in range(0, NBYTES, NBYTES // 4):
            engine.register(memory.address + at, NBYTES // 4)
    assert caplog.text.count("cannot map CUDA memory of cuda:0, which is staged") == 1
