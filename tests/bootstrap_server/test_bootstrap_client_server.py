# SPDX-License-Identifier: Apache-2.0
"""Our client against our server, against nobody, and against strangers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests
from bootstrap_waits import NEVER_S, WAIT_S

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    Instance,
    LeaseLost,
    NeverServed,
    NotReady,
    PlaceTaken,
    RankCoords,
    RankRecord,
    RegistrationRefused,
    Topology,
    Unreachable,
    Why,
)
from bootstrap_server import server as server_module
from bootstrap_server.client import bootstrap_client as client_module
from bootstrap_server.client import http as http_client
from bootstrap_server.ranks.sglang_http import ROOMS_PER_QUERY_MAX

MakeRecord = Callable[..., RankRecord]

ONE = Topology(1, 1, 1, 1)
FIRST = RankCoords(0, 0, 0, 0)
PORT_FLAG = "--disaggregation-bootstrap-port"


def test_an_instance_from_first_rank_to_last(
    client: BootstrapClient, make_record: MakeRecord
) -> None:
    topology = Topology(2, 1, 2, 1)
    with pytest.raises(NotReady) as empty:
        client.instance()
    assert (empty.value.registered, empty.value.expected) == (0, 0)
    records = [make_record(topology, coords) for coords in topology.coords()]
    for record in reversed(records[1:]):
        client.register(record)
        with pytest.raises(NotReady) as caught:
            client.instance()
        assert caught.value.expected == 4
        assert FIRST in caught.value.missing
    client.register(records[0])
    instance = client.instance()
    assert instance.config == records[0].config
    assert instance.ranks == tuple(record.rank for record in records)
    assert instance.rank(records[2].rank.coords) == records[2].rank


def test_why_ranks_have_gone_reaches_the_client(
    client: BootstrapClient, make_record: MakeRecord
) -> None:
    client.register(make_record(ONE, FIRST, epoch=1))
    client.register(make_record(Topology(1, 1, 2, 1), FIRST, epoch=2))
    with pytest.raises(NotReady, match="1 ranks with tp_size 1 were replaced"):
        client.instance()


def test_a_refusal_is_final(client: BootstrapClient, make_record: MakeRecord) -> None:
    client.register(make_record(ONE, FIRST, epoch=2))
    with pytest.raises(RegistrationRefused, match="page_size 1, but"):
        client.register(make_record(ONE, FIRST, epoch=2, page_size=1))
    with pytest.raises(RegistrationRefused, match="has been replaced"):
        client.register(make_record(ONE, FIRST, epoch=1))


def test_instances_by_name(server: BootstrapServer, make_record: MakeRecord) -> None:
    address = f"127.0.0.1:{server.port}"
    topology = Topology(3, 1, 1, 1)
    with (
        BootstrapClient(address, WAIT_S) as default,
        BootstrapClient(address, WAIT_S, instance="a.b-C_1") as named,
    ):
        default.register(make_record(ONE, FIRST))
        with pytest.raises(NotReady, match=r"instance a\.b-C_1 is not ready: none"):
            named.instance()
        for coords in topology.coords():
            named.register(make_record(topology, coords))
        assert default.instance().config.topology == ONE
        assert named.instance().config.topology == topology
        named.register_dp_rank(7, 2)
        with pytest.raises(BootstrapError, match="dp_rank 2 does not exist: dp_size is 1"):
            default.register_dp_rank(8, 2)
        assert default.query_dp_ranks([7, 8]) == {7: 2}
    counts = requests.get(f"http://{address}/v1/instances", timeout=30).json()
    assert {name: (of["registered"], of["expected"]) for name, of in counts.items()} == {
        "default": (1, 1),
        "a.b-C_1": (3, 3),
    }
    with pytest.raises(BootstrapError, match="instance name"):
        BootstrapClient(address, instance="a/b")


def test_waiting_is_answered_when_the_last_rank_comes(
    server: BootstrapServer, client: BootstrapClient, make_record: MakeRecord
) -> None:
    """No timing is asserted: were the answer not given at that moment, the wait would end in
    NotReady, or in the timeout of this test."""
    address, topology = f"127.0.0.1:{server.port}", Topology(1, 1, 2, 1)

    def wait() -> Instance:
        with BootstrapClient(address, WAIT_S) as waiting:
            return waiting.instance(wait_s=60)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(wait) for _ in range(8)]
        for epoch, coords in enumerate(topology.coords(), start=1):
            client.register(make_record(topology, coords, epoch))
        instances = [answer.result(timeout=WAIT_S) for answer in answers]
        assert all(instance == client.instance() for instance in instances)
        # News of an instance that is known: a rank was restarted.
        answer = pool.submit(lambda: wait_after(address, instances[0].revision))
        client.register(make_record(topology, FIRST, epoch=9))
        assert answer.result(timeout=WAIT_S).rank(FIRST).epoch == 9


def wait_after(address: str, revision: int) -> Instance:
    with BootstrapClient(address, WAIT_S) as waiting:
        return waiting.instance(wait_s=60, after=revision)


def test_waiting_ends_with_who_is_missing(client: BootstrapClient, make_record: MakeRecord) -> None:
    client.register(make_record(Topology(1, 1, 2, 1), FIRST))
    with pytest.raises(NotReady, match="1 of 2"):
        client.instance(wait_s=0.05)


def test_waiting_ends_with_the_server(make_record: MakeRecord) -> None:
    server = BootstrapServer(host="127.0.0.1", port=0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: wait_after(f"127.0.0.1:{server.port}", 0))
        url = f"http://127.0.0.1:{server.port}/health"
        assert requests.get(url, timeout=30).text == "OK"
        server.close()
        with pytest.raises((NotReady, Unreachable)):
            answer.result(timeout=WAIT_S)


def test_a_taken_place_is_asked_for_until_the_lease_must_have_ended(
    make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server's time stands still, so the lease is still there when it should have ended.
    monkeypatch.setattr(server_module, "TICK_MAX_S", 0.0)
    now_s, naps = [50.0], list[float]()

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        now_s[0] += duration_s

    second = make_record(ONE, FIRST, epoch=2, port=5)
    with (
        BootstrapServer("127.0.0.1", 0, lease_s=30) as server,
        BootstrapClient(
            f"127.0.0.1:{server.port}", WAIT_S, sleep=sleep, clock=lambda: now_s[0]
        ) as client,
    ):
        assert client.register(make_record(ONE, FIRST)) == 30
        with pytest.raises(
            PlaceTaken, match=r"alive at 127\.0\.0\.1 port 10000 .*port 5"
        ) as caught:
            client.register(second)
        assert caught.value.left_s == 30
        assert now_s[0] == pytest.approx(50 + 30 + client_module.TAKEN_MARGIN_S)
        with pytest.raises(PlaceTaken):
            client.try_register(second)
        # The deadline bounds this wait as it bounds the others.
        start_s = now_s[0]
        with pytest.raises(PlaceTaken):
            client.register(second, deadline_s=4)
        assert now_s[0] == pytest.approx(start_s + 4)
        client.release(make_record(ONE, FIRST).rank)
        client.register(second)
        assert client.instance().ranks[0].port == 5
        with pytest.raises(LeaseLost, match="epoch 1 has no lease: epoch 2"):
            client.renew(make_record(ONE, FIRST).rank)
        assert client.renew(second.rank) == 30


def test_answers_are_consistent_while_ranks_come_and_go(
    make_record: MakeRecord,
) -> None:
    topology = Topology(1, 1, 4, 1)
    begun = threading.Barrier(topology.ranks + 2, timeout=WAIT_S)
    lives = 30

    def live(coords: RankCoords) -> None:
        with BootstrapClient(address, WAIT_S) as rank:
            begun.wait()
            for epoch in range(1, lives + 1):
                record = make_record(topology, coords, epoch)
                rank.register(record)
                if epoch % 3 == 0 and epoch < lives:
                    rank.release(record.rank)

    def read() -> int:
        seen, epochs = 0, dict.fromkeys(topology.coords(), 0)
        revision, counts = 0, {(4, 4)}
        with BootstrapClient(address, WAIT_S) as reader:
            begun.wait()
            while min(epochs.values()) < lives:
                try:
                    instance = reader.instance(wait_s=10, after=revision)
                except NotReady as error:
                    counts.add((error.registered + len(error.missing), error.expected))
                    continue
                assert instance.revision > revision
                revision = instance.revision
                seen += 1
                for rank in instance.ranks:
                    assert rank.epoch >= epochs[rank.coords]
                    epochs[rank.coords] = rank.epoch
        # Who is not registered is missing, and nobody else.
        assert counts <= {(0, 0), (4, 4)}
        return seen

    with (
        BootstrapServer("127.0.0.1", 0, lease_s=NEVER_S) as server,
        ThreadPoolExecutor(topology.ranks + 2) as pool,
    ):
        address = f"127.0.0.1:{server.port}"
        ranks = [pool.submit(live, coords) for coords in topology.coords()]
        readers = [pool.submit(read) for _ in range(2)]
        for rank in ranks:
            rank.result(timeout=60)
        assert all(reader.result(timeout=60) >= 1 for reader in readers)


def test_many_rooms_are_asked_for_in_parts(client: BootstrapClient) -> None:
    rooms = range(2**62, 2**62 + ROOMS_PER_QUERY_MAX + 1)
    client.register_dp_rank(rooms[0], 1)
    client.register_dp_rank(rooms[-1], 2)
    assert client.query_dp_ranks(rooms) == {rooms[0]: 1, rooms[-1]: 2}
    assert client.query_dp_ranks([]) == {}
    with pytest.raises(BootstrapError, match="dp_rank -1 does not exist") as caught:
        client.register_dp_rank(1, -1)
    assert "another service" not in str(caught.value)


def test_the_server_may_come_up_later(port: int, make_record: MakeRecord) -> None:
    started: list[BootstrapServer] = []
    naps: list[float] = []

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        if len(naps) == 3:
            started.append(BootstrapServer("127.0.0.1", port, lease_s=NEVER_S))

    with BootstrapClient(f"127.0.0.1:{port}", WAIT_S, sleep=sleep) as client:
        client.register(make_record(ONE, FIRST))
        assert client.instance().ranks[0].coords == FIRST
    started[0].close()
    assert len(naps) == 3
    assert naps == sorted(set(naps))


def test_registration_gives_up_at_the_deadline(make_record: MakeRecord) -> None:
    now_s = [100.0]

    def sleep(duration_s: float) -> None:
        now_s[0] += duration_s

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with BootstrapClient(address, WAIT_S, sleep=sleep, clock=lambda: now_s[0]) as client:
            with pytest.raises(Unreachable) as caught:
                client.register(make_record(ONE, FIRST), deadline_s=9)
            with pytest.raises(Unreachable, match="refused"):
                client.instance()
    assert now_s[0] == pytest.approx(109)
    for words in ("dp 0 cp 0 tp 0 pp 0", "within 9 s", address, "refused"):
        assert words in str(caught.value)


@contextmanager
def stranger(status: int, body: bytes) -> Iterator[str]:
    """Something else that speaks HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = answer  # noqa: N815 - the names that http.server calls
        do_PUT = answer  # noqa: N815
        do_POST = answer  # noqa: N815
        do_DELETE = answer  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>welcome</html>"),
        (404, b"404: Not Found"),
        (301, b""),
        (503, b"busy"),
        (500, b"\xff\x00"),
        (200, b'{"config": 1}'),
        (200, b'"OK"'),
        (200, b'{"lease_s": -1}'),
        (200, b'{"x":' + b"[" * 100_000),
        (503, b'{"x":' + b"[" * 100_000),
        (409, b'{"error": "\xff"}'),
        (410, b"gone"),
    ],
)
def test_strangers_are_recognised(make_record: MakeRecord, status: int, body: bytes) -> None:
    with stranger(status, body) as address, BootstrapClient(address, WAIT_S) as client:
        for ask in (
            client.instance,
            lambda: client.register(make_record(ONE, FIRST)),
            lambda: client.register_dp_rank(1, 0),
            lambda: client.query_dp_ranks([1]),
            lambda: client.renew(make_record(ONE, FIRST).rank),
            lambda: client.release(make_record(ONE, FIRST).rank),
        ):
            with pytest.raises(BootstrapError) as caught:
                ask()
            # A server that is ill may be a registry of ours behind a proxy.
            assert type(caught.value) is (NeverServed if status < 500 else BootstrapError)
            for words in (address, f"status {status}", PORT_FLAG):
                assert words in str(caught.value)


def test_ranks_of_another_release_are_no_strangers() -> None:
    """Their instance says what this release does not know, or lacks what it asks for."""
    body = b'{"config": {"protocol": 3, "form": "new"}, "members": []}'
    with (
        stranger(200, body) as address,
        BootstrapClient(address, WAIT_S) as client,
        pytest.raises(NeverServed, match="version 3 of the hand-over protocol") as caught,
    ):
        client.instance()
    assert caught.value.why is Why.RELEASE


def test_instances_are_listed_that_are_whole(make_record: MakeRecord) -> None:
    two = Topology(1, 1, 2, 1)
    with BootstrapServer("127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.port}"
        with BootstrapClient(address, WAIT_S) as client:
            client.register(make_record(ONE, FIRST))
            assert client.instances() == {"default": client.instance().revision}
        with BootstrapClient(address, WAIT_S, instance="half") as client:
            client.register(make_record(two, FIRST))
            assert list(client.instances()) == ["default"]


def test_endless_answers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES_MAX", 1 << 17)
    with (
        stranger(200, b" " * (1 << 20)) as address,
        BootstrapClient(address, WAIT_S) as client,
        pytest.raises(BootstrapError, match="more than 131072 bytes"),
    ):
        client.instance()


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "http://h:1", "a b:1", "::1:80"]
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(BootstrapError, match="not of the form host:port"):
        BootstrapClient(address)
