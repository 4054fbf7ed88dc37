# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode rank of vLLM hand blocks over, with real engines and sockets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pd_makers import (
    BLOCK_BYTES,
    CANARY,
    LAYERS,
    TOKENS,
    Cache,
    Pair,
    pair,
    reasons,
    with_tp,
)
from vllm_makers import TIMEOUT_S, server

from bootstrap_server.admission.secret_file import write_secret_file
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.vllm.pd_requests import Load


def test_blocks_arrive_byte_for_byte_and_nothing_else_changes() -> None:
    with pair() as two:
        labels = [one.engine._config.label for one in (two.prefill, two.decode)]
        assert labels == ["vLLM prefill of m", "vLLM decode of m"], "te top names them"
        two.send("p", 7, [1, 2, 5], tokens=2 * TOKENS + 1)
        two.load("d", 7, [4, 9, 8])
        two.until_loaded("d")
        two.assert_moved([1, 2, 5], [4, 9, 8])
        two.until_sent("p")
        assert not two.failed
        recorder = two.prefill._side._recorder
        assert recorder.totals()["bytes"] > 3 * LAYERS * BLOCK_BYTES


def test_a_decode_server_that_comes_first_waits() -> None:
    with pair() as two:
        two.load("d", 7, [4])
        room = two.decode.worker._loads["d"].room
        two.until(lambda: room.view.state is RoomState.REQUESTED, "the prefill server is asked")
        two.send("p", 7, [1])
        two.until_loaded("d")
        two.assert_moved([1], [4])


def test_what_the_decode_server_holds_is_not_sent() -> None:
    with pair() as two:
        two.send("p", 7, [1, 2, 3])
        two.load("d", 7, [8], held_tokens=2 * TOKENS)
        two.until_loaded("d")
        two.assert_moved([3], [8])


@pytest.mark.usefixtures("short_grace")
def test_a_prompt_that_does_not_fit_is_computed_and_let_go() -> None:
    with pair() as two:
        two.send("p", 7, [1, 2, 3])
        two.decode.worker.load(Load("d", two.address, 7, 0, [8, 9], "room for two blocks of three"))
        two.until_loaded("d")
        two.until_sent("p")
        assert two.failed == {8, 9}
        two.assert_moved([], [])


def test_many_requests_at_once_each_get_their_own() -> None:
    with pair() as two:
        for i in range(8):
            two.send(f"p{i}", i, [2 * i, 2 * i + 1])
        for i in reversed(range(8)):
            two.load(f"d{i}", i, [2 * i + 1, 2 * i])
        two.until_loaded(*(f"d{i}" for i in range(8)))
        two.until_sent(*(f"p{i}" for i in range(8)))
        blocks = list(range(16))
        two.assert_moved(blocks, [one ^ 1 for one in blocks])


@pytest.mark.parametrize("held", [1, 4 * TOKENS])
def test_a_number_of_held_tokens_that_cannot_be_fails_on_both_sides(held: int) -> None:
    with pair() as two:
        two.send("p", 7, [1, 2, 3])
        two.load("d", 7, [8], held_tokens=held)
        two.until_loaded("d")
        two.until_sent("p")
        assert two.failed == {8}
        assert f"holds {held} tokens of a prompt of {3 * TOKENS}" in reasons(two.prefill)


def test_blocks_that_nobody_asks_for_are_given_back_in_time() -> None:
    with pair(prefill={"hold_timeout_s": 0.2}) as two:
        two.send("p", 7, [1])
        two.until_sent("p")
        assert "no decode rank asked" in reasons(two.prefill)
        assert "(hold_timeout_s)" in reasons(two.prefill)
        two.load("d", 7, [8])  # too late
        two.until_loaded("d")
        assert two.failed == {8}
        assert "no decode rank asked" in reasons(two.decode)


def test_a_prompt_that_never_comes_is_given_up_in_time() -> None:
    with pair(decode={"load_timeout_s": 0.3}) as two:
        rooms = two.decode._side._rooms
        rooms._deadlines = replace(rooms._deadlines, bootstrap_s=TIMEOUT_S)  # To ask it at all.
        two.load("d", 7, [8])
        two.until_loaded("d")
        assert two.failed == {8}
        said = reasons(two.decode)
        expected = r"did not arrive from prefill rank .* within \d+ s \(load_timeout_s\)"
        assert re.search(expected, said), said


@pytest.mark.usefixtures("short_grace")
def test_a_request_that_is_ended_on_decode_gives_blocks_back_on_both_sides() -> None:
    with pair() as two:
        two.load("d", 7, [8])
        room = two.decode.worker._loads["d"].room
        two.until(lambda: room.view.state is RoomState.REQUESTED, "the prefill server is asked")
        two.abort("d", "another")
        two.until_loaded("d")
        assert not two.failed  # vLLM has ended the request
        two.send("p", 7, [1])
        two.until_sent("p")
        two.assert_moved([], [])


@pytest.mark.slow
def test_a_prompt_that_nobody_needs_is_let_go() -> None:
    with pair() as two:
        for name, holds in (("kept", True), ("runs", False)):  # the second finds the link
            room = len(name) + holds
            two.send(f"p {name}", room, [1])
            two.release(name, room, holds=holds)
            two.until_sent(f"p {name}")
        two.until(lambda: not two.decode.worker._releases, "both were told")
        assert two.released == {"kept"}
        two.assert_moved([], [])


def test_a_prefill_server_that_is_gone_fails_loads_that_wait_and_those_that_come() -> None:
    with pair() as two:
        two.send("p", 1, [1])
        two.load("d", 1, [2])
        two.until_loaded("d")
        two.load("waits", 2, [8])
        room = two.decode.worker._loads["waits"].room
        two.until(lambda: room.view.state is RoomState.REQUESTED, "the prefill server is asked")
        two.prefill.close()
        two.decode.worker.load(Load("lost", two.address, 3, 0, [9]))
        two.until_loaded("waits", "lost")
        assert two.failed == {8, 9}


def test_a_decode_server_that_is_gone_gives_blocks_back() -> None:
    with pair() as two:
        two.load("d", 7, [8])
        room = two.decode.worker._loads["d"].room
        two.until(lambda: room.view.state is RoomState.REQUESTED, "the prefill server is asked")
        two.decode.close()
        two.send("p", 7, [1])
        two.until(lambda: "p" in two.sent, "the blocks are free")


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    ("registry", "settings", "sentence"),
    [
        ("127.0.0.1:1", {}, "127.0.0.1:1"),
        ("nonsense", {}, "nonsense"),
        ("10.0.0.1:5", {"registries": ["127.0.0.1"]}, "registries of this decode server"),
    ],
)
def test_a_registry_that_is_none_fails_its_request_alone(
    registry: str, settings: dict[str, Any], sentence: str, release: bool
) -> None:
    with pair(decode=settings) as two:
        address, two.address = two.address, registry
        if release:
            two.release("d", 7)
            two.until(lambda: two.released == {"d"}, "vLLM is told")
        else:
            two.load("d", 7, [8])
            two.until_loaded("d")
            assert two.failed == {8}
        two.until(lambda: sentence in reasons(two.decode), "the reason is recorded")
        two.address = address
        two.send("p", 8, [1])
        two.load("e", 8, [3])
        two.until_loaded("e")
        two.assert_moved([1], [3])


def test_a_load_that_is_aborted_before_its_prefill_server_is_known_lets_the_blocks_go() -> None:
    """There is no rank yet that could be told, and vLLM asks once."""
    with pair(prefill={"hold_timeout_s": 1000.0}) as two:
        instances = two.decode._side.instances
        answers = instances.looks_up, instances.get
        instances.looks_up, instances.get = lambda _: True, lambda _: None
        two.send("p", 7, [1])
        two.load("d", 7, [8])
        two.abort("d")
        two.step()
        assert two.loaded == set(), "its blocks are vLLM's again once its prefill server is told"
        instances.looks_up, instances.get = answers
        two.until_loaded("d")
        assert two.failed == set(), "vLLM has ended it"
        two.until_sent("p")
        assert (two.target.bytes == CANARY).all()


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_decode_server_with_another_secret_lets_the_blocks_go(
    tmp_path: Path, ranks: int, release: bool
) -> None:
    """It is told of no prefill rank to which it could say that, and says so at the registry."""
    for name in ("a", "b"):
        write_secret_file(tmp_path / name)
    here, there = ({"secret_file": str(tmp_path / name)} for name in ("a", "b"))
    here["hold_timeout_s"] = 1000.0
    with pair(prefill=here, decode=there, prefill_server=with_tp(ranks)) as two:
        two.send("p", 7, [1])
        if release:
            two.release("d", 7)
            two.until(lambda: two.released == {"d"}, "vLLM is told")
        else:
            two.load("d", 7, [8])
            two.until_loaded("d")
            assert two.failed == {8}
        two.until_sent("p")
        recorder = two.prefill._side._recorder
        two.until(lambda: recorder.rooms()["aborted"], "it was given up, and not waited for")
        assert (two.target.bytes == CANARY).all()


def mismatch(two: Pair) -> str:
    two.send("p", 7, [1])
    two.load("d", 7, [8])
    two.until_loaded("d")
    two.until_sent("p")
    assert two.failed == {8}
    assert (two.target.bytes == CANARY).all()
    return reasons(two.decode)


@pytest.mark.usefixtures("short_grace")
def test_another_block_size_is_refused_with_both_values() -> None:
    with pair(decode_server=server(cache_config__block_size=64)) as two:
        said = mismatch(two)
    assert "page_size is 32 on prefill and 64 on decode" in said
    assert "(--block-size)" in said, "as vLLM calls it"


@pytest.mark.usefixtures("short_grace")
def test_another_arrangement_is_refused_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    with pair(kernel="other") as two:
        said = mismatch(two)
    assert "kv_layout is vllm K 1 rows of heads of 256 bytes" in said
    assert "(--attention-backend, and on a CPU its instructions)" in caplog.text


@pytest.mark.usefixtures("short_grace")
def test_another_model_is_refused_with_both_values() -> None:
    with pair(target=Cache(numbers=4)) as two:
        said = mismatch(two)
    assert "1 rows of heads of 256 bytes" in said
    assert "1 rows of heads of 128 bytes" in said
