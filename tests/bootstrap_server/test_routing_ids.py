# SPDX-License-Identifier: Apache-2.0
"""A ROUTER numbers its peers itself, whatever they claim."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import zmq
from zmtp_peer import VERSIONS, claim

from bootstrap_server.admission.routing_ids import ignore_claimed_ids

TIMEOUT_S = 30.0


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.linger = 0
        made.rcvtimeo = int(TIMEOUT_S * 1000)
        made.router_mandatory = 1
        yield made


@pytest.fixture
def port(router: zmq.Socket[bytes]) -> int:
    bound = router.bind_to_random_port("tcp://127.0.0.1")
    ignore_claimed_ids(router)
    return bound


def number(routing_id: bytes) -> int:
    assert routing_id[0] == 0
    return int.from_bytes(routing_id[1:], "big")


def next_ids(routing_id: bytes, count: int) -> list[bytes]:
    first = number(routing_id) + 1
    return [b"\0" + (one & 0xFFFF_FFFF).to_bytes(4, "big") for one in range(first, first + count)]


@pytest.mark.parametrize("version", VERSIONS)
def test_who_claims_the_next_ids_gets_others_and_takes_none_away(router, port, version):
    """libzmq would end the process at the first of the later ones."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(claim(port, b"", b"first"))
        first, _ = router.recv_multipart()
        later = next_ids(first, 16)
        for turn, wanted in enumerate(reversed(later[8:])):
            stack.enter_context(claim(port, wanted, b"thief", version))
            given, said = router.recv_multipart()
            assert (given, said) == (later[turn], b"thief")
        for turn in range(8, 16):
            stack.enter_context(claim(port, b"", b"later"))
            assert router.recv_multipart() == [later[turn], b"later"]


def test_who_claims_the_id_of_another_peer_is_another_peer(router, port):
    with claim(port, b"", b"first") as first:
        mine, _ = router.recv_multipart()
        with claim(port, mine, b"thief") as thief:
            his, _ = router.recv_multipart()
            assert his != mine
            router.send_multipart([mine, b"secret"])
            router.send_multipart([his, b"nothing"])
            for sock, wanted in ((first, b"secret"), (thief, b"nothing")):
                said = b""
                while not said.endswith(b"\0" + bytes([len(wanted)]) + wanted):
                    data = sock.recv(4096)
                    assert data, "the connection has been ended"
                    said += data
                assert (b"secret" in said) == (sock is first)


def test_peers_of_libzmq_are_served_as_before(router, port):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, int(TIMEOUT_S * 1000)
        dealer.setsockopt(zmq.IDENTITY, b"a name")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send_multipart([b"in", b"two frames"])
        routing_id, *said = router.recv_multipart()
        assert said == [b"in", b"two frames"]
        assert len(routing_id) == 5
        for _ in range(3):
            router.send_multipart([routing_id, b"answer"])
            assert dealer.recv_multipart() == [b"answer"]


def test_a_send_to_a_peer_that_is_gone_raises(router, port):
    with claim(port, b"", b"first"):
        routing_id, _ = router.recv_multipart()

    def say_on() -> None:
        for _ in range(int(TIMEOUT_S * 1000)):  # libzmq learns beside us that it is gone
            router.send_multipart([routing_id, b"x"], zmq.NOBLOCK)
            router.poll(1)

    with pytest.raises(zmq.ZMQError) as raised:
        say_on()
    assert raised.value.errno == zmq.EHOSTUNREACH
