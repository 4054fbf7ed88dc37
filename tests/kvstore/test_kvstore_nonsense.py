# SPDX-License-Identifier: Apache-2.0
"""What another process of the store may say: anything. It is a clear error, or is not believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from store_makers import SIG, TIMEOUT_S, keys
from store_objects import NBYTES

from kvstore.client.deadline import Deadline
from kvstore.client.handles import RemoteHandle
from kvstore.objects.pieces import Pieces
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import (
    Answer,
    Granted,
    InMemory,
    Pins,
    Placed,
    Published,
    Question,
    Stored,
    decode_answer,
    decode_question,
)
from kvstore.rules.object_table import Verdict

KEYS = keys(2)
#: Behind what is read of it: it is skipped, and counts all the same.
DEEP = b"\x91" * 200_000
DEEP_ANSWER, DEEP_QUESTION = b"\x93\x05\xa0" + DEEP, b"\x93\x06\x01" + DEEP
TORN = b"\x92\x05\xa2\xff\xfe"  # Refused, with a text that is not UTF-8.
TORN_CLAIM = b"\x96\x04\xc4\x00\xc4\x10" + bytes(16) + b"\x01\xa2\xff\xfe\x01"


@pytest.mark.parametrize("decode", [decode_question, decode_answer])
@pytest.mark.parametrize("raw", [TORN, TORN_CLAIM, b"", b"\xc1", bytes(100)])
def test_what_is_no_message_is_one_error(decode: Callable[[bytes], object], raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(raw)


def test_the_error_says_what_is_wrong() -> None:
    with pytest.raises(msgspec.DecodeError, match="a text in it is not UTF-8"):
        decode_answer(TORN)
    with pytest.raises(msgspec.DecodeError, match="a text in it is not UTF-8"):
        decode_question(TORN_CLAIM)
    with pytest.raises(msgspec.DecodeError, match="it is nested too deeply"):
        decode_answer(DEEP_ANSWER)
    with pytest.raises(msgspec.DecodeError, match="it is nested too deeply"):
        decode_question(DEEP_QUESTION)


class Answering:
    """An owner that gives one answer to everything."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def ask(self, _: Question, __: float) -> Answer:
        return self._answer


def handle_to(answer: Answer) -> RemoteHandle:
    owner: Any = SimpleNamespace(name="abc", aheads=None, asker=Answering(answer))
    engine: Any = SimpleNamespace(id="0" * 32, epoch=1)
    source: Any = None
    return RemoteHandle(owner, engine, source, TIMEOUT_S)


SLOTS = bytes(8)
NONSENSE = {
    "an unknown verdict": Granted(1, 5, ["granted", "maybe"], SLOTS),
    "a verdict too many": Granted(1, 5, ["exists"] * 3, b""),
    "a slot too few": Granted(1, 5, ["granted"] * 2, SLOTS[:4]),
    "half a slot": Granted(1, 5, ["granted"] * 2, SLOTS[:7]),
    "no tag": Granted(1, 0, ["granted"] * 2, SLOTS),
    "a negative tag": Granted(1, -1, ["granted"] * 2, SLOTS),
    "another answer": Stored(["granted"] * 2, Placed(1, SLOTS, SLOTS)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_of_a_claim_is_no_answer(what: str) -> None:
    with pytest.raises(NoAnswer, match="owner abc answers"):
        handle_to(NONSENSE[what]).claim(KEYS, SIG, NBYTES, TIMEOUT_S)


def published(told: list[str], claimed: list[Verdict]) -> Sequence[Verdict]:
    """By a handle whose owner tells this of what it has granted."""
    granted = [one.value for one in claimed]
    handle = handle_to(Granted(1, 5, granted, SLOTS[: 4 * claimed.count(Verdict.GRANTED)]))
    grant = handle.claim(keys(len(claimed)), SIG, NBYTES, TIMEOUT_S)
    owner: Any = handle._owner
    owner.asker = Answering(Published("", None, told))
    return handle.publish(grant, None, TIMEOUT_S)[1]


def test_what_became_of_each_object_of_a_claim_is_told() -> None:
    granted, exists = Verdict.GRANTED, Verdict.EXISTS
    assert published([], [granted, exists, granted]) == [granted, exists, granted]
    said = published(["granted", "not copied"], [granted, exists, granted])
    assert said == [granted, exists, Verdict.NOT_COPIED]


def test_nonsense_of_other_questions_is_no_answer() -> None:
    objects = np.zeros((2, NBYTES), np.uint8)
    pieces = Pieces.whole(objects.ctypes.data + np.arange(2, dtype=np.uint64) * NBYTES, NBYTES)
    for stored in (["granted"], ["maybe"] * 2):
        with pytest.raises(NoAnswer, match="answers nonsense of what it has stored"):
            handle_to(Stored(stored, Placed(1, SLOTS, SLOTS))).take(
                KEYS, SIG, pieces, Deadline(TIMEOUT_S)
            )
    with pytest.raises(NoAnswer, match="answers nonsense of pins"):
        handle_to(Pins(["pinned"], "")).pin(KEYS, SIG, 1.0)
    here = bytes([1, 1])
    for promoted in (
        InMemory(here, SLOTS, SLOTS[:4]),
        InMemory(bytes([9, 9]), SLOTS, SLOTS),
        InMemory(here[:1], SLOTS, SLOTS),
    ):
        with pytest.raises(NoAnswer, match="answers nonsense of what is in memory"):
            handle_to(promoted).promote(KEYS, SIG, NBYTES, TIMEOUT_S)
    for told in (["granted"], ["maybe"] * 2):
        with pytest.raises(NoAnswer, match="answers nonsense of what it has published"):
            published(told, [Verdict.GRANTED] * 2)
    assert len(handle_to(InMemory(here, SLOTS, SLOTS)).promote(KEYS, SIG, NBYTES, TIMEOUT_S)) == 2
