# SPDX-License-Identifier: Apache-2.0
"""Pages of a rank go through a real store, into the KV cache of another one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from vllm_makers import BLOCKS, TIMEOUT_S, Rank, until, work

import te
from kvstore.objects.outcomes import Got
from kvstore.store import StillLanding
from sglang_mooncake.vllm import store_worker
from sglang_mooncake.vllm.options import LOAD_TIMEOUT_S, Options


def test_another_server_loads_what_one_has_computed(rank: Rank, other: Rank) -> None:
    rank.fill(1)
    rank.save(work("r", [5, 2, 7]))
    wanted = work("s", [0, 1, 3])
    until(lambda: other.knows(wanted), "the pages are announced")
    before = other.cache.copy()
    assert not other.load(wanted)
    assert (other.cache[:, [0, 1, 3]] == rank.cache[:, [5, 2, 7]]).all()
    rest = [block for block in range(BLOCKS) if block not in (0, 1, 3)]
    assert (other.cache[:, rest] == before[:, rest]).all()


def test_blocks_of_pages_that_are_not_there_are_told(rank: Rank) -> None:
    rank.fill(1)
    rank.save(work("r", [5, 2]))
    assert rank.load(work("s", [0, 1, 3])) == {3}
    assert rank.worker.take_failed() == set(), "once"
    assert rank.worker.take_loaded() == set()


def test_pages_of_another_signature_are_not_loaded(rank: Rank, directory: Path) -> None:
    rank.fill(1)
    rank.save(work("r", [5, 2]))
    with Rank(directory, 0, b"another one.....") as stranger:
        until(lambda: len(stranger.store) == 2, "the pages are announced")
        assert not stranger.knows(work("s", [0, 1]))
        assert stranger.load(work("s", [0, 1])) == {0, 1}
        assert not stranger.cache.any()


def test_a_corrupted_page_is_told_and_removed(rank: Rank, other: Rank) -> None:
    rank.fill(1)
    rank.save(work("r", [5, 2]))
    wanted = work("s", [0, 1])
    until(lambda: other.knows(wanted), "the pages are announced")
    own = rank.store._owners.own
    assert own is not None
    lent = np.frombuffer(own._buffer, np.uint8)
    lent[own._slab.slots_offset :] ^= 0xFF  # headers lie before them, and are as they were
    assert other.load(wanted) == {0, 1}
    until(lambda: not other.store.known(wanted.keys).any(), "they are removed")
    rank.save(work("t", [5, 2]))
    until(lambda: other.knows(wanted), "they are announced again")
    assert not other.load(wanted)
    assert (other.cache[:, [0, 1]] == rank.cache[:, [5, 2]]).all()


def test_a_load_that_raises_has_failed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise te.BoundsError("no such memory")

    monkeypatch.setattr(rank.store, "get", fail)
    assert rank.load(work("s", [4, 6])) == {4, 6}


def test_a_load_that_does_not_stop_is_told_once_nothing_lands_any_more(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, landed = threading.Event(), threading.Event()

    class Landing(StillLanding):
        def wait(self, *_: object) -> None:
            waits.set()
            assert landed.wait(TIMEOUT_S)

    def late(*_: object) -> None:
        raise Landing([])

    monkeypatch.setattr(rank.store, "get", late)
    rank.worker.load(work("s", [4]))
    assert waits.wait(TIMEOUT_S)
    assert not rank.worker.take_loaded(), "vLLM would use the blocks again"
    landed.set()
    loaded: set[str] = set()
    until(lambda: loaded.update(rank.worker.take_loaded()) or loaded, "it is told")
    assert (loaded, rank.worker.take_failed()) == ({"s"}, {4})


def test_blocks_are_read_behind_the_forward(rank: Rank) -> None:
    class Forward:
        def __init__(self) -> None:
            self.waited_for, self.ended = threading.Event(), threading.Event()

        def synchronize(self) -> None:
            self.waited_for.set()
            assert self.ended.wait(TIMEOUT_S)

    forward = Forward()
    rank.worker.save(work("r", [5]), [forward])
    assert forward.waited_for.wait(TIMEOUT_S)
    assert rank.worker.take_saved({"r"}) == set()
    rank.fill(2)
    forward.ended.set()
    saved: set[str] = set()
    until(lambda: saved.update(rank.worker.take_saved(set())) or saved, "it is saved")
    assert not rank.load(work("s", [0]))
    assert (rank.cache[:, 0] == rank.cache[:, 5]).all()


def test_a_request_without_saves_is_not_told(rank: Rank) -> None:
    assert rank.worker.take_saved({"r"}) == set()


def test_what_is_preempted_is_not_read_any_more(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, begun, read = threading.Event(), threading.Event(), []
    put = rank.store.put

    def slow(*arguments: object, **more: object) -> object:
        begun.set()
        assert opened.wait(TIMEOUT_S)
        read.append(1)
        return put(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(rank.store, "put", slow)
    rank.worker.save(work("r", [5]), [])
    rank.worker.save(work("r", [6], "b"), [])
    assert begun.wait(TIMEOUT_S)
    preempting = threading.Thread(target=rank.worker.preempted, args=({"r"},))
    preempting.start()
    until(lambda: not rank.worker._saves._waiting, "what waits is dropped")
    assert preempting.is_alive()
    opened.set()
    preempting.join(TIMEOUT_S)
    assert not preempting.is_alive()
    assert len(read) == 1, "what waits is dropped, and what is under way is waited for"
    assert rank.worker.take_saved({"r"}) == {"r"}
    assert rank.load(work("s", [0])) == {0}, "its end came before it was stored"


def test_a_save_that_goes_on_when_its_blocks_are_used_again_is_not_stored(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's runner gets no exception, which would end the server."""
    opened, begun = threading.Event(), threading.Event()
    put = rank.store.put

    def slow(*arguments: object, **more: object) -> object:
        begun.set()
        assert opened.wait(TIMEOUT_S)
        return put(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(rank.store, "put", slow)
    monkeypatch.setattr(store_worker, "SAVE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(store_worker, "CLOSE_TIMEOUT_S", 0.0)
    rank.worker.save(work("r", [5]), [])
    assert begun.wait(TIMEOUT_S)
    rank.worker.preempted({"r"})
    assert "their blocks are used again now" in caplog.text
    opened.set()
    monkeypatch.undo()
    until(lambda: not rank.worker._saves.left("r"), "it ends")
    assert rank.load(work("s", [0])) == {0}, "nothing is there"


def test_too_many_loads_are_computed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()

    def get(*_: object) -> list[Got]:
        assert opened.wait(TIMEOUT_S)
        return [Got.RIGHT]

    monkeypatch.setattr(rank.store, "get", get)
    for i in range(store_worker.LOADS_MAX + 2):
        rank.worker.load(work(f"r{i}", [i % BLOCKS]))
    assert rank.worker.take_loaded()
    assert rank.worker.take_failed()
    opened.set()


def test_too_many_saves_are_not_stored(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, begun = threading.Event(), threading.Event()

    def put(*_: object, **__: object) -> list[object]:
        begun.set()
        assert opened.wait(TIMEOUT_S)
        return []

    monkeypatch.setattr(rank.store, "put", put)
    rank.worker.save(work("r0", [0]), [])
    assert begun.wait(TIMEOUT_S), "it does not wait any more"
    for i in range(1, store_worker.SAVES_MAX + 2):
        rank.worker.save(work(f"r{i}", [i % BLOCKS]), [])
    assert rank.worker.take_saved({f"r{store_worker.SAVES_MAX + 1}"})
    opened.set()


def test_pages_that_find_no_room_are_logged(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Rank(directory, 0) as alone:
        alone.save(work("r", [5, 2]))
    assert "of 2 pages some were not stored: {'unreachable': 2}" in caplog.text


def test_settings_are_checked() -> None:
    options = Options.of({"memory": "8MiB", "weights": "mine", "load_timeout_s": 2}, "one")
    assert options.store.engine.label == "one"
    assert (options.store.memory, options.weights, options.load_timeout_s) == (8 << 20, "mine", 2.0)
    assert Options.of({}).load_timeout_s == LOAD_TIMEOUT_S
    with pytest.raises(ValueError, match="no setting 'memori'; did you mean 'memory'"):
        Options.of({"memori": 1})
    with pytest.raises(ValueError, match="no setting 'weight'; did you mean 'weights'"):
        Options.of({"weight": "mine"})
    with pytest.raises(ValueError, match="load_timeout_s='2' must be a number"):
        Options.of({"load_timeout_s": "2"})
    for wrong in (0, -1, np.nan, np.inf):
        with pytest.raises(ValueError, match="must be a positive number of seconds"):
            Options.of({"load_timeout_s": wrong})
