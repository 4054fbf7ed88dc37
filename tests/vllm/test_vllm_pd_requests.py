# SPDX-License-Identifier: Apache-2.0
"""Which blocks vLLM's schedulers have handed over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mooncake.vllm.pd_offers import Offer
from sglang_mooncake.vllm.pd_requests import Load, Loads, Release, Send, send_of

BLOCK = 4


def offer(tokens: int, room: int = 7) -> Offer:
    return Offer("host:1", room, tokens, "digest", {})


@given(st.integers(1, 40), st.integers(0, 5))
def test_a_prompts_blocks_are_sent_and_none_behind_it(tokens: int, more: int) -> None:
    count = -(-tokens // BLOCK)
    blocks = list(range(100, 100 + count + more))
    assert send_of("r", 7, tokens, blocks, BLOCK) == Send("r", 7, tokens, blocks[:count])
    with pytest.raises(ValueError, match=f"a prompt of {tokens} tokens has {count} blocks"):
        send_of("r", 7, tokens, blocks[: count - 1], BLOCK)


@given(st.integers(1, 40), st.data())
def test_what_is_not_held_is_loaded_once(tokens: int, data: st.DataObject) -> None:
    held = data.draw(st.integers(0, (tokens - 1) // BLOCK)) * BLOCK
    loads = Loads(BLOCK)
    loads.new("r", offer(tokens))
    for _ in range(data.draw(st.integers(1, 3))):  # blocks may be lacking for some steps
        assert loads.match("r", held) == tokens - held
    blocks = list(range(100, 100 + -(-tokens // BLOCK)))
    load = loads.given("r", blocks, tokens - held)
    assert load == Load("r", "host:1", 7, held, blocks[held // BLOCK :])
    assert loads.given("r", blocks, 0) is None  # vLLM tells of further blocks
    assert loads.match("r", 0) == 0  # it did not come, and is computed
    assert loads.finished("r") is None
    assert len(loads) == 0


@given(st.integers(2, 40), st.data())
def test_a_prompt_that_has_room_in_part_does_not_come(tokens: int, data: st.DataObject) -> None:
    """Nothing raises in the scheduler's process, and its blocks are named, to be computed."""
    held = data.draw(st.integers(0, (tokens - 2) // BLOCK)) * BLOCK
    loads = Loads(BLOCK)
    loads.new("r", offer(tokens))
    loads.match("r", held)
    room = data.draw(st.integers(1, tokens - held - 1))
    blocks = list(range(100, 100 + -(-(held + room) // BLOCK)))
    load = loads.given("r", blocks, room)
    assert isinstance(load, Load)
    assert load.blocks == blocks[held // BLOCK :]
    assert f"{tokens - held} tokens are to be loaded behind {held}" in load.refusal
    assert loads.finished("r") is None
    assert len(loads) == 0


def test_a_request_that_loads_nothing_lets_the_prefill_server_go() -> None:
    loads = Loads(BLOCK)
    loads.new("r", offer(9))
    assert loads.match("r", 0) == 9
    release = loads.given("r", [1, 2, 3], 0)  # vLLM reads no cache for it
    assert isinstance(release, Release)
    assert not release.holds
    assert loads.finished("r") is None


def test_a_request_that_ends_before_it_is_computed_lets_it_go_too() -> None:
    loads = Loads(BLOCK)
    loads.new("r", offer(9))
    loads.match("r", 4)
    release = loads.finished("r")
    assert isinstance(release, Release)
    assert release.holds
    assert loads.finished("r") is None
    assert not loads._held
    assert loads.to_compare("r") is None


def test_an_offer_that_does_not_fit_is_let_go_and_computed() -> None:
    loads = Loads(BLOCK)
    one = offer(9)
    loads.new("r", one)
    assert loads.to_compare("r") is one
    assert loads.to_compare("r") is None
    assert loads.refuse("r", "why") == Release("r", "host:1", 7, "why", holds=False)
    assert loads.match("r", 0) == 0
    assert loads.given("r", [1, 2, 3], 0) is None
    assert loads.finished("r") is None


def test_an_offer_is_good_for_one_request_at_a_time() -> None:
    loads = Loads(BLOCK)
    assert loads.new("one", offer(9))
    assert loads.match("one", 0) == 9
    loads.given("one", [1, 2, 3], 9)
    assert not loads.new("another", offer(9))
    assert loads.match("another", 0) == 0
    assert loads.finished("another") is None  # which must not end the room of the first one
    loads.finished("one")
    assert loads.new("later", offer(9))


def test_a_request_without_an_offer_is_computed() -> None:
    loads = Loads(BLOCK)
    assert loads.match("r", 0) == 0
    assert loads.given("r", [1], 0) is None
    assert loads.finished("r") is None


EVENTS = st.lists(
    st.tuples(st.sampled_from(["new", "match", "given", "nothing", "finished"]), st.integers(0, 2)),
    max_size=30,
)


@settings(max_examples=100)  # also in the fast layer: see tests/conftest.py
@given(EVENTS)
def test_each_offer_is_used_or_let_go_once(events: list[tuple[str, int]]) -> None:
    loads, made, used, matched = Loads(BLOCK), 0, [], {}
    live: dict[str, int] = {}
    for what, number in events:
        name, work = f"r{number}", None
        if what == "new" and name not in live:
            live[name], made = made, made + 1
            loads.new(name, offer(9, live[name]))
        elif what == "match":
            matched[name] = loads.match(name, 4)
        elif what in ("given", "nothing") and name in live and name in matched:
            work = loads.given(name, [1, 2, 3], matched[name] if what == "given" else 0)
            matched[name] = 0
        elif what == "finished":
            work = loads.finished(name)
            live.pop(name, None)
            matched.pop(name, None)
        used += [work.room] if work is not None else []
    used += [work.room for name in live if (work := loads.finished(name)) is not None]
    assert sorted(used) == list(range(made))
