# SPDX-License-Identifier: Apache-2.0
"""Hellos at a prefill rank: who gets an answer while others wait for theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from handover import HOST, WAIT_S, until
from prefill_links import OLD, Dealer, Prefill, hello

import te
from bootstrap_server.secret import Keys
from sglang_mooncake.links import prefill as links
from sglang_mooncake.links.curve import seat_pair, take_seat
from sglang_mooncake.messages import decode, encode


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    with Prefill(OLD) as made:
        yield made


def test_a_host_whose_engines_do_not_answer_leaves_threads_to_other_hosts():
    """Each engine of a host that has been cut off holds a thread for 5 s."""
    answers, cut_off = "127.0.0.2", "127.0.0.3"
    with Prefill(Keys()) as prefill, zmq.Context() as context, contextlib.ExitStack() as stack:

        def say_hello(host: str, name: str) -> zmq.Socket[bytes]:
            made = stack.enter_context(context.socket(zmq.DEALER))
            made.setsockopt(zmq.LINGER, 0)
            made.connect(f"tcp://{host}:0;{HOST}:{prefill.port}")
            made.send(encode(msgspec.structs.replace(hello(name), card=host.encode())))
            return made

        def connect(card: bytes) -> te.Peer:
            if card.decode() == cut_off:
                prefill.may_connect.wait(WAIT_S)
            raise te.Error("no engine")

        prefill.connect = connect  # type: ignore[method-assign]
        waiting = [say_hello(cut_off, f"rank {n}") for n in range(links.CONNECT_THREADS + 1)]
        until(lambda: len(prefill.links._greeting) == len(waiting), "all have said hello")
        other = say_hello(answers, "another")
        assert other.poll(WAIT_S * 1000), "it is held up"
        assert "no engine" in decode(other.recv()).refused
        assert len(prefill.links._greeting) == len(waiting), "they wait still"
        prefill.may_connect.set()
        for one in waiting:
            assert one.poll(WAIT_S * 1000), "it is forgotten"


def test_a_holder_of_a_seat_has_so_many_hellos_and_no_more(prefill, monkeypatch):
    monkeypatch.setattr(links, "GREETINGS_OF_SEAT_MAX", 2)
    crowd = [Dealer(prefill, seat_pair(OLD.control[0], 1)) for _ in range(3)]
    try:
        for dealer in crowd[:2]:
            dealer.say(hello())
        until(lambda: len(prefill.links._greeting) == 2, "two are being connected")
        crowd[2].say(hello())
        refused = crowd[2].hear()
        assert "2 decode ranks are being connected: say hello again later" in refused.refused
        with Dealer(prefill, seat_pair(OLD.control[0], 2)) as other:
            other.say(hello())
            until(lambda: len(prefill.links._greeting) == 3, "another seat is not concerned")
            prefill.may_connect.set()
            assert "no engine" in other.hear().refused
        for dealer in crowd[:2]:
            assert "no engine" in dealer.hear().refused
        until(lambda: not prefill.links._greeting, "all are answered")
        assert not prefill.links._greeting_of
    finally:
        for dealer in crowd:
            dealer.__exit__()


def test_a_rank_without_a_data_path_is_told_so(prefill):
    with Dealer(prefill, take_seat(OLD.control[0])) as dealer:
        dealer.socket.send(b"noise")
        assert dealer.hear().refused
        prefill.may_connect.set()
        dealer.say(hello())
        assert "no engine" in dealer.hear().refused
