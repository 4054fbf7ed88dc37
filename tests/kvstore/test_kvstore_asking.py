# SPDX-License-Identifier: Apache-2.0
"""Questions to owners: late, wrong and unreadable ones cost who asks, and nobody else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq
from store_makers import SIG, TIMEOUT_S
from store_meeting import endpoints

from kvstore.protocol import messages
from kvstore.protocol.asking import Asker, NoAnswer
from kvstore.protocol.sockets import Sockets, Where
from kvstore.store import Store


def answering(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *answers: bytes | None
) -> threading.Thread:
    """An owner that answers ``Publish(i)`` with the i-th of these, until the last one; None gives
    no answer."""
    server = context.socket(zmq.ROUTER)
    server.bind(endpoint)

    def run() -> None:
        number = -1
        while number < len(answers) - 1:
            client, frame = server.recv_multipart()
            request_id, raw = messages.split(frame)
            question = messages.decode_question(raw)
            assert isinstance(question, messages.Publish)
            number = question.claim_id
            if (answer := answers[number]) is not None:
                server.send_multipart([client, request_id + answer])
        server.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_answers_that_are_none_are_told(directory: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = f"ipc://{directory}/owner"
    done = messages.encode(messages.Done())
    thread = answering(
        context, endpoint, None, b"\xff", messages.encode(messages.Refused("no")), done
    )
    sockets = Sockets()
    asker = Asker(sockets, Where(endpoint), "abc")
    with pytest.raises(NoAnswer, match="owner abc does not answer in time"):
        asker.ask(messages.Publish(0), 0.2)
    with pytest.raises(NoAnswer, match="owner abc answers what cannot be read"):
        asker.ask(messages.Publish(1), TIMEOUT_S)
    with pytest.raises(NoAnswer, match="owner abc: no"):
        asker.ask(messages.Publish(2), TIMEOUT_S)
    assert asker.ask(messages.Publish(3), TIMEOUT_S) == messages.Done()
    assert len(asker._idle) == 1
    thread.join(TIMEOUT_S)
    asker.close()
    assert not asker._idle
    sockets.close()
    context.destroy(linger=0)
    with pytest.raises(NoAnswer, match="owner abc cannot be asked"):
        asker.ask(messages.Publish(3), TIMEOUT_S)


def test_an_answer_to_an_earlier_question_is_left_out(directory: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.bind(f"ipc://{directory}/owner")

    def run() -> None:
        client, frame = server.recv_multipart()
        request_id, _ = messages.split(frame)
        late = messages.encode(messages.Done("of another question"))
        server.send_multipart([client, bytes(8)[:-1] + b"\x07" + late])
        server.send_multipart([client, request_id + messages.encode(messages.Done())])

    thread = threading.Thread(target=run)
    thread.start()
    sockets = Sockets()
    asker = Asker(sockets, Where(f"ipc://{directory}/owner"), "abc")
    assert asker.ask(messages.Publish(1), TIMEOUT_S) == messages.Done()
    thread.join(TIMEOUT_S)
    asker.close()
    sockets.close()
    context.destroy(linger=0)


def test_a_service_refuses_what_it_cannot_read(
    owner: Store, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = Sockets()
    ((where,),) = endpoints(directory).values()
    socket = sockets.connect(where)

    def asked(raw: bytes) -> messages.Answer:
        socket.send(b"12345678" + raw)
        assert socket.poll(TIMEOUT_S * 1000)
        request_id, answer = messages.split(socket.recv())
        assert request_id == b"12345678"
        return messages.decode_answer(answer)

    for raw in (b"", b"\xc1", messages.encode(messages.Done())):
        answer = asked(raw)
        assert isinstance(answer, messages.Refused)
        assert "the question cannot be read" in answer.why
    answer = asked(messages.encode(messages.Greet(99)))
    version = messages.VERSION
    assert answer == messages.Refused(
        f"this owner speaks version {version} of the store's messages"
    )
    for _ in range(5):
        socket.send(b"1234567")  # No request id, or another number of parts: no answer.
        socket.send_multipart([b"12345678", b"2"])
    assert isinstance(asked(messages.encode(messages.Greet(messages.VERSION))), messages.Hello)
    assert caplog.text.count("what is no question of the store") == 1, "a line for all of them"
    claim = messages.Claim(bytes(16), SIG, 1, "0" * 32, 5)
    assert isinstance(asked(messages.encode(claim)), messages.Granted)
    socket.close()
    sockets.close()
