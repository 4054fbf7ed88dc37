# SPDX-License-Identifier: Apache-2.0
"""A thread of digests that hangs: what waits for it is bounded, and what finds no place is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from handover import Handover, until
from test_digests import begin, hand_over, is_done, late_digests, pair_of, sampled, totals

from sglang_mooncake import digest_thread, landed_digests, sent_digests
from sglang_mooncake.digest_thread import DigestThread, Job, Pause
from sglang_mooncake.layout import Verify
from sglang_mooncake.messages import RoomDiffers
from sglang_mooncake.rooms.prefill_events import LookAgain

MODULES = {"prefill": sent_digests, "decode": landed_digests}
FULL = "digests wait already: the thread that makes them hangs or is behind"


def test_as_many_jobs_as_there_are_places_are_taken(monkeypatch):
    """Each that is over makes room, whether it ended well or not."""
    monkeypatch.setattr(digest_thread, "JOBS_MAX", 2)
    thread, go_on = DigestThread("test"), threading.Event()

    def waits() -> Job:
        while not go_on.is_set():
            yield Pause.NOT_YET

    def fails() -> Job:
        yield from waits()
        raise ArithmeticError("of a bug")

    thread.start()
    assert [thread.add(job()) for job in (waits, fails, waits)] == [None, None, f"2 {FULL}"]
    go_on.set()
    until(lambda: thread._places._value == 2, "both are over")
    assert thread.add(waits()) is None
    thread.close()


def with_one_place(pair: Handover, side: str) -> Any:
    """Of that side."""
    digests = (pair.prefill if side == "prefill" else pair.decode).side._digests
    # What a job has made is on its way before the job is over, and gives its place back.
    places = digests._thread._places
    until(lambda: places._value == digest_thread.JOBS_MAX, "no job has a place")
    digests._thread._places = threading.BoundedSemaphore(1)
    return digests


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("verify", [Verify.SAMPLE, Verify.ALL])
def test_a_request_for_whose_digests_there_is_no_place_does_not_wait(
    side, verify, monkeypatch, caplog
):
    go_on, asked = late_digests(monkeypatch, MODULES[side])
    with pair_of(verify=(verify, Verify.OFF)) as pair:
        sampled(pair, monkeypatch)
        with_one_place(pair, side)
        first = begin(pair)
        assert asked.wait(60)
        source, target = hand_over(pair, 2)
        if verify is Verify.ALL:
            until(lambda: source.view.over and target.view.over, "both sides know")
            assert FULL in target.view.reason
        else:
            assert pair.decode.side.has_arrived(target)
            until(lambda: is_done(source), "the prefill side is done")
            assert totals(pair.decode)["not compared"] == 1
            assert FULL in caplog.text
        assert not pair.decode.side.has_arrived(first[1])
        go_on.set()
        until(lambda: pair.decode.side.has_arrived(first[1]), "who had a place is compared")
        assert totals(pair.decode)["equal"] == 1


def test_memory_is_not_looked_at_again_where_there_is_no_place(caplog):
    with pair_of() as pair:
        _, target = hand_over(pair)
        digests = with_one_place(pair, "prefill")
        assert digests._thread._places.acquire()
        (known,) = digests._lately._sent.values()
        message = RoomDiffers(1, target.view.generation, known.message.lists)
        digests.look_again(LookAgain(known.asked.peer, message), "decode rank")
        digests._thread._places.release()
    assert f"cannot look again at what it has sent: {digest_thread.JOBS_MAX} {FULL}" in caplog.text
