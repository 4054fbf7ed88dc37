# SPDX-License-Identifier: Apache-2.0
"""Sockets over TCP: who has a secret in common with an owner is let in, and nobody else."""

from __future__ import annotations

import contextlib
import logging
from urllib.parse import urlsplit

import pytest
import zmq
from store_makers import TIMEOUT_S, until
from te_ports import two_ports
from zmtp_peer import claim

from kvstore.protocol.sockets import Sockets, Where

OLD, NEW = b"o" * 32, b"n" * 32
ADDRESS = "tcp://127.0.0.1:*"


def asks(client: zmq.Socket[bytes], owner: zmq.Socket[bytes]) -> bytes:
    """What comes back for a question."""
    client.send(b"question")
    assert owner.poll(TIMEOUT_S * 1000)
    name, question = owner.recv_multipart()
    owner.send_multipart([name, b"answer to " + question])
    assert client.poll(TIMEOUT_S * 1000)
    return client.recv()


@pytest.mark.parametrize(
    ("owners", "clients"),
    [((), b""), ((NEW,), NEW), ((NEW, OLD), NEW)],
    ids=["in plain", "one secret", "two secrets"],
)
def test_holders_are_let_in(owners: tuple[bytes, ...], clients: bytes) -> None:
    ours, theirs = Sockets(owners), Sockets()
    owner, endpoint = ours.listen(ADDRESS)
    client = theirs.connect(Where(endpoint, clients))
    assert asks(client, owner) == b"answer to question"
    theirs.close()
    ours.close()


@pytest.mark.parametrize("key", [b"", OLD], ids=["in plain", "another secret"])
def test_others_are_not_heard(key: bytes) -> None:
    ours, theirs = Sockets((NEW,)), Sockets()
    owner, endpoint = ours.listen(ADDRESS)
    stranger = theirs.connect(Where(endpoint, key))
    stranger.send(b"let me in")
    holder = theirs.connect(Where(endpoint, NEW))
    assert asks(holder, owner) == b"answer to question", "the stranger's message has not come"
    assert not owner.poll(100)
    theirs.close()
    ours.close()


def test_who_knows_the_owners_key_but_not_the_clients_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client proves a key of its own, too: libzmq alone lets in whoever knows the owner's."""
    ours, theirs = Sockets((NEW,)), Sockets()
    owner, endpoint = ours.listen(ADDRESS)
    stranger = theirs.connect(Where(endpoint, NEW))
    stranger.disconnect(endpoint)
    public, secret = zmq.curve_keypair()
    stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
    stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
    stranger.connect(endpoint)
    stranger.send(b"let me in")
    with caplog.at_level(logging.WARNING, "kvstore.protocol.sockets"):
        until(lambda: "its secret differs" in caplog.text, "the refusal is told")
    assert not owner.poll(100)
    theirs.close()
    ours.close()


def test_who_claims_the_routing_ids_that_come_next_ends_no_owner() -> None:
    """libzmq would abort the process when it gives out the first of them."""
    ours = Sockets()
    owner, endpoint = ours.listen(ADDRESS)
    owner.rcvtimeo = int(TIMEOUT_S * 1000)
    port = urlsplit(endpoint).port
    assert port is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(claim(port, b"", b"first"))
        first = int.from_bytes(owner.recv_multipart()[0][1:], "big")
        later = [
            bytes(1) + (one & 0xFFFF_FFFF).to_bytes(4, "big") for one in range(first + 1, first + 9)
        ]
        for wanted, given in zip(reversed(later), later, strict=True):
            stack.enter_context(claim(port, wanted, b"thief"))
            assert owner.recv_multipart() == [given, b"thief"]
        for _ in later:
            stack.enter_context(claim(port, b"", b"later"))
            assert owner.recv_multipart()[0] not in later
    ours.close()


def test_over_ipv6() -> None:
    ours = Sockets((NEW,))
    owner, endpoint = ours.listen("tcp://[::1]:*")
    client = ours.connect(Where(endpoint, NEW))
    assert asks(client, owner) == b"answer to question"
    ours.close()


def test_the_first_free_port_of_a_range() -> None:
    with two_ports(taken=1) as first:
        ours = Sockets(ports=range(first, first + 2))
        _, endpoint = ours.listen("tcp://127.0.0.1:*")
        assert endpoint == f"tcp://127.0.0.1:{first + 1}"
        with pytest.raises(OSError, match=f"none of the ports from {first} to {first + 1} is free"):
            ours.listen("tcp://127.0.0.1:*")
        with pytest.raises(zmq.ZMQError):
            ours.listen("tcp://192.0.2.1:*")
        ours.close()


def test_an_address_that_is_not_this_hosts() -> None:
    sockets = Sockets()
    with pytest.raises(zmq.ZMQError):
        sockets.listen("tcp://192.0.2.1:*")
    with pytest.raises(zmq.ZMQError):
        sockets.connect(Where("nowhere"))
    sockets.close()


def test_the_end_of_a_connection_is_told_and_the_next_one_serves() -> None:
    ours, theirs = Sockets(), Sockets()
    owner, endpoint = ours.listen(ADDRESS)
    client, ended = theirs.connect_watched(Where(endpoint))
    assert asks(client, owner) == b"answer to question"
    assert not ended.poll(0)
    owner.close()
    assert ended.poll(TIMEOUT_S * 1000)
    client.disable_monitor()
    ended.close()
    found: list[zmq.Socket[bytes]] = []

    def listens() -> bool:
        """The port is free once libzmq's own thread has closed it, which may be later."""
        with contextlib.suppress(zmq.ZMQError):
            found.append(ours.listen(endpoint)[0])
        return bool(found)

    until(listens, "it listens again")
    assert asks(client, found[0]) == b"answer to question"
    theirs.close()
    ours.close()


def test_an_owner_that_does_not_answer_is_dialled_anew_and_not_when_tcp_likes() -> None:
    theirs = Sockets()
    client = theirs.connect(Where("tcp://127.0.0.1:9"))
    assert 0 < client.getsockopt(zmq.CONNECT_TIMEOUT) < 1_000
    theirs.close()
