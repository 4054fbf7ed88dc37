# SPDX-License-Identifier: Apache-2.0
"""The list of owners in Redis, in etcd and in a registry: what is in it, and what happens when it
is away."""

from __future__ import annotations

import base64
import contextlib
import http.server
import importlib
import logging
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest
from store_etcd import EtcdServer, etcd_server, index_server
from store_makers import until
from store_redis import KEYS, RedisServer
from store_registry import RegistryServer, registry_server

from bootstrap_server import BootstrapServer
from bootstrap_server.admission.secret import Keys
from bootstrap_server.ranks.store_owners import KEPT_S_MAX
from kvstore.membership import index_etcd, index_redis, members
from kvstore.membership.members import Members, host_towards

HOST = "127.0.0.1"
NAME = "0" * 31 + "1"
PLACE = "tcp://127.0.0.1:4711"
OTHER = Keys.from_secrets([b"another secret of the tests"])


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with etcd_server() as server:
        yield server


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "PERIOD_S", 0.02)


def test_owners_are_found_and_leave(anywhere: RedisServer | EtcdServer | RegistryServer) -> None:
    ours, theirs = Members(anywhere.url, HOST, KEYS), Members(anywhere.url, HOST, KEYS)
    assert theirs.listen_at == "tcp://127.0.0.1:*"
    theirs.announce(NAME, PLACE)
    until(lambda: NAME in ours.endpoints(), "the owner is found")
    (where,) = ours.endpoints()[NAME]
    assert where.endpoint == PLACE
    assert where.key == KEYS.control[0]
    theirs.close()
    until(lambda: not ours.endpoints(), "it has taken its entry out")
    ours.close()


@pytest.mark.slow
def test_who_does_not_renew_its_entry_is_forgotten(
    anywhere: RedisServer | EtcdServer | RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "FORGOTTEN_S", 1)
    ours, theirs = Members(anywhere.url, HOST, KEYS), Members(anywhere.url, HOST, KEYS)
    theirs.announce(NAME, PLACE)
    until(lambda: ours.endpoints(), "it is found")
    until(lambda: len(ours.endpoints()) == 1, "an entry that is renewed stays")
    theirs._ended.set()
    theirs._thread.join()
    until(lambda: not ours.endpoints(), "it is forgotten")
    theirs.close()
    ours.close()


def test_a_list_that_has_lost_everything_is_written_again(
    anywhere: RedisServer | EtcdServer | RegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Members(anywhere.url, HOST, KEYS), Members(anywhere.url, HOST, KEYS)
    theirs.announce(NAME, PLACE)
    until(lambda: ours.endpoints(), "it is found")
    with caplog.at_level(logging.INFO, "kvstore.membership.members"):
        anywhere.kill()
        until(lambda: caplog.text.count("cannot be asked") == 2, "both say that it is away")
        assert ours.endpoints(), "what was known is known"
        anywhere.start()
        until(lambda: caplog.text.count("answers again") == 2, "both find it again")
    late = Members(anywhere.url, HOST, KEYS)
    until(lambda: NAME in late.endpoints(), "a new process finds the owner")
    until(lambda: NAME in ours.endpoints(), "and so do those that have read the empty list")
    for one in (ours, theirs, late):
        one.close()


def test_entries_that_cannot_be_used_are_left_out(
    index: RedisServer | EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    of_others = f"{'0' * 32} {members._key_id(OTHER.control[0])} {PLACE}"
    strange = f"{NAME} {'0' * 16} file:///etc/passwd"
    for entry in (of_others.encode(), b"\xff\xfe", strange.encode(), b"x" * 100_000):
        index.write(entry)
    ours = Members(index.url, HOST, KEYS)
    ours.announce(NAME, PLACE)
    until(lambda: list(ours.endpoints()) == [NAME], "its own entry alone")
    assert caplog.text.count("this process does not have its secret") == 1
    assert caplog.text.count("it is not an owner's") == 3
    ours.close()


def test_names_of_hosts_are_left_out(
    index: RedisServer | EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq would look them up in the thread that serves all its connections."""
    named = f"{NAME} {members._key_id(KEYS.control[0])} tcp://no-such-host.invalid:4711"
    index.write(named.encode())
    index.write(named.replace("no-such-host.invalid", "1.2.3.4.5").encode())
    ours = Members(index.url, "localhost", KEYS)
    assert ours.listen_at in ("tcp://127.0.0.1:*", "tcp://[::1]:*")
    ours.announce(NAME, PLACE)
    until(lambda: NAME in ours.endpoints(), "its own entry")
    assert [one.endpoint for one in ours.endpoints()[NAME]] == [PLACE]
    assert caplog.text.count("it is not an owner's") == 2
    ours.close()
    with pytest.raises(ValueError, match="leads to no address"):
        Members(index.url, "no-such-host.invalid", KEYS)


def test_a_false_place_of_an_owner_hides_no_other(index: RedisServer | EtcdServer) -> None:
    key_id = members._key_id(KEYS.control[0])
    index.write(f"{NAME} {key_id} tcp://127.0.0.1:1".encode())
    ours = Members(index.url, HOST, KEYS)
    ours.announce(NAME, PLACE)
    until(lambda: len(ours.endpoints().get(NAME, ())) == 2, "both")
    ours.close()


def test_entries_of_the_future_do_not_stay() -> None:
    """Redis's clock was set back, or a stranger has written them: they would never be too old."""
    with index_server("redis") as index:
        assert isinstance(index, RedisServer)
        false = f"{'0' * 32} {members._key_id(KEYS.control[0])} {PLACE}"
        client = index.client()
        client.zadd(index_redis.KEYS[0], {false: 1e12})
        ours = Members(index.url, HOST, KEYS)
        ours.announce(NAME, PLACE)
        until(lambda: list(ours.endpoints()) == [NAME], "its own entry alone")
        assert client.zcard(index_redis.KEYS[0]) == 1
        client.close()
        ours.close()


def test_while_a_secret_is_replaced_both_are_taken(index: RedisServer | EtcdServer) -> None:
    old, new = b"the old secret of the tests", b"the new secret of the tests"
    ours = Members(index.url, HOST, Keys.from_secrets([new, old]))
    theirs = Members(index.url, HOST, Keys.from_secrets([old, new]))
    theirs.announce(NAME, PLACE)
    until(lambda: ours.endpoints(), "it is found")
    (where,) = ours.endpoints()[NAME]
    assert where.key == Keys.from_secrets([old]).control[0]
    ours.close()
    theirs.close()


def test_while_a_secret_is_replaced_a_registry_serves_both() -> None:
    old, new = b"the old secret of the tests", b"the new secret of the tests"
    with registry_server(new, old) as registry:
        ours = Members(registry.url, HOST, Keys.from_secrets([new, old]))
        theirs = Members(registry.url, HOST, Keys.from_secrets([old, new]))
        theirs.announce(NAME, PLACE)
        until(lambda: NAME in ours.endpoints(), "it is found")
        ours.close()
        theirs.close()


def test_a_registry_with_another_secret_or_none_is_not_believed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with registry_server(b"another secret of the tests") as registry:
        ours = Members(registry.url, HOST, KEYS)
        ours.announce(NAME, PLACE)
        assert not ours.endpoints()
        assert "it has another secret" in caplog.text
        ours.close()
    with BootstrapServer(HOST, 0) as open_to_all:
        ours = Members(f"registry://{HOST}:{open_to_all.port}", HOST, KEYS)
        ours.announce(NAME, PLACE)
        assert not ours.endpoints()
        assert "does not prove that it has our secret" in caplog.text
        ours.close()


def test_what_a_registry_refuses_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "FORGOTTEN_S", KEPT_S_MAX + 1)
    with registry_server() as registry:
        Members(registry.url, HOST, KEYS).close()
    assert "the registry answers with status 400" in caplog.text
    assert "no new process of the store is found until it answers" in caplog.text


def test_a_registry_has_an_address_of_ipv6() -> None:
    with BootstrapServer("::1", 0, keys=KEYS.registry) as registry:
        ours = Members(f"registry://[::1]:{registry.port}", "::1", KEYS)
        ours.announce(NAME, "tcp://[::1]:4711")
        (where,) = ours.endpoints()[NAME]
        assert where.endpoint == "tcp://[::1]:4711"
        ours.close()


def test_one_that_is_away_at_the_start_is_told_and_waited_for(
    anywhere: RedisServer | EtcdServer | RegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    anywhere.kill()
    ours = Members(anywhere.url, HOST, KEYS)
    assert "no new process of the store is found until it answers" in caplog.text
    ours.announce(NAME, PLACE)
    assert not ours.endpoints()
    anywhere.start()
    until(lambda: NAME in ours.endpoints(), "the list is back")
    anywhere.kill()
    ours.close()


@pytest.mark.parametrize("url", ["host:6379", "http://host", "redis://", "redis:///0", "etcd:///"])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not a URL of redis://, .* with a host"):
        Members(url, HOST, KEYS)


def test_passwords_are_not_told() -> None:
    with pytest.raises(ValueError, match="index='http://…@host' is not a URL"):
        Members("http://user:password@host", HOST, KEYS)


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ValueError, match=r"pip install 'sglang-mooncake\[redis\]'"):
        Members("redis://host", HOST, KEYS)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://me:secret@host",
        "etcd://host/prefix",
        "registry://me:secret@host",
        "registry://host/prefix",
    ],
)
def test_what_an_index_does_not_serve_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"without users and without a path|has no users") as told:
        Members(url, HOST, KEYS)
    assert "secret" not in str(told.value)


def test_an_entry_that_somebody_has_removed_from_etcd_is_written_again(etcd: EtcdServer) -> None:
    ours = Members(etcd.url, HOST, KEYS)
    ours.announce(NAME, PLACE)
    until(lambda: ours.endpoints(), "it is found")
    key = base64.b64encode(index_etcd.PREFIX + NAME.encode()).decode()
    assert etcd.ask("kv/deleterange", key=key)["deleted"] == "1"
    until(lambda: etcd.ask("kv/range", key=key).get("count") == "1", "it is there again")
    ours.close()
    assert "count" not in etcd.ask("kv/range", key=key)


ODD_ANSWERS = {
    "no JSON": b"<html>",
    "of another shape": b'{"kvs": 1}',
    "no base64": b'{"kvs": [{"value": "?"}]}',
    "nested too deeply": b'{"more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "too long": b" " * 3_000_000,
}


@pytest.mark.parametrize("odd", ODD_ANSWERS)
def test_answers_that_are_not_etcds_cost_nothing_but_new_processes(
    odd: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_etcd, "ANSWER_BYTES_MAX", 2_000_000)

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(ODD_ANSWERS[odd])))
            self.end_headers()
            self.wfile.write(ODD_ANSWERS[odd])

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((HOST, 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        ours = Members(f"etcd://{HOST}:{server.server_port}", HOST, KEYS)
        ours.announce(NAME, PLACE)
        assert not ours.endpoints()
        assert caplog.text.count("cannot be asked") == 1
        ours.close()
        server.shutdown()
        thread.join()


ODD_REPLIES = {
    "no list": b":5\r\n",
    "an empty list": b"*0\r\n",
    "a version that is a number": b"*1\r\n:5\r\n",
    "entries that are a number": b"*2\r\n$1\r\n1\r\n:5\r\n",
    "an entry that is a number": b"*2\r\n$1\r\n1\r\n*1\r\n:5\r\n",
    "no greeting": b":5\r\n",
    "no number": b":five\r\n",
    "no reply of Redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "nested too deeply": b"*1\r\n" * 100_000 + b":5\r\n",
}


@pytest.mark.parametrize("odd", ODD_REPLIES)
def test_replies_that_are_not_redis_cost_nothing_but_new_processes(
    odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Stranger(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                while count := self.rfile.readline()[1:]:
                    words = [self.word() for _ in range(int(count))]
                    self.wfile.write(replies.get(words[0], b"+OK\r\n"))

        def word(self) -> bytes:
            return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2]

    replies = dict.fromkeys([b"EVALSHA", b"EVAL"], ODD_REPLIES[odd])
    if odd != "no greeting":
        replies[b"HELLO"] = b"%1\r\n+proto\r\n:3\r\n"
    with socketserver.ThreadingTCPServer((HOST, 0), Stranger) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            ours = Members(f"redis://{HOST}:{server.server_address[1]}", HOST, KEYS)
            ours.announce(NAME, PLACE)
            assert not ours.endpoints()
            assert caplog.text.count("cannot be asked") == 1
            ours.close()
        finally:
            server.shutdown()
            thread.join()


def test_the_address_that_leads_to_the_index() -> None:
    assert host_towards("redis://127.0.0.1:6379/0") == "127.0.0.1"
    assert host_towards("redis://[::1]") == "::1"
    assert host_towards("etcd://127.0.0.1") == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        host_towards("redis://no-such-host.invalid")
