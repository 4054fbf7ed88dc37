# SPDX-License-Identifier: Apache-2.0
"""A rank's lease: kept by its thread over a real server, and healed after all kinds of harm."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import ANY

import pytest
import requests
from bootstrap_rank import rank_process
from bootstrap_waits import NEVER_S, WAIT_S, no_thread_left, patient_client, until

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    NotReady,
    PlaceTaken,
    RankCoords,
    RankLease,
    RankRecord,
    Topology,
    close_leases,
)
from bootstrap_server.client import lease as lease_module
from bootstrap_server.client.lease import AGAIN_S

MakeRecord = Callable[..., RankRecord]

ONE = Topology(1, 1, 1, 1)
FIRST = RankCoords(0, 0, 0, 0)
#: Short enough that tests are quick; renewed each 0.1 s.
LEASE_S = 0.3


@pytest.fixture
def quick_server() -> Iterator[BootstrapServer]:
    with BootstrapServer("127.0.0.1", 0, lease_s=LEASE_S) as server:
        yield server


def address(server: BootstrapServer) -> str:
    return f"127.0.0.1:{server.port}"


class CountingClient(BootstrapClient):
    """Tells when a renewal has come through."""

    renewed = threading.Semaphore(0)

    def renew(self, *arguments: object) -> float:
        lease_s = super().renew(*arguments)  # type: ignore[arg-type]
        self.renewed.release()
        return lease_s


def test_a_lease_is_kept_from_a_thread(
    quick_server: BootstrapServer, make_record: MakeRecord
) -> None:
    where, record = address(quick_server), make_record(ONE, FIRST)
    with (
        no_thread_left("bootstrap-lease"),
        patient_client(where) as client,
        RankLease(where, record, make_client=partial(CountingClient, timeout_s=WAIT_S)) as lease,
    ):
        for _ in range(6):  # two lengths of the lease
            assert CountingClient.renewed.acquire(timeout=WAIT_S)
        assert client.instance(wait_s=WAIT_S).ranks == (record.rank,)
        assert lease.problem is None


def test_a_lease_is_given_back(server: BootstrapServer, make_record: MakeRecord) -> None:
    where = address(server)
    with no_thread_left("bootstrap-lease"), patient_client(where) as client:
        with RankLease(where, make_record(ONE, FIRST), make_client=patient_client) as lease:
            pass
        # Another one gets the place at once.
        client.try_register(make_record(ONE, FIRST, epoch=2, port=5))
        lease.close()  # once more does no harm
        assert client.instance().ranks[0].epoch == 2


def test_a_rank_that_cannot_register_leaves_nothing_behind(
    server: BootstrapServer, make_record: MakeRecord
) -> None:
    where, second = address(server), make_record(ONE, FIRST, 2, port=5)
    with (
        no_thread_left("bootstrap-lease"),
        RankLease(where, make_record(ONE, FIRST), make_client=patient_client),
        pytest.raises(PlaceTaken),
    ):
        RankLease(where, second, deadline_s=0.01, make_client=patient_client)


@contextmanager
def by_hand(where: str, record: RankRecord) -> Iterator[RankLease]:
    """A lease whose thread sleeps: the test renews."""
    lease = RankLease(where, record, make_client=patient_client)
    lease._closing.set()
    lease._thread.join(WAIT_S)
    # The thread gave the lease back when it ended.
    lease._client = patient_client(where)
    lease.renew()
    try:
        yield lease
    finally:
        lease._client.close()


def test_a_registry_that_was_restarted_or_forgot_gets_the_rank_again(
    port: int, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    record = make_record(ONE, FIRST)
    server = BootstrapServer("127.0.0.1", port, lease_s=NEVER_S)
    with by_hand(address(server), record) as lease, patient_client(address(server)) as client:
        client.release(record.rank)  # as after a lapse
        lease.renew()
        first = client.instance()
        assert (first.ranks, lease.problem) == ((record.rank,), None)
        server.close()
        with caplog.at_level(logging.WARNING, "bootstrap_server.client.lease"):
            for _ in range(3):
                lease.renew()
        assert lease.problem is not None
        for words in ("dp 0 cp 0 tp 0 pp 0", address(server), "refused"):
            assert words in lease.problem
        assert sum("soon lose its registration" in line for line in caplog.messages) == 1
        with BootstrapServer("127.0.0.1", port, lease_s=NEVER_S):
            lease.renew()
            assert (client.instance().ranks, lease.problem) == ((record.rank,), None)
            # A revision of the former server's is never above one of this one's.
            assert client.instance().revision > first.revision
    assert "rank dp 0 cp 0 tp 0 pp 0 is registered again" in caplog.messages


def test_a_registry_that_did_not_answer_is_asked_again_soon(
    port: int, make_record: MakeRecord
) -> None:
    """Its lease may have ended meanwhile: until it has registered again nobody finds the rank."""
    server = BootstrapServer("127.0.0.1", port, lease_s=NEVER_S)
    with by_hand(address(server), make_record(ONE, FIRST)) as lease:
        usual_s = lease.pause_s()
        assert usual_s > AGAIN_S
        server.close()
        for _ in range(2):
            lease.renew()
            assert lease.pause_s() == AGAIN_S
        with BootstrapServer("127.0.0.1", port, lease_s=NEVER_S):
            lease.renew()
            assert lease.pause_s() == usual_s


def test_a_short_lease_is_not_renewed_less_often_when_nobody_answers(
    make_record: MakeRecord,
) -> None:
    server = BootstrapServer("127.0.0.1", 0, lease_s=LEASE_S)
    with by_hand(address(server), make_record(ONE, FIRST)) as lease:
        usual_s = lease.pause_s()
        server.close()
        lease.renew()
        assert lease.pause_s() == usual_s < AGAIN_S


def test_a_rank_whose_place_was_taken_says_so_and_comes_back(
    server: BootstrapServer, make_record: MakeRecord
) -> None:
    record, other = make_record(ONE, FIRST), make_record(ONE, FIRST, epoch=2, port=5)
    where = address(server)
    with by_hand(where, record) as lease, patient_client(where) as client:
        client.release(record.rank)
        client.register(other)
        lease.renew()
        assert "alive at 127.0.0.1 port 5 and not replaced" in str(lease.problem)
        client.release(other.rank)
        lease.renew()
        assert (client.instance().ranks, lease.problem) == ((record.rank,), None)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_forgotten_and_its_restart_taken(
    quick_server: BootstrapServer, make_record: MakeRecord
) -> None:
    where = address(quick_server)
    with (
        patient_client(where) as client,
        rank_process(where, make_record(ONE, FIRST)) as process,
    ):
        assert client.instance(wait_s=WAIT_S).ranks[0].epoch == 1
        os.kill(process.pid, signal.SIGSTOP)
        # Asked again until the lease ends: were it never to end, this would be refused.
        restart = make_record(ONE, FIRST, epoch=2, port=5)
        with RankLease(where, restart, make_client=patient_client):
            assert client.instance(wait_s=WAIT_S).ranks[0].epoch == 2


def test_a_vanished_rank_is_forgotten_though_nobody_asks(
    quick_server: BootstrapServer, make_record: MakeRecord
) -> None:
    with patient_client(address(quick_server)) as client:
        client.register(make_record(ONE, FIRST))
        give_up_at_s = time.monotonic() + WAIT_S
        counts = {"registered": 1}
        while counts["registered"] and time.monotonic() < give_up_at_s:
            # The list of instances ends no leases itself.
            counts = requests.get(f"http://{client.address}/v1/instances", timeout=30).json()[
                "default"
            ]
        with pytest.raises(NotReady, match=r"port 10000 and has not renewed its lease of 0\.3 s"):
            client.instance()
    assert counts == {"registered": 0, "expected": 1, "generation": 1, "revision": ANY}


def test_a_lease_without_a_deadline_is_begun_when_its_registry_comes_up(
    port: int, make_record: MakeRecord
) -> None:
    record = make_record(ONE, FIRST)
    with RankLease(f"127.0.0.1:{port}", record, deadline_s=None) as lease:
        until(lambda: lease.problem is not None, "the registry is not there")
        with (
            BootstrapServer("127.0.0.1", port) as server,
            patient_client(address(server)) as client,
        ):
            assert client.instance(wait_s=WAIT_S).ranks == (record.rank,)
            until(lambda: lease.problem is None, "all is well")


def test_registries_that_do_not_answer_are_waited_for_at_once(
    make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler of SGLang's waits for the end of a manager when its server changes its role."""
    monkeypatch.setattr(lease_module, "_CLOSE_DEADLINE_S", NEVER_S)
    both, released = threading.Barrier(2), []

    class Silent(BootstrapClient):
        """Answers one only when the other is asked, too."""

        def register(self, *_: object) -> float:
            return NEVER_S

        def release(self, rank: object) -> None:
            both.wait(WAIT_S)
            released.append(rank)

    record = make_record(ONE, FIRST)
    close_leases(RankLease(f"127.0.0.1:{port}", record, make_client=Silent) for port in (9, 10))
    assert released == [record.rank] * 2
