# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank keeps of decode ranks lasts as long as their control connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import zmq
from handover import LAYERS, PATIENT, WAIT_S, Handover, handover, until

import te
from sglang_mooncake.layout import ALONE, Buffers
from sglang_mooncake.links.destinations import PER_ENGINE_MAX, Destination, Destinations, NoDataPath
from sglang_mooncake.messages import (
    Hello,
    HelloReply,
    LinkReset,
    Message,
    RoomDiffers,
    RoomWait,
    encode,
)
from sglang_mooncake.messages import decode as decode_message
from sglang_mooncake.prefill_side import PrefillSide
from sglang_mooncake.rooms.states import RoomState


@pytest.fixture
def pair() -> Iterator[Handover]:
    with handover(deadlines=replace(PATIENT, heartbeat_s=0.05)) as ranks:
        ranks.decode.know(ranks.address)
        yield ranks


def heard(dealer: zmq.Socket[bytes]) -> Message:
    assert dealer.poll(WAIT_S * 1000), "the prefill rank answers"
    return decode_message(dealer.recv())


class Link:
    """A decode rank's control connection, of which the rank may have several."""

    def __init__(self, pair: Handover, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(f"tcp://127.0.0.1:{pair.prefill.port}")
        layout = pair.target.layout(Buffers((), (), ()))
        self.dealer.send(encode(Hello("a rank", ALONE, pair.decode.engine.card(), layout)))
        engine = pair.prefill.engine
        reply = heard(self.dealer)
        assert isinstance(reply, HelloReply)
        assert (reply.engine_id, reply.engine_epoch, reply.layers) == (
            engine.id,
            engine.epoch,
            LAYERS,
        )


@pytest.fixture
def links(pair: Handover) -> Iterator[list[Link]]:
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        made: list[Link] = []
        stack.callback(lambda: [link.dealer.close() for link in made])
        made += [Link(pair, context) for _ in range(PER_ENGINE_MAX)]
        yield made


def destinations(pair: Handover) -> Destinations:
    side = pair.prefill.side
    assert isinstance(side, PrefillSide)
    return side._links._destinations


def test_a_decode_rank_that_connects_again_and_again_takes_the_place_of_one(pair):
    with zmq.Context() as context:
        for _ in range(30):
            Link(pair, context).dealer.close()
        assert len(destinations(pair)) <= PER_ENGINE_MAX
        last = Link(pair, context)
        until(lambda: len(destinations(pair)) == 1, "only the last one is kept")
        last.dealer.close()
        until(lambda: len(destinations(pair)) == 0, "nothing is kept of one that has gone")


def test_links_that_stand_are_kept_up_to_a_bound_and_the_oldest_says_hello_again(pair, links):
    assert len(destinations(pair)) == PER_ENGINE_MAX
    with zmq.Context() as context:
        more = Link(pair, context)
        while isinstance(message := heard(links[0].dealer), HelloReply):
            assert message.refused is None
        more.dealer.close()
    assert isinstance(message, LinkReset)
    assert "has too many links to a rank" in message.reason


def test_rooms_of_a_decode_rank_whose_control_connection_goes_end(pair):
    source, target = pair.open_both(7)
    pair.name_pages(target, [1], aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.decode.side.close()  # its engine lives on
    until(lambda: source.view.over, "the prefill room does not wait for a word that cannot come")
    assert "lost the control connection" in (source.view.reason or "")


def test_a_difference_that_is_told_behind_the_end_of_the_data_connection_is_no_violation(
    pair, caplog
):
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{pair.prefill.port}")
        for message in (RoomDiffers(1, 1, ()), RoomWait(1, 1)):
            dealer.send(encode(message))
        answer = heard(dealer)
        dealer.close(linger=0)
    assert isinstance(answer, LinkReset)
    assert "RoomDiffers" not in caplog.text


def test_a_card_that_no_engine_could_have_made_is_refused(pair):
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{pair.prefill.port}")
        layout = pair.target.layout(Buffers((), (), ()))
        for card in (b"", b"\x93" * 4_000):
            dealer.send(encode(Hello("a rank", ALONE, card, layout)))
            answer = heard(dealer)
            assert isinstance(answer, HelloReply)
            assert answer.refused is not None
        dealer.close(linger=0)


def test_what_is_said_of_a_destination_that_has_gone_has_no_number_of_a_connection():
    """Peers are told it, and whoever knows such a number can ask libzmq for the next ones."""
    with pytest.raises(NoDataPath, match="connection to the decode rank has been lost") as said:
        Destinations()["00ab"]
    assert "00ab" not in str(said.value)


def test_what_the_same_connection_says_takes_the_place_of_what_it_said():
    with te.Engine(te.Config(host="127.0.0.1")) as a, te.Engine(te.Config(host="127.0.0.1")) as b:
        peer, known = a.connect(b.card()), Destinations()
        first, second = (Destination("ab", name, peer, None, ALONE) for name in "12")
        assert known.add(first) == known.add(second) == []
        assert list(known) == [second]
        assert known.remove("ab") is second
        assert known.remove("ab") is None


def test_the_data_path_of_a_decode_rank_whose_control_connection_goes_is_closed(pair):
    """Its engine may be frozen: transfers must not wait until they have stalled."""
    pair.open_both(7)
    (destination,) = destinations(pair)
    pair.decode.side.close()  # its engine lives on
    until(lambda: not destination.peer.alive, "it is closed")


def test_a_data_path_that_other_links_use_stays(pair, links):
    peer = next(iter(destinations(pair))).peer
    for link in links[:-1]:
        link.dealer.close()
    until(lambda: len(destinations(pair)) == 1, "one link is left")
    assert peer.alive
    links[-1].dealer.close()
    until(lambda: not peer.alive, "nobody needs it")


def test_a_data_path_that_ends_before_its_hello_is_answered_is_made_again(pair, monkeypatch):
    """The former connection of the decode rank may end meanwhile, and its data path with it."""
    engine, made = pair.prefill.engine, []
    connect = engine.connect

    def connect_and_lose_the_first(card: bytes) -> te.Peer:
        made.append(connect(card))
        if len(made) == 1:
            made[0].close()
            until(lambda: not made[0].alive, "it has ended")
        return made[-1]

    monkeypatch.setattr(engine, "connect", connect_and_lose_the_first)
    pair.complete(7, [1], [2], aux=0)
    assert [peer.alive for peer in made] == [False, True]
