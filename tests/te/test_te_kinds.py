# SPDX-License-Identifier: Apache-2.0
"""The contract of a kind of memory, over all kinds that copy here; and how te is told of one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from te_compiled import function
from te_cuda import cuda
from te_sealed import capsule, sealed
from te_staging import HOST_KIND, Copy, KindStruct, struct_of

import te
from te.core import kinds
from te.memory_kinds import HOST, RECOGNISERS, MemoryKind, kind_of

NBYTES = 1 << 20
TO_HOST, FROM_HOST = 0, 1


@dataclass
class Case:
    """A kind with some of its memory, and host memory that it has pinned."""

    kind: MemoryKind
    struct: int
    address: int
    #: The kind's memory as the test sees it.
    view: np.ndarray[Any, Any]
    host: np.ndarray[Any, Any]

    @property
    def ops(self) -> Any:
        return KindStruct.from_address(self.struct).ops.contents

    def copy(self, pieces: list[tuple[int, int, int]], direction: int) -> int | None:
        """Of (offset in host memory, offset in the kind's, bytes); the event."""
        host, there = self.host.ctypes.data, self.address
        copies = (Copy * len(pieces))()
        for one, (near, far, nbytes) in zip(copies, pieces, strict=True):
            ends = (host + near, there + far)
            one.dst, one.src = ends if direction == TO_HOST else ends[::-1]
            one.nbytes = nbytes
        event = ctypes.c_void_p()
        state = KindStruct.from_address(self.struct).state
        assert self.ops.copy(state, ctypes.addressof(copies), len(pieces), direction, event) == 0
        # The array is the caller's again.
        ctypes.memset(copies, 0, ctypes.sizeof(copies))
        return event.value

    def settle(self, event: int | None) -> int:
        """Polls until it is over, and releases it."""
        state = KindStruct.from_address(self.struct).state
        while (answer := int(self.ops.query(state, event))) == errno.EAGAIN:
            os.sched_yield()
        self.ops.release(state, event)
        return answer


@contextlib.contextmanager
def host_case() -> Iterator[Case]:
    memory = np.zeros(NBYTES, np.uint8)
    yield Case(HOST, HOST_KIND, memory.ctypes.data, memory, np.zeros(NBYTES, np.uint8))


@contextlib.contextmanager
def sealed_case() -> Iterator[Case]:
    with sealed() as kind:
        memory, host = kind.allocate(NBYTES), np.zeros(NBYTES, np.uint8)
        unpin = kind.pin(host.ctypes.data, NBYTES)
        yield Case(kind, kind.struct, memory.address, memory.view, host)
        unpin()


@contextlib.contextmanager
def cuda_case(version: int = 13000) -> Iterator[Case]:
    with cuda(version=version) as driver:
        memory, host = driver.allocate(NBYTES), np.zeros(NBYTES, np.uint8)
        kind = kind_of(memory.address)
        unpin = kind.pin(host.ctypes.data, NBYTES)
        yield Case(kind, struct_of(kind.compiled), memory.address, memory.view, host)
        unpin()
        driver.free(memory)


CASES = pytest.mark.parametrize("case", [host_case, sealed_case, cuda_case])
MakeCase = Callable[[], contextlib.AbstractContextManager[Case]]


def scattered(generator: random.Random, start: int, end: int) -> list[tuple[int, int, int]]:
    """Pieces without overlap on either side, in any order, within a part of both memories."""
    sizes = []
    while sum(sizes) < (end - start) // 2:
        sizes.append(generator.choice([1, 7, 256, 4096, 30_000]))
    nears, fars = list(sizes), list(sizes)
    places: list[dict[int, int]] = []
    for order in (nears, fars):
        indices = list(range(len(order)))
        generator.shuffle(indices)
        at, found = start, {}
        for i in indices:
            found[i] = at
            at += sizes[i]
        places.append(found)
    return [(places[0][i], places[1][i], size) for i, size in enumerate(sizes) if size]


@pytest.mark.slow
@CASES
@pytest.mark.parametrize("direction", [TO_HOST, FROM_HOST])
def test_a_batch_is_copied_when_its_event_says_so(case: MakeCase, direction: int) -> None:
    generator = random.Random(7)
    with case() as here:
        src, dst = (here.view, here.host) if direction == TO_HOST else (here.host, here.view)
        src[:] = np.frombuffer(generator.randbytes(NBYTES), np.uint8)
        expected = np.zeros(NBYTES, np.uint8)
        events = []
        for i in range(8):
            pieces = scattered(generator, i * NBYTES // 8, (i + 1) * NBYTES // 8)
            for near, far, nbytes in pieces:
                at, to = (far, near) if direction == TO_HOST else (near, far)
                expected[to : to + nbytes] = src[at : at + nbytes]
            events.append(here.copy(pieces, direction))
        assert [here.settle(event) for event in reversed(events)] == [0] * 8
        assert (dst == expected).all()


@CASES
def test_many_threads_copy_at_once(case: MakeCase) -> None:
    threads_n, rounds = 4, 20
    part = NBYTES // threads_n
    with case() as here:
        here.view[:] = np.arange(NBYTES, dtype=np.uint64).astype(np.uint8)
        bad = []

        def work(number: int) -> None:
            generator = random.Random(number)
            for _ in range(rounds):
                start = number * part + generator.randrange(part - 4096)
                here.host[start : start + 4096] = 0
                if here.settle(here.copy([(start, start, 4096)], TO_HOST)) != 0:
                    bad.append(start)
                if (here.host[start : start + 4096] != here.view[start : start + 4096]).any():
                    bad.append(start)

        threads = [threading.Thread(target=work, args=[i]) for i in range(threads_n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bad == []


@CASES
def test_the_reach_of_both_halves_is_the_same(case: MakeCase) -> None:
    with case() as here:
        assert KindStruct.from_address(here.struct).touched_by == here.kind.reach
        assert kind_of(here.address) is here.kind
        assert here.kind.location(here.address, {}) in ("cpu:0", "*")
        here.kind.check(here.address, NBYTES)
        with pytest.raises(te.RegistrationError):
            here.kind.check(here.address, 1 << 44)


def test_nothing_but_its_copier_touches_sealed_memory() -> None:
    with sealed() as kind:
        memory = kind.allocate(4096)
        fd = os.memfd_create("file")
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.write(fd, ctypes.c_void_p(memory.address), ctypes.c_size_t(1)) == -1
            assert ctypes.get_errno() == errno.EFAULT
        finally:
            os.close(fd)


def test_what_the_sealed_copier_must_not_be_asked_fails() -> None:
    with sealed_case() as here:
        other = np.zeros(4096, np.uint8)  # never pinned
        here.host = other
        assert here.settle(here.copy([(0, 0, 4096)], TO_HOST)) == errno.EFAULT
        assert here.settle(here.copy([(0, NBYTES - 1, 2)], FROM_HOST)) == errno.EFAULT


def test_memory_that_no_transport_moves_is_refused() -> None:
    with sealed() as kind, te.Engine() as engine:
        memory = kind.allocate(4096)
        kind.has_copier = False  # type: ignore[misc]
        says = r"4096 bytes at 0x\w+ are sealed memory, which no transport of this build can move"
        with pytest.raises(te.RegistrationError, match=says):
            engine.register(memory.address, 4096)
        with pytest.raises(te.RegistrationError, match="not all sealed memory"):
            engine.register(memory.address, 4097)


def test_only_a_kind_is_taken_for_one() -> None:
    given = function(
        "te.core.kinds", "kind_of", ctypes.c_void_p, ctypes.py_object, factory=ctypes.PYFUNCTYPE
    )
    assert given(HOST.compiled) == HOST_KIND
    assert given(capsule(0x1000)) == 0x1000
    for other in (None, kinds.__pyx_capi__["kind_of"]):
        with pytest.raises(ValueError, match="PyCapsule_GetPointer called with in"):
            given(other)


def test_kinds_come_and_go() -> None:
    memory = np.zeros(100, np.uint8)
    address = memory.ctypes.data
    with sealed() as first, sealed() as second:
        for kind in (first, second):
            kind.tell(address, 100, address)
        assert kind_of(address) is second  # the last that was added is asked first
        RECOGNISERS.remove(second.recognise)
        assert kind_of(address) is first
        RECOGNISERS.insert(0, second.recognise)
    assert kind_of(address) is HOST


def test_only_allocated_host_memory_is_mapped_by_others() -> None:
    buffer = te.allocate(8192)
    buffer[:3] = b"abc"
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    export = HOST.export(buffer, address, 8192)
    (part,) = export.parts()
    assert (export.handles, part.address, part.nbytes, part.handle) == ("", address, 8192, b"")
    assert part.fd is not None
    with mmap.mmap(part.fd, 8192, prot=mmap.PROT_READ) as there:
        assert there[:4] == b"abc\0"
    with pytest.raises(OSError, match=r"map memory of te\.allocate alone"):
        HOST.export(bytearray(8192), address, 8192)


def test_a_kind_without_more_says_what_it_has_not() -> None:
    with sealed() as kind:
        for call, says in [
            (lambda: kind.dma_buf(0, 1), "sealed memory has no dma-buf"),
            (lambda: kind.export(None, 0, 1), "other processes cannot map sealed memory"),
            (lambda: kind.map(b"", 1, os.dup), "sealed memory of other processes cannot be mapped"),
        ]:
            with pytest.raises(OSError, match=says):
                call()
    HOST.pin(0, 1)()  # nothing to do
