# SPDX-License-Identifier: Apache-2.0
"""Agents over te whose peers fall silent, end, or lose their connections."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from nixl_agents import FarAgent, agent, blocks, ended, options, raises_until, registered
from te_far import pattern, wait_until

from sglang_mooncake.faces.nixl import Options
from sglang_mooncake.faces.nixl.names import InvalidParam, RemoteDisconnect, RepostActive

MIB = 1 << 20
#: te gives a silent peer up after that, and a connection to one.
STALL_S, CONNECT_S = 2.0, 5.0


@pytest.fixture(params=["samehost", "tcp"])
def transports(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (request.param,)


@pytest.fixture
def far(transports: tuple[str, ...]) -> Iterator[FarAgent]:
    process = FarAgent(transports=transports)
    yield process
    process.end()


@pytest.fixture
def near(transports: tuple[str, ...]):
    return agent(
        "near", transports=transports, stall_timeout_s=STALL_S, connect_timeout_s=CONNECT_S
    )


@pytest.fixture
def patient(transports: tuple[str, ...]):
    """te gives nobody up."""
    return agent("near", transports=transports)


def both(near, far, nbytes: int):
    """Memory here, and a list of memory there."""
    here, there = registered(near, nbytes), far.register(nbytes=nbytes, seed=1)
    near.add_remote_agent(far.metadata())
    return here, near.get_xfer_descs([(there, nbytes, 0)], "DRAM")


def posted(near, operation: str, here: np.ndarray, there):
    descs = near.get_xfer_descs(blocks(here, here.nbytes), "DRAM")
    handle = near.initialize_xfer(operation, descs, there, "far")
    near.transfer(handle)
    return handle


def works(near, here: np.ndarray, there) -> bool:
    handle = posted(near, "READ", here, there)
    try:
        return ended(near, handle) == "DONE"
    finally:
        near.release_xfer_handle(handle)


def await_beginning(near) -> None:
    """Some of a write is on its way over TCP, or on the same host the peer was told of it: what is
    not, te just forgets."""
    engine = near.agent._impl.engine
    is_sent = engine.stats().transports == ("samehost",)
    wait_until(lambda: is_sent or engine.stats().bytes_sent > 0, "some bytes were sent")


@pytest.mark.slow
def test_a_read_from_a_silent_peer_ends_and_the_next_one_works_when_it_is_back(near, far) -> None:
    here, there = both(near, far, MIB)
    wait_until(lambda: works(near, here, there), "it works")
    far.signal(signal.SIGSTOP)
    handle = posted(near, "READ", here, there)
    assert ended(near, handle) == "ERR"
    near.release_xfer_handle(handle)
    assert not works(near, here, there)  # It cannot be connected to either.
    assert not near.check_remote_metadata("far")
    far.signal(signal.SIGCONT)
    wait_until(lambda: works(near, here, there), "it works again")
    assert near.check_remote_metadata("far")
    np.testing.assert_array_equal(here, pattern(1, MIB))


@pytest.mark.slow
def test_nothing_of_a_released_read_lands_once_the_peer_goes_on(patient, far) -> None:
    near = patient
    here, there = both(near, far, 64 * MIB)
    assert works(near, here, there)
    far.signal(signal.SIGSTOP)
    handle = posted(near, "READ", here, there)
    assert near.check_xfer_state(handle) == "PROC"
    near.release_xfer_handle(handle)
    with pytest.raises(InvalidParam):
        near.check_xfer_state(handle)
    here[:] = 7
    far.signal(signal.SIGCONT)
    # What the peer sends now comes before its answer to this one.
    other = registered(near, 64 * MIB)
    assert works(near, other, there)
    assert (here == 7).all()


@pytest.mark.slow
def test_a_write_to_a_silent_peer_is_released_once_the_peer_has_confirmed(patient, far) -> None:
    near = patient
    here, there = both(near, far, 64 * MIB)
    assert works(near, here, there)
    far.signal(signal.SIGSTOP)
    handle = posted(near, "WRITE", here, there)
    await_beginning(near)
    for _ in range(2):
        with pytest.raises(RepostActive, match="has not confirmed"):
            near.release_xfer_handle(handle)
    far.signal(signal.SIGCONT)
    raises_until(lambda: near.release_xfer_handle(handle), RepostActive)


@pytest.mark.slow
def test_a_write_to_a_silent_peer_is_released_once_te_has_given_up(near, far) -> None:
    here, there = both(near, far, 64 * MIB)
    wait_until(lambda: works(near, here, there), "it works")
    far.signal(signal.SIGSTOP)
    handle = posted(near, "WRITE", here, there)
    raises_until(lambda: near.release_xfer_handle(handle), RepostActive)


@pytest.mark.slow
def test_a_write_that_may_still_land_is_an_exception(near, far) -> None:
    here, there = both(near, far, 64 * MIB)
    wait_until(lambda: works(near, here, there), "it works")
    far.signal(signal.SIGSTOP)
    handle = posted(near, "WRITE", here, there)

    def is_lost() -> bool:
        try:
            return near.check_xfer_state(handle) != "PROC"
        except RemoteDisconnect:
            return True

    wait_until(is_lost, "te has given it up")
    with pytest.raises(RemoteDisconnect, match="made no progress"):
        near.check_xfer_state(handle)
    near.release_xfer_handle(handle)


@pytest.mark.slow
def test_a_peer_that_ended_is_known_to_be_gone(patient, far) -> None:
    near = patient
    here, there = both(near, far, MIB)
    assert works(near, here, there)
    far.process.kill()
    far.process.wait()
    wait_until(lambda: not works(near, here, there), "it has ended")
    wait_until(lambda: not near.check_remote_metadata("far"), "the agent is gone")
    with pytest.raises(RemoteDisconnect):
        near.send_notif("far", b"anybody there?")


def test_a_connection_that_was_lost_is_made_anew_with_the_next_transfer(patient, far) -> None:
    near = patient
    here, there = both(near, far, MIB)
    for _ in range(3):
        assert works(near, here, there)
        peer = near.agent._impl.remotes.get("far").link._peer
        peer.close()
        wait_until(lambda peer=peer: not peer.alive, "the connection is closed")
    assert near.check_remote_metadata("far")


def test_posting_does_not_wait_for_a_connection(transports, far) -> None:
    given, waits_s = options(transports=transports), 0.0

    def open_engine(*arguments):
        engine = given.open_engine(*arguments)
        connect = engine.connect

        def slow(card: bytes):
            wait_until(lambda: waits_s > 0.0, "the post has returned")
            return connect(card)

        engine.connect = slow
        return engine

    near = agent("near", None, Options(open_engine, given.make_notices))
    here, there = both(near, far, MIB)
    descs = near.get_xfer_descs(blocks(here, MIB), "DRAM")
    handle = near.initialize_xfer("READ", descs, there, "far")
    began_s = time.monotonic()
    assert near.transfer(handle) == "PROC"
    near.send_notif("far", b"first")
    waits_s = time.monotonic() - began_s
    assert ended(near, handle) == "DONE"
