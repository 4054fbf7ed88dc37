# SPDX-License-Identifier: Apache-2.0
"""Two engines in this process: what the API promises when everybody behaves."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import te_contract
from te_far import pattern, wait_until
from te_raw import raw_destination, take_hello, welcome

import te
from te.core.engine import Engine as Plane

TIMEOUT_S = 60.0


class Pair:
    """A source with a patterned buffer, a destination with a guarded one."""

    def __init__(self, source: te.Engine, target: te.Engine, nbytes: int) -> None:
        self.source, self.target = source, target
        self.src, self.dst = pattern(1, nbytes), np.full(nbytes, 0xEE, np.uint8)
        self.src_region = source.register(self.src)
        self.dst_region = target.register(self.dst, remote="read-write")
        self.peer = source.connect(target.card())

    def blocks(self, src: object, dst: object, nbytes: object) -> te.Blocks:
        """Blocks from offsets."""
        src_address = self.src.ctypes.data + np.asarray(src, np.uint64)
        dst_address = self.dst.ctypes.data + np.asarray(dst, np.uint64)
        return te.Blocks.of(src_address, dst_address, nbytes)  # type: ignore[arg-type]


def test_threads_connecting_at_once_get_one_peer() -> None:
    config = te.Config(connect_timeout_s=TIMEOUT_S)
    with te.Engine(config) as source, te.Engine(config) as target:
        card, peers = target.card(), []
        threads = [
            threading.Thread(target=lambda: peers.append(source.connect(card))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(peers) == 8
        assert len(set(peers)) == 1
        wait_until(lambda: source.stats().rails == peers[0].rails == 2, "only one link is left")


def test_ipv6() -> None:
    config = te.Config(host="::1", transports=("tcp",))
    with te.Engine() as source, te.Engine(config) as target:
        pair = Pair(source, target, 1000)
        pair.peer.write(pair.blocks(0, 0, 1000)).wait(TIMEOUT_S)
        assert (pair.dst == pair.src).all()
        assert pair.peer.address[0] == "::1"


@contextmanager
def unanswered_write() -> Iterator[tuple[te.Engine, te.Peer, te.Region, te.Transfer]]:
    """A write to a destination that says nothing after its welcome."""
    config = te.Config(connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
    with raw_destination() as (listener, card), te.Engine(config) as source:
        connected: list[te.Peer] = []
        thread = threading.Thread(target=lambda: connected.append(source.connect(card)))
        thread.start()
        sock, _ = listener.accept()
        with sock:
            sock.sendall(welcome(take_hello(sock)))
            thread.join(TIMEOUT_S)
            region = source.register(bytearray(100))
            transfer = connected[0].write(te.Blocks.of(region.address, 1, 100))
            yield source, connected[0], region, transfer


def test_closing_fails_what_is_unfinished_and_is_idempotent() -> None:
    with unanswered_write() as (source, peer, region, transfer):
        with pytest.raises(te.RegistrationError, match="1 unfinished transfers read from"):
            source.deregister(region, 0.05)
        source.close()
        with pytest.raises(te.TransferFailed, match="this engine was closed"):
            transfer.wait(TIMEOUT_S)
        source.deregister(region)
        source.close()
    with pytest.raises(te.ClosedError):
        source.card()
    with pytest.raises(te.TransferFailed, match="this engine was closed"):
        peer.write(te.Blocks.of([], [], [])).wait(TIMEOUT_S)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_closes_its_parents_engines_ends_nothing_of_theirs() -> None:
    """It has their sockets, and none of their threads."""
    config = te.Config(connect_timeout_s=TIMEOUT_S, transports=("tcp",))
    with te.Engine(config) as source, te.Engine(config) as target:
        pair = Pair(source, target, 1000)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                source.close()
                target.close()
                os._exit("closed" in repr(source))  # Its devices are not ended, either.
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        pair.peer.write(pair.blocks(0, 0, 1000)).wait(TIMEOUT_S)
        assert (pair.dst == pair.src).all()
        again = source.connect(target.card())
        assert again is pair.peer


def test_threads_end_with_the_engine(pair: te_contract.Pair) -> None:
    names = {f"te-accept-{pair.target.id[:8]}", f"te-worker-{pair.target.id[:8]}-0"}
    assert names <= {thread.name for thread in threading.enumerate()}
    pair.target.close()
    assert not names & {thread.name for thread in threading.enumerate()}


def descriptors() -> set[int]:
    """Those that this process has open."""
    found = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    return {fd for fd in found if os.path.lexists(f"/proc/self/fd/{fd}")}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["samehost", "tcp"])
def test_closed_engines_give_back_their_descriptors_at_once(transport: str) -> None:
    """Not when Python next looks for garbage, which in a big process may be never."""
    gc.collect()
    before = descriptors()
    gc.disable()
    try:
        _write_once(te.Config(transports=(transport,), status_dir=None))
        wait_until(lambda: descriptors() <= before, "no descriptor is left")
    finally:
        gc.enable()


def _write_once(config: te.Config) -> None:
    with te.Engine(config) as source, te.Engine(config) as target:
        memory = source.register(np.ones(4096, np.uint8)), target.register(np.zeros(4096, np.uint8))
        tag = te.new_tag()
        target.expect(tag)
        blocks = te.Blocks.of([memory[0].address], [memory[1].address], 4096)
        done = source.connect(target.card()).write(blocks, tag=tag).wait(TIMEOUT_S)
        assert done is te.Status.DONE


def test_a_callback_whose_thread_cannot_start_is_refused_and_taken_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[str] = []
    with unanswered_write() as (source, _, _, transfer):
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                transfer.add_done_callback(lambda _: told.append("refused"))
        transfer.add_done_callback(lambda _: told.append("taken"))
        source.close()
    assert told == ["taken"]


@pytest.mark.slow
def test_an_engine_that_cannot_start_a_thread_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if re.fullmatch(r"te-worker-\w+-1", thread.name):
            raise RuntimeError("can't start new thread")
        start(thread)

    gc.collect()
    threads, before = set(threading.enumerate()), descriptors()
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        without.setattr("os.cpu_count", lambda: 2)
        with pytest.raises(RuntimeError, match="can't start"):
            te.Engine()
    assert set(threading.enumerate()) <= threads
    gc.collect()
    assert descriptors() <= before


@pytest.mark.slow
@pytest.mark.parametrize("spare", range(8))
def test_a_plane_without_descriptors_closes_none_that_is_not_its_own(spare: int) -> None:
    """Descriptor 0 is this process's standard input."""
    gc.collect()
    before, standard_input = descriptors(), os.fstat(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(max(before) + 10)) - before)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], limits[1]))
    try:
        with pytest.raises(OSError, match="no descriptor for an engine"):
            Plane(4, 1.0, 1.0, 0.0, 1 << 20, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    gc.collect()
    assert os.path.samestat(os.fstat(0), standard_input)
    assert descriptors() <= before


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_the_log_names_the_peer_whose_link_has_ended(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "te")
    config = te.Config(transports=(transport,), connect_timeout_s=TIMEOUT_S)
    with te.Engine(config) as source, te.Engine(config) as target:
        peer = source.connect(target.card())
        host, port = peer.address
        target.close()
        said = f"a link ended: engine {target.id} at {host}:{port} closed the connection"
        wait_until(lambda: said in caplog.text, "the log says so")


def test_taken_port_and_unknown_host() -> None:
    with te.Engine() as engine:
        port = engine.connect(engine.card()).address[1]
        with pytest.raises(te.ListenError, match=f"127.0.0.1:{port}: Address already in use"):
            te.Engine(te.Config(port=port))
    with pytest.raises(te.ListenError, match=r"no\.such\.host\.invalid"):
        te.Engine(te.Config(host="no.such.host.invalid"))


def test_staging_for_more_workers_than_there_are() -> None:
    """An engine has no more of them than the host has processors."""
    slot, workers = 4096, 4
    memory = np.zeros(2 * workers * slot * 64, np.uint8)
    plane = Plane(1, 1.0, 1.0, 0.0, 1 << 20, 100)
    plane.stage(memory.ctypes.data, memory.nbytes, slot)
    assert plane.unstage(TIMEOUT_S)
