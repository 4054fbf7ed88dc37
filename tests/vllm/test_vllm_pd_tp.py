# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode servers of vLLM that have several TP ranks, and not equally many."""

from __future__ import annotations

from typing import Any

import pytest
from pd_makers import TOKENS, Cache, Pair, pair, reasons, with_tp

from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.vllm.pd_requests import Load, Send

#: Ranks of the prefill server, and of the decode server. Of four, two have the same head.
SIZES = [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4), (4, 4)]
#: Of those, one for each way in which ranks of both sides go together.
WAYS = [(2, 1), (1, 2), (4, 2), (2, 4)]
LATENT: dict[str, Any] = {"model_config__use_mla": True}


def two_of(ours: int, theirs: int, **settings: Any) -> Any:
    return pair(prefill_server=with_tp(ours), decode_server=with_tp(theirs), **settings)


def until_asked(two: Pair, name: str) -> None:
    """All prefill ranks have been asked for a request's blocks."""
    uses = [one.worker._loads[name].room for one in two.decodes]
    requested = RoomState.REQUESTED
    two.until(lambda: all(room.view.state is requested for room in uses), "all are asked")


@pytest.mark.slow
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_each_rank_gets_its_heads(ours: int, theirs: int, heads_first: bool) -> None:
    source, target = (Cache(seed, heads_first=heads_first) for seed in (1, None))
    with two_of(ours, theirs, source=source, target=target) as two:
        two.send("p", 7, [1, 2, 5], tokens=2 * TOKENS + 1)
        two.load("d", 7, [4, 9, 8])
        two.until_loaded("d")
        two.assert_moved([1, 2, 5], [4, 9, 8])
        two.until_sent("p")
        assert not two.failed
        assert two.decodes[-1].engine._config.label.count("(tp") == (theirs > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [(2, 1), (1, 2), (2, 2)])
def test_each_rank_gets_the_whole_latent(ours: int, theirs: int) -> None:
    source, target = Cache(seed=1, heads=1), Cache(heads=1)
    servers = with_tp(ours, **LATENT), with_tp(theirs, **LATENT)
    with pair(source, target, prefill_server=servers[0], decode_server=servers[1]) as two:
        two.send("p", 7, [1, 2])
        two.load("d", 7, [9, 8])
        two.until_loaded("d")
        two.assert_moved([1, 2], [9, 8])
        two.until_sent("p")
        assert not two.failed


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [(2, 1), (1, 2)])
def test_what_the_decode_server_holds_is_not_sent(ours: int, theirs: int) -> None:
    with two_of(ours, theirs) as two:
        two.send("p", 7, [1, 2, 3])
        two.load("d", 7, [8], held_tokens=2 * TOKENS)
        two.until_loaded("d")
        two.assert_moved([3], [8])


@pytest.mark.slow
def test_a_block_that_did_not_come_to_one_rank_has_failed() -> None:
    with two_of(2, 2) as two:
        two.load("d", 7, [8, 9])
        until_asked(two, "d")
        two.prefills[1].close()
        two.prefill.worker.send(Send("p", 7, 2 * TOKENS, [1, 2]))
        two.until_loaded("d")
        assert two.failed == {8, 9}
        expected = two.source.bytes[:, [1, 2]][:, :, two.heads[0]]
        assert (two.target.bytes[:, [8, 9]] == expected).all(), "the other rank has it"


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(("ours", "theirs"), WAYS)
def test_a_request_that_is_ended_gives_blocks_back_on_all_ranks(ours: int, theirs: int) -> None:
    with two_of(ours, theirs) as two:
        two.load("d", 7, [8])
        until_asked(two, "d")
        two.abort("d")
        two.until_loaded("d")
        assert not two.failed
        two.send("p", 7, [1])
        two.until_sent("p")
        two.assert_moved([], [])


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(("ours", "theirs"), WAYS)
def test_a_prompt_that_nobody_needs_is_let_go_by_all_ranks(ours: int, theirs: int) -> None:
    with two_of(ours, theirs) as two:
        two.send("p", 7, [1])
        two.release("d", 7)
        two.until_sent("p")
        two.until(lambda: two.released == {"d"}, "all ranks have told")
        two.assert_moved([], [])


@pytest.mark.slow
def test_blocks_that_nobody_asks_for_are_given_back_by_all_ranks() -> None:
    with two_of(2, 1, prefill={"hold_timeout_s": 0.2}) as two:
        two.send("p", 7, [1])
        two.until_sent("p")


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 2), (4, 2), (2, 4)])
def test_a_decode_rank_that_is_gone_gives_blocks_back_on_all_ranks(ours: int, theirs: int) -> None:
    """Some other rank of its server has asked the same prefill rank, or another one."""
    with two_of(ours, theirs, prefill={"hold_timeout_s": 5.0}) as two:
        two.load("d", 7, [8])
        until_asked(two, "d")
        two.decodes[-1].close()
        two.send("p", 7, [1])
        two.until_sent("p")
        said = " ".join(reasons(one) for one in two.prefills)
        assert "(hold_timeout_s)" not in said or ours > 1


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 2)])
def test_a_rank_that_does_not_find_the_prefill_server_fails_the_request(
    ours: int, theirs: int
) -> None:
    """The other one has asked: it waits for no longer than it may."""
    with two_of(
        ours, theirs, prefill={"hold_timeout_s": 3.0}, decode={"load_timeout_s": 2.0}
    ) as two:
        two.send("p", 7, [1])
        two.decodes[0].worker.load(Load("d", two.address, 7, 0, [8]))
        two.decodes[1].worker.load(Load("d", "127.0.0.1:1", 7, 0, [8]))
        two.until_loaded("d")
        assert two.failed == {8}
        two.until_sent("p")
        two.send("q", 8, [2])
        two.load("e", 8, [9])
        two.until_loaded("e")
        two.until_sent("q")
        expected = two.source.bytes[:, 2]
        for target, heads in zip(two.targets, two.heads, strict=True):
            assert (target.bytes[:, 9] == expected[:, heads]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), WAYS)
def test_a_prefill_server_that_starts_anew_serves_what_it_computes(ours: int, theirs: int) -> None:
    with two_of(ours, theirs, decode={"load_timeout_s": 5.0}) as two:
        two.send("p", 7, [1])
        two.load("d", 7, [8])
        two.until_loaded("d")
        two.load("waits", 8, [9])
        until_asked(two, "waits")
        two.restart()
        two.until_loaded("waits")
        assert two.failed == {9}
        two.load("former", 9, [10])
        two.until_loaded("former")
        assert two.failed == {9, 10}
        two.send("q", 11, [2, 3])
        two.load("e", 11, [11, 12])
        two.until_loaded("e")
        assert two.failed == {9, 10}
        two.assert_moved([1, 2, 3], [8, 11, 12])
        two.until_sent("q")


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (1, 2)])
def test_blocks_of_a_load_that_ended_get_another_prompt(ours: int, theirs: int) -> None:
    with two_of(ours, theirs) as two:
        two.load("d", 7, [8, 9])
        until_asked(two, "d")
        two.abort("d")
        two.send("p", 7, [1, 2])  # what it asked for may still be sent
        two.until_loaded("d")
        # The prefill side may tell the second rank of the first one's end before it ends itself.
        two.failed.clear()
        two.send("q", 8, [3, 4])
        two.load("e", 8, [8, 9])
        two.until_loaded("e")
        two.until_sent("p", "q")
        assert not two.failed
        two.assert_moved([3, 4], [8, 9])
