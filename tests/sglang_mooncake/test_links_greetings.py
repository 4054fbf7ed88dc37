# SPDX-License-Identifier: Apache-2.0
"""Hellos at a prefill rank: who gets an answer while others wait for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import msgspec
import pytest
import zmq
from handover import HOST, WAIT_S, until
from prefill_links import OLD, Dealer, Prefill, hello

import te
from bootstrap_server.admission.secret import Keys
from sglang_mooncake.links import prefill as links
from sglang_mooncake.links.curve import decode_pair
from sglang_mooncake.messages import decode, encode


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    with Prefill(OLD) as made:
        yield made


class Calls:
    """Decode ranks at addresses of their own, in plain."""

    def __init__(self, prefill: Prefill) -> None:
        self.port, self.context = prefill.port, zmq.Context()
        self.dealers: list[zmq.Socket[bytes]] = []

    def say_hello(self, host: str, name: str) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.DEALER)
        self.dealers.append(made)
        made.connect(f"tcp://{host}:0;{HOST}:{self.port}")
        made.send(encode(msgspec.structs.replace(hello(name), card=host.encode())))
        return made

    def answer(self, dealer: zmq.Socket[bytes]) -> str:
        """Why it is refused."""
        assert dealer.poll(WAIT_S * 1000), "it is held up"
        return decode(dealer.recv()).refused

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.context.destroy(linger=0)


def test_a_host_whose_engines_do_not_answer_leaves_threads_to_other_hosts():
    """Each engine of a host that has been cut off holds a thread for 5 s."""
    answers, cut_off = "127.0.0.2", "127.0.0.3"
    with Prefill(Keys()) as prefill, Calls(prefill) as calls:

        def connect(card: bytes) -> te.Peer:
            if card.decode() == cut_off:
                prefill.may_connect.wait(WAIT_S)
            raise te.Error("no engine")

        prefill.connect = connect  # type: ignore[method-assign]
        waiting = [calls.say_hello(cut_off, f"rank {n}") for n in range(links.CONNECT_THREADS + 1)]
        until(lambda: len(prefill.links._greeting) == len(waiting), "all have said hello")
        assert "no engine" in calls.answer(calls.say_hello(answers, "another"))
        assert len(prefill.links._greeting) == len(waiting), "they wait still"
        prefill.may_connect.set()
        for one in waiting:
            assert "no engine" in calls.answer(one)


def test_those_of_one_address_have_so_many_hellos_and_leave_places_to_others(monkeypatch):
    monkeypatch.setattr(links, "GREETINGS_OF_SOURCE_MAX", 2)
    with Prefill(Keys()) as prefill, Calls(prefill) as calls:
        crowd = [calls.say_hello("127.0.0.3", f"rank {n}") for n in range(2)]
        until(lambda: len(prefill.links._greeting) == 2, "two are being connected")
        refused = calls.answer(calls.say_hello("127.0.0.3", "one more"))
        assert "2 of them at 127.0.0.3: say hello again later" in refused
        other = calls.say_hello("127.0.0.2", "another")
        until(lambda: len(prefill.links._greeting) == 3, "another address is not concerned")
        prefill.may_connect.set()
        for one in (*crowd, other):
            assert "no engine" in calls.answer(one)
        until(lambda: not prefill.links._greeting, "all are answered")
        assert not prefill.links._greeting_of


def test_a_rank_without_a_data_path_is_told_so(prefill):
    with Dealer(prefill, decode_pair(OLD.control[0])) as dealer:
        dealer.socket.send(b"noise")
        assert dealer.hear().refused
        prefill.may_connect.set()
        dealer.say(hello())
        assert "no engine" in dealer.hear().refused
