# SPDX-License-Identifier: Apache-2.0
"""What is told and kept of a hand-over whose bytes differ, on both sides."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import FAULTS, Fault, faulty, landed_then
from handover import LAYERS, until
from test_digests import SOURCES, TARGETS, begin, hand_over, pair_of, sampled

import te
from sglang_mooncake import digesting, sent_digests, sent_lately
from sglang_mooncake.layout import cells as cells_module
from sglang_mooncake.layout.chosen import Verify
from sglang_mooncake.messages import RoomDiffers
from sglang_mooncake.rooms.decode_events import Verified
from sglang_mooncake.rooms.prefill import Differed
from sglang_mooncake.rooms.prefill_events import LookAgain
from sglang_mooncake.rooms.states import RoomState


def kept_in(directory: Path) -> tuple[tuple[str, int, str], dict[str, np.ndarray]]:
    """What is told of the request in the one file there, and the bytes of its cells."""
    (path,) = directory.iterdir()
    with np.load(path) as found:
        about = str(found["rank"]), int(found["room"]), str(found["reason"])
        return about, {name: found[name] for name in found if name.startswith("page")}


@pytest.mark.parametrize("fault", FAULTS, ids=[one.__name__ for one in FAULTS])
def test_what_has_landed_and_differs_is_kept(fault: Fault, tmp_path):
    with pair_of(verify_dir=tmp_path) as pair:
        with faulty(pair, fault):
            _, target = hand_over(pair)
            until(lambda: target.view.over, "the room has failed")
        landed = {
            f"page {at} in latent of layer {layer}": pair.target.kv[layer, page].copy()
            for layer in range(LAYERS)
            for at, page in enumerate(TARGETS)
        }
    # Its threads have ended.
    about, cells = kept_in(tmp_path)
    assert about == (pair.decode.side._context.name, 1, target.view.reason)
    assert cells
    for name, cell in cells.items():
        np.testing.assert_array_equal(cell, landed[name])


def test_bytes_of_a_request_that_has_ended_are_not_kept(tmp_path, monkeypatch):
    """They may be another's by now."""
    with pair_of(verify_dir=tmp_path) as pair, faulty(pair, FAULTS[0]):
        digester = pair.decode.side._digests.digester
        read, asked, go_on = digester.read, threading.Event(), threading.Event()

        def late(*of: Any) -> Any:
            asked.set()
            go_on.wait()
            return read(*of)

        monkeypatch.setattr(digester, "read", late)
        kept, given = pair.decode.side._digests.kept, []
        monkeypatch.setattr(kept, "keep", lambda *of: given.append(of[2]))
        _, target = begin(pair)
        assert asked.wait(60)
        pair.decode.side.abort(target, "the client has left")
        until(lambda: target.view.over, "the pages are free")
        go_on.set()
        until(lambda: given == [None], "nothing is kept")


def test_a_request_does_not_wait_until_the_bytes_of_another_one_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "CELLS_READ_AT_ONCE", 1)
    asked, go_on, order = threading.Event(), threading.Event(), []
    with pair_of(verify_dir=tmp_path) as pair:
        digests = pair.decode.side._digests
        read, post = digests.digester.read, digests.post

        def spoil(compare: Any) -> None:
            if compare.room.number == 1:
                pair.target.kv[0, :20] ^= 1

        def late(*of: Any) -> Any:
            asked.set()
            go_on.wait()
            return read(*of)

        def note(found: Any) -> None:
            if isinstance(found, Verified):
                order.append(found.room.number)
            post(found)

        digests.landed, digests.post = landed_then(pair, spoil), note
        monkeypatch.setattr(digests.digester, "read", late)
        targets = []
        for number, pages, aux in ((1, list(range(20)), 3), (2, [40], 4)):
            source, target = pair.open_both(number)
            targets.append(target)
            pair.name_pages(target, pages, aux=aux)
            until(lambda of=source: of.view.state is RoomState.READY, "it is ready")
            pair.prefill.send(source, pages, 0, aux_slot=9)
            assert asked.wait(60)
        (expected,) = targets[1].view.expected
        until(lambda: pair.decode.side._landed(expected), "all of the second one is here")
        until(lambda: not digests._thread._new.empty(), "it is to be compared")
        go_on.set()
        until(lambda: pair.decode.side.has_arrived(targets[1]), "it has arrived")
        until(lambda: targets[0].view.over, "the first room has failed")
    assert order == [2, 1]
    assert len(kept_in(tmp_path)[1]) == 20


@pytest.mark.parametrize("error", [te.DigestError, MemoryError, RuntimeError])
def test_bytes_that_cannot_be_read_are_not_kept_and_the_request_fails_all_the_same(
    error, tmp_path, monkeypatch, caplog
):
    """One of a sample, too: a difference was found."""

    def fails(*of: Any) -> Any:
        raise error("the device is lost")

    with (
        pair_of(verify=(Verify.SAMPLE, Verify.OFF), verify_dir=tmp_path) as pair,
        faulty(pair, FAULTS[0]),
    ):
        sampled(pair, monkeypatch)
        monkeypatch.setattr(pair.decode.side._digests.digester, "read", fails)
        _, target = hand_over(pair)
        until(lambda: target.view.over, "the room has failed")
        assert "is not the one that was sent: page" in (target.view.reason or "")
    assert re.search("room 1: bytes that differ: .*the device is lost", caplog.text)
    assert not list(tmp_path.iterdir())


def test_the_source_hears_of_a_difference_before_its_bytes_are_read(tmp_path, monkeypatch, caplog):
    """Its memory may soon be another request's."""
    go_on = threading.Event()
    with pair_of(verify_dir=tmp_path) as pair, faulty(pair, FAULTS[0]):
        digester = pair.decode.side._digests.digester
        read = digester.read

        def late(*of: Any) -> Any:
            go_on.wait()
            return read(*of)

        monkeypatch.setattr(digester, "read", late)
        _, target = begin(pair)
        assert "still has what its digests are of" in said_of_the_source(caplog)
        assert not target.view.decided
        go_on.set()
        until(lambda: target.view.over, "the room has failed")
    assert kept_in(tmp_path)[1]


def said_of_the_source(caplog: Any) -> str:
    """Once the prefill rank has looked at its memory again."""

    def lines() -> list[str]:
        loggers = digesting.__name__, sent_digests.__name__
        said = [one.message for one in caplog.records if one.name in loggers]
        return [line for line in said if "The memory of prefill rank" in line or "again" in line]

    until(lambda: lines(), "the prefill rank has looked again")
    (line,) = lines()
    return line


@pytest.mark.parametrize("fault", FAULTS, ids=[one.__name__ for one in FAULTS])
def test_a_prefill_rank_that_still_has_what_its_digests_are_of_says_so_and_keeps_it(
    fault: Fault, tmp_path, caplog
):
    with pair_of(source_verify_dir=tmp_path) as pair, faulty(pair, fault):
        hand_over(pair)
        said = said_of_the_source(caplog)
        sent = {
            f"page {at} in latent of layer {layer}": pair.source.kv[layer, page].copy()
            for layer in range(LAYERS)
            for at, page in enumerate(SOURCES)
        }
        names = pair.prefill.side._context.name, pair.decode.side._context.name
    assert f"The memory of {names[0]} still has what its digests are of" in said
    assert f"the KV cache that {names[1]} has of room 1 is not the one that was sent: page" in said
    about, cells = kept_in(tmp_path)
    assert about == (names[0], 1, said)
    assert cells
    for name, cell in cells.items():
        np.testing.assert_array_equal(cell, sent[name])


@pytest.mark.parametrize(
    ("there", "said"), [(0x55, "has what has arrived there"), (0x66, "has been used again since")]
)
def test_a_prefill_rank_whose_memory_has_changed_since_its_digests_says_so(
    there, said, tmp_path, caplog
):
    """As it would be if the page had changed before the engine read it, or after that."""
    with pair_of(source_verify_dir=tmp_path) as pair:

        def spoil(_: Any) -> None:
            pair.target.kv[0, TARGETS[0]] = 0x55
            pair.source.kv[0, SOURCES[0]] = there

        pair.decode.side._digests.landed = landed_then(pair, spoil)
        hand_over(pair)
        assert said in said_of_the_source(caplog)
    if there == 0x55:
        _, cells = kept_in(tmp_path)
        assert {name: set(cell) for name, cell in cells.items()} == {
            "page 0 in latent of layer 0": {0x55}
        }
    else:
        assert not list(tmp_path.iterdir()), "it may be another request's"


def test_of_a_sample_a_prefill_rank_keeps_no_bytes_of_which_it_has_no_digest(
    tmp_path, monkeypatch, caplog
):
    """They may be another request's, and nothing would tell."""
    sample = np.array([0, LAYERS + 1])
    monkeypatch.setattr(digesting, "chosen_cells", lambda *of: sample)
    with pair_of(source_verify_dir=tmp_path) as pair:

        def spoil(_: Any) -> None:
            pair.target.kv[:2, TARGETS[:2]] ^= 1
            pair.source.kv[0, SOURCES[1]] ^= 2

        pair.decode.side._digests.landed = landed_then(pair, spoil)
        hand_over(pair)
        assert "still has what its digests are of" in said_of_the_source(caplog)
    _, cells = kept_in(tmp_path)
    assert list(cells) == [f"page {at} in latent of layer {at}" for at in (0, 1)]


def test_bytes_that_change_behind_their_reading_are_not_kept(tmp_path, monkeypatch, caplog):
    with pair_of(source_verify_dir=tmp_path) as pair, faulty(pair, FAULTS[0]):
        digester = pair.prefill.side._digests.digester
        read = digester.read

        def changed(*of: Any) -> Any:
            found = read(*of)
            pair.source.kv[:] ^= 1
            return found

        monkeypatch.setattr(digester, "read", changed)
        hand_over(pair)
        assert "has been used again since" in said_of_the_source(caplog)
    assert not list(tmp_path.iterdir())


def test_differences_are_logged_at_a_bounded_rate(tmp_path, caplog):
    """Each is kept all the same."""
    with pair_of(source_verify_dir=tmp_path) as pair:

        def spoil(_: Any) -> None:
            pair.target.kv[0, TARGETS[0]] ^= 1

        pair.decode.side._digests.landed = landed_then(pair, spoil)
        for number in (1, 2):
            hand_over(pair, number)
            until(lambda of=number: len(list(tmp_path.iterdir())) == of, "its bytes are kept")
    assert caplog.text.count("is not the one that was sent") == 1


def test_digests_that_are_no_longer_known_are_not_looked_at_again(monkeypatch, caplog):
    monkeypatch.setattr(sent_lately, "ROOMS_MAX", 0)
    with pair_of() as pair, faulty(pair, FAULTS[0]):
        hand_over(pair)
        assert "cannot look again at what it has sent: its digests are no longer" in (
            said_of_the_source(caplog)
        )


def test_a_prefill_rank_whose_memory_cannot_be_read_again_says_so(tmp_path, monkeypatch, caplog):
    def fails(*of: Any) -> Any:
        raise te.DigestError("the device is lost")

    with pair_of(source_verify_dir=tmp_path) as pair, faulty(pair, FAULTS[0]):
        digests = pair.prefill.side._digests
        monkeypatch.setattr(digests.digester, "read", fails)
        hand_over(pair)
        assert "sent: the device is lost" in said_of_the_source(caplog)
        claimed = [digests.kept.claim(number) for number in range(5)]
    assert claimed == [True] * 4 + [False], "its place is free again"
    assert not list(tmp_path.iterdir())


def test_a_decode_rank_that_tells_differences_of_what_was_not_sent_keeps_nobody_waiting(
    monkeypatch, caplog
):
    with pair_of() as pair:
        _, target = hand_over(pair)
        digests = pair.prefill.side._digests
        (known,) = digests._lately._sent.values()
        jobs: list[Any] = []
        monkeypatch.setattr(digests._thread, "add", jobs.append)
        for number, lists in ((77, known.message.lists), (1, known.message.lists * 1000)):
            message = RoomDiffers(number, target.view.generation, lists)
            digests.look_again(LookAgain(known.asked.peer, message), "decode rank")
    assert jobs == []
    assert "room 77: what decode rank has is not what was sent" in caplog.text


@pytest.mark.parametrize(
    ("lists", "why"),
    [(0, "digests of other cells were told"), (1, "has told the digests that were sent")],
)
def test_a_decode_rank_that_tells_no_difference_has_nothing_kept(lists, why, tmp_path, caplog):
    with pair_of(source_verify_dir=tmp_path) as pair:
        _, target = hand_over(pair)
        (sent,) = pair.prefill.side._digests._lately._sent.values()
        message = RoomDiffers(1, target.view.generation, sent.message.lists * lists)
        (destination,) = pair.prefill.side._links
        pair.prefill.side._loop.post(Differed(destination.key, message))
        assert why in said_of_the_source(caplog)
    assert not list(tmp_path.iterdir())
