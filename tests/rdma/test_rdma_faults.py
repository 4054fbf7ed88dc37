# SPDX-License-Identifier: Apache-2.0
"""Links cut, packets lost and peers gone in the middle of transfers.

On one rail of several no transfer may fail, and the rail must be in use again soon after its
return. On the only rail there must be a clear failure in time, and no restart for the next one.
"""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from rdma_stream import RATE, Stream, device_of, engine, rail_of, two_engines
from testbed_nics import Nic, cut, end_connections, run, shaped, wait_for

import te
from te.transports.rdma.rails import RailState

pytestmark = pytest.mark.rdma

STALL_S = 3.0
# Of conditions: an emulated machine has one processor, of which a busy host gives it a part.
WAIT_S = 60.0
#: Timeouts that nobody waits for.
NEVER_S = 600.0
#: The back-off behind so many failures, which is not waited for either: 25 s, and it takes as long
#: to get there, since it doubles.
LONG_FAILURES = 10
#: While the way is shut: several attempts to dial.
DIALS_IN_VAIN_S = 2.5
LEFT_BEHIND = re.compile(r"no completion for (\d+) ms, while another rail moved bytes")
#: Several looks at a rail; longer than it may be silent in these tests.
LOOKS_S, IDLE_S = 1.0, 3.0
LOST_LINK = re.compile(r"the port has lost its link|the port 1 of \w+ has no link")

Fault = Callable[[Nic, Nic], AbstractContextManager[None]]


@contextmanager
def loss(nic: Nic, percent: int) -> Iterator[None]:
    """Packets that leave the device are lost, on top of its rate."""
    run("tc", "qdisc", "change", "dev", nic.netdev, "root", *RATE, "loss", f"{percent}%")
    try:
        yield
    finally:
        run("tc", "qdisc", "change", "dev", nic.netdev, "root", *RATE, "loss", "0%")


CUTS: dict[str, Fault] = {
    "sender's link": lambda near, far: cut(near.netdev),
    "receiver's link": lambda near, far: cut(far.netdev),
    "switch port": lambda near, far: cut(far.port),
    "all packets": lambda near, far: loss(near, 100),
}


@pytest.fixture
def halves(rdma_nics: tuple[Nic, ...]) -> Iterator[tuple[tuple[Nic, ...], tuple[Nic, ...]]]:
    """Devices of the source and of the destination, up to four each, their links slowed."""
    count = min(4, len(rdma_nics) // 2)
    near, far = rdma_nics[:count], rdma_nics[count : 2 * count]
    with ExitStack() as stack:
        for nic in near:
            stack.enter_context(shaped(nic.netdev, *RATE))
        yield near, far


def in_use(peer: te.Peer, nic: Nic) -> Callable[[], bool]:
    """Whether the device's rail has carried something since now."""
    before = rail_of(peer, nic).flow.bytes_sent

    def has_carried() -> bool:
        rail = rail_of(peer, nic)
        return rail.state == "up" and rail.flow.bytes_sent > before

    return has_carried


@pytest.mark.parametrize("name", CUTS)
def test_a_rail_cut_in_the_middle_fails_nothing_and_comes_back(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]], name: str
) -> None:
    near, far = halves
    with two_engines(near, far) as engines, Stream(*engines) as stream:
        stream.go_on()
        with CUTS[name](near[0], far[0]):
            wait_for(lambda: rail_of(stream.peer, near[0]).state == "down", WAIT_S, "noticed")
            stream.go_on()
            # Another one may be silent for too long, too, while this process stands still.
            wait_for(lambda: stream.peer.rails == len(near) - 1, WAIT_S, "the others are up")
        wait_for(in_use(stream.peer, near[0]), WAIT_S, f"{near[0].device} in use again")
        stream.go_on()
    assert stream.failures == []


def test_lost_packets_fail_nothing(halves: tuple[tuple[Nic, ...], tuple[Nic, ...]]) -> None:
    near, far = halves
    with two_engines(near, far) as engines, Stream(*engines) as stream:
        stream.go_on()
        with loss(near[0], 10):
            stream.go_on(5)
        wait_for(in_use(stream.peer, near[0]), WAIT_S, f"{near[0].device} in use again")
    assert stream.failures == []


@pytest.mark.parametrize("name", CUTS)
def test_on_the_only_rail_a_fault_is_a_clear_failure_and_needs_no_restart(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]], name: str
) -> None:
    near, far = halves
    with two_engines(near[:1], far[:1], STALL_S) as engines:
        stream = Stream(*engines)
        stream.once(1)
        with CUTS[name](near[0], far[0]):
            with pytest.raises(te.TransferFailed) as caught:
                stream.once(2)
            assert "rail" in str(caught.value)
        wait_for(lambda: stream.peer.rails == 1, WAIT_S, "the rail is back")
        stream.once(3)


def test_engines_that_lost_every_connection_find_each_other_again(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]],
) -> None:
    """Both live on. Greetings and control frames go over the first wire, too."""
    near, far = halves
    hosts = {"host": near[0].address, "source_host": near[0].address}
    with (
        engine(near, **hosts) as source,
        engine(far, host=far[0].address) as target,
        ThreadPoolExecutor(1) as dialling,
    ):
        stream = Stream(source, target)
        stream.once(1)
        lost = stream.peer
        with ExitStack() as shut:
            for nic in near:
                shut.enter_context(loss(nic, 100))
            cut_off = stream.begin(2)
            assert end_connections((*near, *far)) >= 2
            with pytest.raises(te.TransferFailed, match="connection"):
                cut_off.wait(WAIT_S)
            target.fence(2)
            wait_for(lambda: not lost.alive, WAIT_S, "the link is known to be lost")
            found = dialling.submit(stream.connect)
            with pytest.raises(TimeoutError):
                found.result(DIALS_IN_VAIN_S)
        found.result(WAIT_S)
        assert stream.peer is not lost
        stream.once(3)


def test_a_process_that_stood_still_gives_up_the_rail_before_its_peer(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]],
) -> None:
    """Both time-outs are over when it goes on. The link is well: the next transfer needs it."""
    near, far = halves
    with two_engines(near[:1], far[:1], 2.0, rail_timeout_s=1.0) as engines:
        stream = Stream(*engines)
        stream.once(1)
        with loss(near[0], 100):
            still = "sleep 0.5; kill -STOP $PPID; sleep 3; kill -CONT $PPID"
            with subprocess.Popen(["sh", "-c", still]), pytest.raises(te.TransferFailed) as caught:
                stream.once(2)
            assert "rail" in str(caught.value)
        wait_for(lambda: stream.peer.rails == 1, WAIT_S, "the rail is back")
        stream.once(3)


@pytest.mark.parametrize("name", ["sender's link", "receiver's link"])
def test_a_lost_link_is_told_by_its_device_and_so_is_its_return(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = halves
    caplog.set_level(logging.INFO, "te")
    with (
        two_engines(near, far, stall_timeout_s=NEVER_S, rail_timeout_s=NEVER_S) as engines,
        Stream(*engines) as stream,
    ):
        stream.go_on()
        with CUTS[name](near[0], far[0]):
            wait_for(lambda: rail_of(stream.peer, near[0]).state == "down", WAIT_S, "noticed")
            stream.go_on(1)
            wait_for(lambda: "tells PORT_ERR of port 1" in caplog.text, WAIT_S, "what is told")
            # By the device's word, or, where siw's flushed work requests are faster than that, by
            # the port as the next attempt finds it.
            wait_for(lambda: LOST_LINK.search(caplog.text) is not None, WAIT_S, "why it is lost")
        wait_for(in_use(stream.peer, near[0]), WAIT_S, f"{near[0].device} in use again")
    assert stream.failures == []


def test_a_link_that_comes_back_ends_a_long_back_off(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]],
) -> None:
    near, far = halves
    with two_engines(near, far, rail_backoff_max_s=NEVER_S) as engines:
        stream = Stream(*engines)
        direct = stream.peer._opened.link
        assert direct is not None
        devices = [device_of(rail) for rail in stream.peer.stats().rails]
        index = devices.index(near[0].device)
        with cut(near[0].netdev):
            wait_for(
                lambda: direct.rows[index].failures >= LONG_FAILURES, 2 * WAIT_S, "a long back-off"
            )
            assert "has no link" in rail_of(stream.peer, near[0]).reason
        wait_for(
            lambda: direct.rows[index].state == RailState.RAIL_UP,
            WAIT_S,
            f"{near[0].device} is up again",
        )
        assert direct.rows[index].failures <= 2, "it was made because its port has its link again"
        stream.once(1)


@pytest.mark.each_run
@pytest.mark.driver("siw")  # rxe gives up by itself, 0.3 s after a rail is suspect at the latest
def test_a_rail_that_does_not_move_is_suspect_until_it_does(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]],
) -> None:
    near, far = halves
    with two_engines(near, far, stall_timeout_s=NEVER_S, rail_timeout_s=NEVER_S) as engines:
        stream = Stream(*engines)
        with loss(near[0], 100):
            stuck = stream.begin(1)
            wait_for(lambda: rail_of(stream.peer, near[0]).state == "suspect", WAIT_S, "suspect")
            assert stream.begin(2).wait(WAIT_S) is te.Status.DONE
            assert rail_of(stream.peer, near[0]).state == "suspect"
            assert stuck.poll() is te.Status.PENDING
        assert stuck.wait(WAIT_S) is te.Status.DONE
        wait_for(lambda: rail_of(stream.peer, near[0]).state == "up", WAIT_S, "up again")
        assert rail_of(stream.peer, near[0]).reason == ""
        stream.once(3)


@pytest.mark.each_run
@pytest.mark.driver("siw")  # rxe gives up by itself, after 0.3 s
def test_a_silent_rail_beside_one_that_moves_is_given_up_at_once(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """A second after it fell silent here, and long before its own time-out: that the others go on
    shows that both processes are well."""
    near, far = halves
    timeouts = {"stall_timeout_s": NEVER_S, "rail_timeout_s": 20.0}
    with two_engines(near, far, **timeouts) as engines:
        stream = Stream(*engines)
        with loss(near[0], 100):
            stuck = stream.begin(1)
            wait_for(lambda: rail_of(stream.peer, near[0]).state != "up", WAIT_S, "silent")
            for tag in (2, 3):
                assert stream.begin(tag).wait(WAIT_S) is te.Status.DONE
            assert stuck.wait(WAIT_S) is te.Status.DONE
        assert LEFT_BEHIND.search(caplog.text)
        wait_for(lambda: stream.peer.rails == len(near), WAIT_S, "the rail is back")
        stream.once(4)


@pytest.mark.each_run
@pytest.mark.driver("siw")  # rxe gives up by itself, after 0.3 s
def test_a_silent_rail_is_not_given_up_for_a_few_bytes_of_others(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """What it holds is too little to tell it from one that is slow, as what a probe holds is."""
    near, far = halves
    timeouts = {"stall_timeout_s": NEVER_S, "rail_timeout_s": 20.0}
    with two_engines(near, far, **timeouts) as engines:
        stream = Stream(*engines)
        with loss(near[0], 100):
            stuck = stream.begin(1, count=2 * len(near))
            wait_for(lambda: rail_of(stream.peer, near[0]).state != "up", WAIT_S, "silent")
            assert stream.begin(2, count=32).wait(WAIT_S) is te.Status.DONE
            time.sleep(LOOKS_S)
            assert not LEFT_BEHIND.search(caplog.text)
            assert stream.begin(3).wait(WAIT_S) is te.Status.DONE
            assert stuck.wait(WAIT_S) is te.Status.DONE
        assert LEFT_BEHIND.search(caplog.text)


@pytest.mark.each_run
@pytest.mark.driver("siw")  # rxe gives up by itself, after 0.3 s
def test_a_rail_that_was_idle_is_silent_from_its_next_pieces_on(
    halves: tuple[tuple[Nic, ...], tuple[Nic, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """It gets several at once, and is not given up for the time in which nobody wanted anything of
    it: RoCE sends a lost packet again after 67 ms, and would lose the rail for it."""
    near, far = halves
    timeouts = {"stall_timeout_s": NEVER_S, "rail_timeout_s": 20.0}
    with two_engines(near, far, **timeouts) as engines:
        stream = Stream(*engines)
        stream.once(1)
        time.sleep(IDLE_S)
        with loss(near[0], 100):
            began_s = time.time()
            stuck = stream.begin(2, count=72 * len(near))  # two pieces for each rail
            wait_for(lambda: rail_of(stream.peer, near[0]).state != "up", WAIT_S, "silent")
            for tag in (3, 4):
                assert stream.begin(tag).wait(WAIT_S) is te.Status.DONE
            assert stuck.wait(WAIT_S) is te.Status.DONE
    found = [(line, LEFT_BEHIND.search(line.getMessage())) for line in caplog.records]
    ((line, told),) = [(line, told) for line, told in found if told]
    assert int(told[1]) <= (line.created - began_s) * 1e3 + 1
