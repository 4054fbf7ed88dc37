# SPDX-License-Identifier: Apache-2.0
"""What a store tells Prometheus: figures that agree with what was done, and an HTTP server that no
client can keep."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_host import end_all, shared
from store_makers import SIG, TIMEOUT_S, Room, config, contents, keys, until
from store_meeting import owning

from bootstrap_server.admission import connections
from bootstrap_server.build import build_text
from bootstrap_server.prometheus_text import CONTENT_TYPE
from kvstore.client.load_times import AdmissionCounts
from kvstore.client.status import OwnerSeen, StoreStatus, with_owner
from kvstore.host.lease import Lease
from kvstore.host.pool import HostPool
from kvstore.metrics import http
from kvstore.metrics.http import MetricsServer
from kvstore.metrics.table import METRICS, PREFIX, Key, counters, gauges, text
from kvstore.objects.outcomes import Got, Put
from kvstore.owner.card import OwnerStats
from kvstore.protocol.asking import NoAnswer
from kvstore.store import Store
from te.version import version

N, NBYTES = 4, 5000
SLOT_BYTES = 8192
BY_NAME = {one.name: one for one in METRICS}
OWN = OwnerStats(12, {"granted": 5, "no space": 2}, 11, 1, 3, 4, 99, 8192)
OWNERS = (OwnerSeen("a", 7, True), OwnerSeen("b", 5, False), OwnerSeen("c", 1, True))
STATUS = StoreStatus(
    7, "python3", 4096, OWN, OWNERS, {"right": 9}, {"stored": 2}, {"found": 6}, 90, 20, 333
)
#: With the release, which one of the store's figures is not.
SERVED = text(STATUS) + build_text(version())


def values(answer: str) -> dict[Key, float]:
    """From the text format."""
    found: dict[Key, float] = {}
    for line in answer.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()
            given = tuple(re.findall(r'\w+="([^"]*)"', labels or ""))
            found[name.removeprefix(PREFIX), given] = float(value)
    return found


def test_names_are_those_that_prometheus_wants() -> None:
    assert len(BY_NAME) == len(METRICS)
    for one in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", one.name)
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert one.help.endswith(".")


def test_every_metric_has_a_figure_with_its_labels() -> None:
    told = counters(STATUS) | gauges(STATUS)
    for name, labels in told:
        assert len(labels) == len(BY_NAME[name].labels), name
    assert {name for name, _ in told} == set(BY_NAME)


def test_every_field_of_the_status_is_told_or_left_out_on_purpose() -> None:
    """A new figure of the store should not be forgotten here."""
    told = {
        "memory", "own", "owners", "gets", "puts", "lookups", "bytes_got", "bytes_put",
        "table_bytes", "admission",
    }  # fmt: skip
    names_the_process = {"pid", "process", "label"}
    assert set(StoreStatus.__struct_fields__) == told | names_the_process
    told_of_own = {
        "objects", "claims", "published", "abandoned", "evicted", "removed", "bytes_used",
        "lower_tier", "lower_tier_bytes", "demoting", "demoted", "promoted", "dropped",
        "tier_failed", "tier_corrupted", "pinned",
    }  # fmt: skip
    of_the_log, of_the_settings = {"changes"}, {"lower_tier_capacity"}
    known = told_of_own | of_the_log | of_the_settings
    assert {one.name for one in fields(OwnerStats)} == known


def test_figures_are_those_that_were_counted() -> None:
    told = counters(STATUS) | gauges(STATUS)
    assert told["gets_total", ("right",)] == 9
    assert told["gets_total", ("moved",)] == 0, "a counter is there before it counts"
    assert told["claims_total", ("no space",)] == 2
    assert told["used_bytes", ()] == 8192
    assert told["owners", ("usable",)] == 2
    assert told["owners", ("unusable",)] == 1
    assert told["known_objects", ()] == 13


def test_loads_that_were_judged_are_told() -> None:
    counts = AdmissionCounts(5, 3, probes=1, loads=7, expected_s=1.5, took_s=2.5, unpaid=2)
    told = counters(msgspec.structs.replace(STATUS, admission=counts))
    assert {key: value for key, value in told.items() if key[0].startswith("admission")} == {
        ("admission_objects_total", ("admitted",)): 5,
        ("admission_objects_total", ("declined",)): 3,
        ("admission_loads_total", ("paid",)): 5,
        ("admission_loads_total", ("unpaid",)): 2,
        ("admission_loads_seconds_total", ("expected",)): 1.5,
        ("admission_loads_seconds_total", ("took",)): 2.5,
    }


def test_who_lends_nothing_tells_nothing_of_it() -> None:
    idle = StoreStatus(8, "x", 0, None, (), {}, {}, {}, 0, 0, 0)
    told = counters(idle) | gauges(idle)
    assert told["lent_bytes", ()] == 0
    assert not {"objects", "used_bytes", "evicted_total"} & {name for name, _ in told}


@pytest.mark.parametrize("tells", [False, True])
def test_who_uses_the_owner_of_a_host_tells_also_what_that_one_knows(tells: bool) -> None:
    seen = OwnerSeen("process 7", 20, True)
    mine = StoreStatus(8, "x", 0, None, (seen,), {"right": 1}, {}, {}, 0, 0, 0)
    found = with_owner(mine, STATUS, STATUS.own if tells else None)
    told = counters(found) | gauges(found)
    assert told["gets_total", ("right",)] == 1, "its own"
    assert told["owners", ("usable",)] == 3
    assert told["owners", ("unusable",)] == 1
    assert told["known_objects", ()] == 12 + 13
    assert told["lent_bytes", ()] == (4096 if tells else 0)
    assert told["table_bytes", ()] == (333 if tells else 0)
    assert told.get(("objects", ())) == (12 if tells else None)
    assert told.get(("published_total", ())) == (11 if tells else None)


def test_what_only_rises_can_be_told_from_a_moment_on() -> None:
    own = STATUS.own
    assert own is not None
    begun = msgspec.structs.replace(STATUS, own=own.since(own))
    told = counters(msgspec.structs.replace(STATUS, own=None))
    assert not any(value for key, value in counters(begun).items() if key not in told)
    assert gauges(begun) == gauges(STATUS)
    assert own.since(own).behind(own) == own


def late(*_: object) -> None:
    raise NoAnswer("late")


@pytest.mark.slow
def test_one_process_of_a_host_tells_what_lies_there(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with Store(shared(directory)) as first, Store(shared(directory)) as second:
            room = Room(first, N, NBYTES)
            room.bytes[:] = contents(N, NBYTES)
            assert first.put(keys(N), SIG, room.pieces) == [Put.STORED] * N
            (lender,) = second.ask_lenders()
            assert (lender.objects, lender.usable) == (N, True)
            told = gauges(first.figures())
            assert told["objects", ()] == told["known_objects", ()] == N, "who asks tells nobody"
            assert told["lent_bytes", ()] == 16 << 20
            assert told["owners", ("usable",)] == 1
            others = gauges(second.figures())
            assert ("objects", ()) not in others
            assert others["known_objects", ()] == N
            assert others["lent_bytes", ()] == others["table_bytes", ()] == 0
            assert not caplog.records
            pool = first._owners
            assert isinstance(pool, HostPool)
            with monkeypatch.context() as patch:
                assert pool._link is not None
                patch.setattr(pool._link.caller, "ask", late)
                assert gauges(first.figures()) == told, "it is late, and nobody else tells it"
                patch.setattr(pool, "_answer_until_s", 0.0)
                assert ("objects", ()) not in gauges(first.figures())
                assert "what the owner of this host's store holds is not told: late" in caplog.text
            monkeypatch.setattr(Lease, "_start", lambda _: None)  # Nobody starts the next one.
            end_all(directory)
            until(lambda: ("objects", ()) not in gauges(first.figures()), "the end is noticed")
            assert gauges(first.figures())["lent_bytes", ()] == 0
    finally:
        end_all(directory)


COUNTS = st.integers(0, 1 << 50)


@pytest.mark.slow
@given(st.builds(
    StoreStatus, pid=st.just(1), process=st.just("x"), memory=COUNTS, own=st.just(OWN),
    owners=st.just(OWNERS), gets=st.dictionaries(st.sampled_from([g.value for g in Got]), COUNTS),
    puts=st.dictionaries(st.sampled_from([p.value for p in Put]), COUNTS),
    lookups=st.dictionaries(st.sampled_from(["found", "missing", "rejected"]), COUNTS),
    bytes_got=COUNTS, bytes_put=COUNTS, table_bytes=COUNTS,
))  # fmt: skip
def test_the_text_says_what_the_figures_are(status: StoreStatus) -> None:
    assert values(text(status)) == counters(status) | gauges(status)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return answer.read().decode()


@pytest.mark.slow
@pytest.mark.usefixtures("owners_end")
def test_a_process_that_lends_memory_tells_what_lies_there(directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvstore",
        "serve",
        "--memory=4MiB",
        f"--directory={directory}/s",
        "--metrics=127.0.0.1:0",
    ]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process,
        Store(shared(directory / "s", 0)) as store,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("kvstore: metrics at ").strip()
            room = Room(store, N, NBYTES)
            room.bytes[:] = contents(N, NBYTES)
            until(lambda: store.put(keys(N), SIG, room.pieces) == [Put.STORED] * N)
            told = values(get(url))
            assert told["objects", ()] == told["published_total", ()] == N
            assert told["used_bytes", ()] == N * SLOT_BYTES
            assert told["lent_bytes", ()] == 4 << 20
            assert told["lookups_total", ("found",)] == 0, "its own, not those of others"
            with Store(shared(directory / "s", 0)) as user:
                assert ("objects", ()) not in gauges(user.figures()), "the owner tells it itself"
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def test_a_client_counts_what_it_has_asked_for(directory: Path) -> None:
    with owning(config(directory / "s", 4 << 20)) as store:
        room = Room(store, N, NBYTES)
        room.bytes[:] = contents(N, NBYTES)
        until(lambda: store.put(keys(N), SIG, room.pieces) == [Put.STORED] * N)
        store.exists(keys(N + 2), SIG, NBYTES)
        store.exists(keys(1), SIG, NBYTES + 1)
        store.get(keys(N), SIG, room.pieces)
        told = counters(store.status())
    assert told["lookups_total", ("found",)] == N
    assert told["lookups_total", ("missing",)] == 2
    assert told["lookups_total", ("rejected",)] == 1
    assert told["gets_total", ("right",)] == N
    assert told["got_bytes_total", ()] == told["put_bytes_total", ()] == N * NBYTES


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    """It looks often for clients that do not go on."""
    monkeypatch.setattr(http, "SWEEP_S", 0.02)
    with MetricsServer(lambda: STATUS, "127.0.0.1", 0) as server:
        yield server


def address(server: MetricsServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
    return host, int(port)


def test_only_metrics_are_there(server: MetricsServer) -> None:
    assert get(f"{server.url}?x=1") == SERVED
    for path, method, code in (("/", "GET", 404), ("/metrics", "POST", 405)):
        request = urllib.request.Request(server.url.removesuffix("/metrics") + path, method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=TIMEOUT_S)
        assert refused.value.code == code
        refused.value.close()


@pytest.mark.parametrize("sent", [b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nHost: "])
def test_clients_that_do_not_go_on_keep_nobody(
    server: MetricsServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(address(server), timeout=TIMEOUT_S))
            for _ in range(20)
        ]
        for one in slow:
            one.sendall(sent)
        assert get(server.url) == SERVED, "nobody waits for them"
        monkeypatch.setattr(connections, "HEAD_DEADLINE_S", 0.0)
        for one in slow:
            assert one.recv(65536).startswith(b"HTTP/1.1 408"), "they are told, and hung up on"
            assert one.recv(65536) == b""


def test_heads_are_bounded_as_those_of_the_registry(server: MetricsServer) -> None:
    for count, status in ((connections.FIELDS_MAX, b"200"), (connections.FIELDS_MAX + 1, b"400")):
        head = b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"X-A: x\r\n" * (count - 1) + b"\r\n"
        with socket.create_connection(address(server), timeout=TIMEOUT_S) as client:
            client.sendall(head)
            assert client.recv(12)[9:] == status


def test_a_port_that_is_taken_is_named(server: MetricsServer) -> None:
    host, port = address(server)
    with pytest.raises(OSError, match=f"cannot answer GET /metrics at {host}:{port}: .* in use"):
        MetricsServer(lambda: STATUS, host, port)


def test_ipv6() -> None:
    with MetricsServer(lambda: STATUS, "::1", 0) as server:
        assert server.url.startswith("http://[::1]:")
        assert get(server.url) == SERVED


def test_a_bug_in_the_figures_ends_neither_the_server_nor_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter([None, STATUS])
    with MetricsServer(lambda: next(answers), "127.0.0.1", 0) as server:
        with pytest.raises(urllib.error.HTTPError) as failed:
            get(server.url)
        assert failed.value.code == 500
        failed.value.close()
        assert get(server.url) == SERVED
    assert "a bug in the store: /metrics was not answered" in caplog.text


def test_clients_that_go_away_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), MetricsServer(lambda: STATUS, "127.0.0.1", 0) as server:
        port = int(server.url.split(":")[-1].removesuffix("/metrics"))
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
                client.sendall(b"GET /me")
                # So that closing it resets the connection.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(server.url) == SERVED
    assert not caplog.messages


@pytest.mark.slow
def test_an_address_that_is_none_is_refused() -> None:
    command = [sys.executable, "-m", "kvstore", "serve", "--memory=4MiB", "--metrics=9401"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert "'9401' is not HOST:PORT, such as 0.0.0.0:9401" in done.stderr
