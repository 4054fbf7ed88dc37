# SPDX-License-Identifier: Apache-2.0
"""Memory of Mooncake's engine class: what it allocates, and bytes that go in and out of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from engine_far import near
from te_far import pattern

import te
from sglang_mooncake.faces.mooncake_engine.memory import Memory

NBYTES = 1 << 20


def test_managed_memory_is_registered_and_goes_in_one_call() -> None:
    engine, peer = near("tcp"), near("tcp")
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    first = engine.allocate_managed_buffer(NBYTES)
    second = engine.allocate_managed_buffer(1)
    assert 0 not in (first, second)
    assert peer.get_first_buffer_address(session) == first
    assert engine.read_bytes_from_buffer(first, NBYTES) == bytes(NBYTES)

    theirs = pattern(1, NBYTES)
    assert peer.register_memory(theirs.ctypes.data, NBYTES) == 0
    assert peer.transfer_sync_write(session, theirs.ctypes.data, first, NBYTES) == 0
    assert engine.read_bytes_from_buffer(first, NBYTES) == theirs.tobytes()

    assert engine.free_managed_buffer(first, NBYTES) == 0
    assert peer.transfer_sync_write(session, theirs.ctypes.data, first, NBYTES) == -1
    assert peer.get_first_buffer_address(session) == second
    assert engine.free_managed_buffer(second, 1) == 0


def test_what_is_no_managed_memory_is_not_freed(caplog) -> None:
    engine = near("tcp")
    own = np.zeros(100, np.uint8)
    assert engine.register_memory(own.ctypes.data, 100) == 0
    managed = engine.allocate_managed_buffer(NBYTES)
    for address, nbytes, says in [
        (own.ctypes.data, 100, f"no 100 bytes of managed memory begin at {own.ctypes.data:#x}"),
        (managed, NBYTES - 1, f"no {NBYTES - 1} bytes of managed memory begin at {managed:#x}"),
        (77, 1, "no registered memory begins at 0x4d"),
    ]:
        caplog.clear()
        assert engine.free_managed_buffer(address, nbytes) == -1
        assert says in caplog.text
    assert engine.unregister_memory(managed) == -1
    assert "is managed: free_managed_buffer frees it" in caplog.text
    assert engine.read_bytes_from_buffer(managed, 1) == b"\0"
    assert engine.free_managed_buffer(managed, NBYTES) == 0
    assert engine.free_managed_buffer(managed, NBYTES) == -1


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 62, 1 << 80])
def test_memory_that_there_is_not_has_the_address_0(caplog, nbytes) -> None:
    assert near("tcp").allocate_managed_buffer(nbytes) == 0
    assert f"allocate_managed_buffer({nbytes}) failed" in caplog.text


def test_bytes_go_in_and_out() -> None:
    engine = near("tcp")
    memory = np.zeros(100, np.uint8)
    at = memory.ctypes.data
    assert engine.register_memory(at, 100) == 0
    assert engine.write_bytes_to_buffer(at + 10, b"some bytes", 4) == 0
    assert memory.tobytes() == bytes(10) + b"some" + bytes(86)
    assert engine.read_bytes_from_buffer(at + 9, 6) == b"\0some\0"
    assert engine.write_bytes_to_buffer(at + 100, b"", 0) == 0
    assert engine.read_bytes_from_buffer(at, 0) == b""


def test_bytes_outside_of_registered_memory_are_left_alone(caplog) -> None:
    """Mooncake's class copies to any address, and the process ends if nothing is mapped there."""
    engine = near("tcp")
    memory = pattern(1, 200)
    at = memory.ctypes.data
    assert engine.register_memory(at, 100) == 0
    outside = [(at + 1, 100), (at - 1, 2), (at + 100, 1), (0, 1), (at, -1), (at + 101, -1)]
    for address, nbytes in outside:
        caplog.clear()
        assert engine.write_bytes_to_buffer(address, bytes(200), nbytes) == -1
        assert "lie outside the registered memory" in caplog.text
        with pytest.raises(ValueError, match="lie outside the registered memory"):
            engine.read_bytes_from_buffer(address, nbytes)
    assert engine.write_bytes_to_buffer(at, b"short", 6) == -1
    assert "6 bytes of 5 cannot be written" in caplog.text
    with pytest.raises(TypeError, match="not str"):
        engine.write_bytes_to_buffer(at, "text", 1)
    assert (memory == pattern(1, 200)).all()


def test_memory_of_a_gpu_is_not_touched_by_the_processor() -> None:
    region = SimpleNamespace(address=4096, end=8192, kind="cuda:0", owner=None)
    memory = Memory(SimpleNamespace(register=lambda *_, **__: region))
    memory.register([4096], [4096])
    for touch in (lambda: memory.write(4096, b"a", 1), lambda: memory.read(4096, 1)):
        with pytest.raises(ValueError, match="is of cuda:0, not the host's"):
            touch()


def test_memory_that_a_peer_still_uses_stays() -> None:
    class Busy:
        def register(self, buffer, remote: str) -> SimpleNamespace:
            assert remote == "read-write"
            size = len(buffer)
            return SimpleNamespace(address=4096, end=4096 + size, nbytes=size, owner=buffer)

        def deregister(self, _region: object) -> None:
            if self.busy:
                raise te.FenceTimeout("a write under way did not end")

        busy = True

    engine = Busy()
    memory = Memory(engine)
    address = memory.allocate(8192)
    for _ in range(2):
        with pytest.raises(te.FenceTimeout):
            memory.free(address, 8192)
    assert memory.first_address == address
    engine.busy = False
    memory.free(address, 8192)
    assert memory.first_address == 0
