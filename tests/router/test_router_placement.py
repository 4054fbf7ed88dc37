# SPDX-License-Identifier: Apache-2.0
"""Where a prompt's cache is, how long its first token takes, and who is chosen by that."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import token_names

from sglang_mooncake.router.fit import Kin, Times, Work, WorkFit, work_of
from sglang_mooncake.router.known import KnownPages, first_of, without_gap
from sglang_mooncake.router.kv_events import NEVER
from sglang_mooncake.router.looking import PAGE_TOKENS, Looker
from sglang_mooncake.router.pages import (
    TEXT_PAGE_BYTES,
    own_names,
    seed_of,
    text_names,
)
from sglang_mooncake.router.placement import (
    Figures,
    Look,
    Placed,
    PrefillView,
    best,
    expect,
    late_s,
    place,
)
from sglang_mooncake.router.prompts import cached_max, prompt_of
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import CHAT, COMPLETIONS, GENERATE, Body, Told, body_of

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def body(**members: object) -> Body:
    return body_of(json.dumps(members).encode())


# --- names ---


def test_names_of_tokens_are_a_chain_of_digests() -> None:
    tokens = list(range(7))
    first = hashlib.sha256(struct.pack("<3I", 0, 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<3I", 3, 4, 5)).digest()
    expected = [struct.unpack(">q", one[:8])[0] for one in (first, second)]
    assert token_names(tokens, 3) == expected


@pytest.mark.parametrize("named", [own_names, token_names])
@given(one=TOKENS, other=TOKENS, page_size=st.integers(1, 8))
def test_prompts_have_as_many_names_in_common_as_pages(
    named: Callable[[Sequence[int], int], list[int]],
    one: list[int],
    other: list[int],
    page_size: int,
) -> None:
    same = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    names, others = named(one, page_size), named(other, page_size)
    known = KnownPages(1000)
    known.add(names)
    assert len(names) == len(one) // page_size
    assert known.first_of(others) == same // page_size


def test_tokens_that_are_none_have_no_names() -> None:
    for named in (own_names, token_names):
        assert named([1, -1], 1) == named([2**32], 1) == []


def test_texts_that_begin_alike_have_names_in_common() -> None:
    text = "ä" * TEXT_PAGE_BYTES
    assert len(text_names(text)) == 2
    assert text_names(text)[:1] == text_names(text[: TEXT_PAGE_BYTES // 2] + "b" * 500)[:1]
    assert text_names("short") == []
    assert len(text_names("\ud800" * TEXT_PAGE_BYTES)) == 3, "half of a pair is no error"


def test_requests_that_share_no_cache_share_no_names() -> None:
    looker = Looker()
    asks: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"lora_path": "a"},
        {"lora_path": "a", "cache_salt": "a"},
        {"image_data": ["a"]},
    ]
    prompt = list(range(PAGE_TOKENS))
    looks = [looker.look(body(input_ids=prompt, **more), GENERATE) for more in asks]
    assert len({tuple(look.names) for look in looks}) == len(asks)
    for look, seed in ((looks[0], b""), (looks[1], seed_of("a"))):
        assert look.names == own_names(prompt, PAGE_TOKENS, seed)
        assert look.event_names(PAGE_TOKENS) == token_names(prompt, PAGE_TOKENS, seed)


# --- prompts ---


@pytest.mark.parametrize(
    ("path", "members", "prompt"),
    [
        (GENERATE, {"text": "a"}, "a"),
        (GENERATE, {"text": ["a", "b"]}, "a"),
        (GENERATE, {"text": None, "input_ids": [1, 2]}, (1, 2)),
        (GENERATE, {"input_ids": [[1, 2], [3]]}, (1, 2)),
        (GENERATE, {"input_ids": ["x"]}, "x"),
        (GENERATE, {"input_embeds": [[0.5]]}, None),
        (GENERATE, {"text": 7}, None),
        (COMPLETIONS, {"prompt": "a"}, "a"),
        (COMPLETIONS, {"prompt": [1, 2]}, (1, 2)),
        (COMPLETIONS, {"prompt": []}, ()),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, "user\na"),
        (CHAT, {"messages": "nonsense"}, None),
        (CHAT, {}, None),
        (
            CHAT,
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "s"}]},
                    {"role": "user", "content": [{"type": "image_url"}]},
                    {"role": "user", "content": "b"},
                ]
            },
            "system\ns",
        ),
    ],
)
def test_the_prompt_of_a_request(path: str, members: dict[str, Any], prompt: object) -> None:
    assert prompt_of(body(**members), path) == prompt


@pytest.mark.parametrize(
    ("members", "most"),
    [
        ({}, None),
        ({"return_logprob": True}, None),
        ({"return_logprob": True, "logprob_start_len": -1}, None),
        ({"return_logprob": True, "logprob_start_len": 7}, 7),
        ({"return_logprob": False, "logprob_start_len": 7}, None),
        ({"return_logprob": [True, True], "logprob_start_len": [9, 3]}, 3),
        ({"return_logprob": True, "logprob_start_len": "x"}, None),
    ],
)
def test_log_probabilities_of_a_prompt_are_computed(
    members: dict[str, Any], most: int | None
) -> None:
    assert cached_max(body(**members), GENERATE) == most
    prompt = [1] * 100
    looked = Looker().look(body(input_ids=prompt, **members), GENERATE)
    assert looked.cached_max == (99 if most is None else most)


def test_a_conversation_begins_as_it_did_a_turn_before() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    shorter = prompt_of(body(messages=messages[:1], tools=[]), CHAT)
    longer = prompt_of(body(messages=messages, tools=[]), CHAT)
    assert isinstance(shorter, str)
    assert isinstance(longer, str)
    assert longer.startswith(shorter)


def test_how_many_tokens_a_text_has_is_learnt() -> None:
    looker = Looker()
    text = "a" * 1000
    for _ in range(300):
        looker.learn(looker.look(body(text=text), GENERATE), 500)
    look = looker.look(body(text=text), GENERATE)
    assert look.tokens == pytest.approx(500, rel=0.01)
    assert look.page_tokens * len(look.names) == pytest.approx(384, rel=0.01)
    looker.learn(looker.look(body(input_ids=[1] * 16), GENERATE), 10**9)
    assert looker.look(body(text=text), GENERATE).tokens == pytest.approx(500, rel=0.01)


# --- what is known ---


def test_a_cache_that_has_nothing_of_what_it_was_sent_counts_as_empty() -> None:
    view = PrefillView(Server("prefill", "http://a:1"))
    view.page_size = PAGE_TOKENS
    prompt = list(range(100))

    def sent(*, cached: int, times: int = 1, count: int = 1, **more: object) -> float:
        look = Looker().look(body(input_ids=prompt, **more), GENERATE)
        for _ in range(times):
            placed = view.send(look, view.figures(look, 0.0), 0.0)
            view.ended(placed, 1.0, Told(100, cached, count))
        return view.figures(look, 1.0).hit_tokens

    assert sent(cached=0) == 96
    assert sent(cached=0, times=NEVER, return_logprob=True, logprob_start_len=0) == 0
    assert sent(cached=0, times=NEVER, count=2) == 96, "the others of a batch are not known"
    assert sent(cached=0, times=NEVER - 1) == 96
    assert sent(cached=0) == 0
    assert view.is_vain
    assert sent(cached=PAGE_TOKENS) == 96
    assert not view.is_vain


class Looked(set[int]):
    """Counts the looks."""

    looks = 0

    def __contains__(self, name: object) -> bool:
        self.looks += 1
        return super().__contains__(name)


@given(known=st.sets(st.integers(0, 63)), count=st.integers(0, 64))
def test_the_end_of_what_is_known_is_found_by_halving(known: set[int], count: int) -> None:
    """Also where some pages are not known, though others that follow them are."""
    looked = Looked(known)
    found = first_of(looked, range(count))
    assert looked.looks <= count.bit_length()
    assert found == 0 or found - 1 in known
    assert found == count or found not in known
    assert without_gap(known, range(count)) <= found


@given(length=st.integers(0, 64), count=st.integers(0, 64))
def test_of_a_tree_that_end_is_the_first_gap(length: int, count: int) -> None:
    known = range(length)
    assert first_of(known, range(count)) == without_gap(known, range(count)) == min(length, count)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12),
    pages_max=st.integers(1, 10),
)
def test_what_is_remembered_is_a_tree(prompts: list[list[int]], pages_max: int) -> None:
    """A name follows from all of the prompt before it, and the last ones are forgotten first."""
    known = KnownPages(pages_max)
    for prompt in prompts:
        known.add(own_names(prompt, 1))
        assert len(known) <= pages_max
        for names in (own_names(one, 1) for one in prompts):
            assert known.first_of(names) == without_gap(known._names, names)


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    known = KnownPages(4)
    known.add([1, 2, 3])
    known.add([1, 2, 4])
    known.add([5])
    assert known.first_of([1, 2, 4]) == 2 + 1
    assert known.first_of([1, 2, 3]) == 2
    known.add([6, 7, 8, 9, 10])
    assert len(known) == 4
    assert known.first_of([6, 7, 8, 9, 10]) == 4
    known.clear()
    assert len(known) == 0


# --- the fit ---


@given(
    fixed_ms=st.integers(0, 500),
    token_us=st.integers(1, 1000),
    tokens=st.lists(st.integers(1, 20_000), min_size=5, max_size=40),
)
def test_a_line_is_found_again(fixed_ms: int, token_us: int, tokens: list[int]) -> None:
    fit = WorkFit()
    for count in tokens:
        fit.learn(work_of(count, 0), fixed_ms / 1e3 + count * token_us / 1e6)
    for count in tokens:
        took_s = fixed_ms / 1e3 + count * token_us / 1e6
        assert fit.work_s(work_of(count, 0)) == pytest.approx(took_s, rel=0.02, abs=1e-3)


@given(
    fixed_ms=st.integers(0, 100),
    token_us=st.integers(10, 1000),
    bend=st.floats(0.0, 1 / 5000),
    prompts=st.lists(
        st.tuples(st.integers(1, 100_000), st.integers(0, 100_000)), min_size=5, max_size=40
    ),
)
def test_what_attention_takes_is_found(
    fixed_ms: int, token_us: int, bend: float, prompts: list[tuple[int, int]]
) -> None:
    """A token takes the longer the more tokens are before it, cached or not."""
    fit = WorkFit()

    def took_s(work: Work) -> float:
        return fixed_ms / 1e3 + token_us / 1e6 * (work.computed + bend * work.pairs)

    works = [work_of(computed + cached, cached) for computed, cached in prompts]
    for work in works:
        fit.learn(work, took_s(work))
    errors = [abs(fit.work_s(one) / took_s(one) - 1) for one in works]
    assert median(errors) < 0.1


@given(
    fixed_ms=st.integers(0, 100),
    token_us=st.integers(10, 1000),
    hand_over_us=st.integers(0, 1000),
    random=st.randoms(use_true_random=False),
)
def test_what_handing_over_takes_is_found(
    fixed_ms: int, token_us: int, hand_over_us: int, random: Random
) -> None:
    """All tokens are handed over, cached or not."""
    fit = WorkFit()

    def took_s(work: Work) -> float:
        return fixed_ms / 1e3 + token_us / 1e6 * work.computed + hand_over_us / 1e6 * work.tokens

    lengths = [random.randrange(10, 4000) for _ in range(40)]
    works = [work_of(one, one * random.choice([0.0, 0.5, 0.99])) for one in lengths]
    for work in works:
        fit.learn(work, took_s(work))
    errors = [abs(fit.work_s(one) / took_s(one) - 1) for one in works]
    assert median(errors) < 0.05


def test_a_token_that_is_computed_costs_time_whatever_was_measured() -> None:
    """Else a cache would be of no use."""
    fit = WorkFit()
    for n in range(1, 50):
        fit.learn(work_of(1000 + n, 20 * n), 1.0 + 0.01 * n)
    for n in range(1, 50):
        fit.learn(work_of(1000, 0), 1.0 + 0.01 * n)
    assert fit.times.token_s > 0.0
    assert min(fit.times) >= 0.0


def test_chance_bends_no_line_far() -> None:
    """Prompts of up to 1,000 tokens say little of what attention takes behind 50,000."""
    random = Random(4)
    for _ in range(20):
        fit = WorkFit()
        for _ in range(100):
            tokens = random.randrange(10, 1000)
            took_s = (0.1 + 1e-3 * tokens) * random.lognormvariate(0.0, 0.3)
            fit.learn(work_of(tokens, 0), took_s)
        for tokens in (100, 500, 1000):
            assert fit.work_s(work_of(tokens, 0)) == pytest.approx(0.1 + 1e-3 * tokens, rel=0.3)
        assert 5.0 < fit.work_s(work_of(50_000, 0)) < 500.0


def test_what_is_expected_counts_attention_to_what_is_cached() -> None:
    figures = Figures(0.0, Times(0.1, 1e-4, 1e-8), hit_tokens=3000.0, under_way=0)
    assert expect(5000, figures).work_s == pytest.approx(0.1 + 0.2 + 2000 * 4000 * 1e-8)
    loading = figures._replace(hit_tokens=1000.0, load_tokens=2000.0, load_token_s=1e-6)
    assert expect(5000, loading).work_s == pytest.approx(0.1 + 0.2 + 2000 * 4000 * 1e-8 + 0.002)


@given(points=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 10)), max_size=30))
def test_a_fit_is_never_negative(points: list[tuple[int, float]]) -> None:
    fit = WorkFit()
    for tokens, took_s in points:
        fit.learn(work_of(tokens, tokens / 2), took_s)
        assert min(fit.times) >= 0.0


def test_a_server_that_has_become_slower_is_seen_to_be() -> None:
    fit = WorkFit()
    for took_s in [0.1] * 100 + [0.3] * 300:
        fit.learn(Work(1000), took_s)
    assert fit.work_s(Work(1000)) == pytest.approx(0.3, rel=0.05)


def test_a_server_whose_first_prompt_was_slow_is_taken_to_be_like_its_kin() -> None:
    kin = Kin()
    slow, fast = WorkFit(kin), WorkFit(kin)
    slow.learn(Work(16), 4.0)
    assert slow.work_s(Work(1000)) > 10.0
    for n in range(1, 30):
        fast.learn(Work(100 * n), 0.1 * n)
    few_s = slow.work_s(Work(1000))
    assert few_s < 2.5
    assert fast.work_s(Work(1000)) == pytest.approx(1.0, rel=0.1)
    for n in range(1, 1000):
        fast.learn(Work(100 * (n % 30)), 0.1 * (n % 30))
    assert slow.work_s(Work(1000)) == pytest.approx(fast.work_s(Work(1000)), rel=0.1)


def test_a_server_that_is_slower_than_its_kin_is_seen_to_be() -> None:
    kin = Kin()
    slow, fast = WorkFit(kin), WorkFit(kin)
    for n in range(200):
        slow.learn(Work(100 * (n % 30)), 0.3 * (n % 30))
        fast.learn(Work(100 * (n % 30)), 0.1 * (n % 30))
    assert slow.work_s(Work(1000)) == pytest.approx(3.0, rel=0.15)
    assert fast.work_s(Work(1000)) == pytest.approx(1.0, rel=0.25)


# --- the choice ---


def figures(**more: Any) -> Figures:
    usual = {"queue_s": 0.0, "times": Times(0.1, 0.001), "hit_tokens": 0.0, "under_way": 0}
    return Figures(**{**usual, **more})


def test_the_first_token_is_expected_after_the_queue_and_what_is_missing() -> None:
    expected = expect(1000, figures(queue_s=2.0, hit_tokens=600))
    assert expected.first_s == pytest.approx(2.5)
    assert expected.work_s == pytest.approx(0.5)
    assert expect(10, figures(hit_tokens=16)).work_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("candidates", "index"),
    [
        ([figures(), figures(hit_tokens=500)], 1),
        ([figures(), figures(hit_tokens=500, queue_s=0.7, under_way=1)], 1),
        ([figures(), figures(hit_tokens=500, queue_s=0.8, under_way=1)], 0),
        ([figures(under_way=1), figures(hit_tokens=500, queue_s=0.95, under_way=1)], 1),
        ([figures(under_way=1), figures(hit_tokens=500, queue_s=1.1, under_way=1)], 0),
        ([figures(under_way=1), figures(under_way=0)], 1),
        ([figures(times=Times(0.1, 0.002)), figures()], 1),
    ],
    ids=["cache", "less work", "queue", "all are busy", "long queue", "load", "speed"],
)
def test_the_earliest_first_token_wins_where_work_counts_a_little(
    candidates: Sequence[Figures], index: int
) -> None:
    for seed in range(5):
        assert best(1000, candidates, Random(seed)) == index


def test_ties_are_left_to_chance() -> None:
    found = {best(1000, [figures(), figures()], Random(seed)) for seed in range(20)}
    assert found == {0, 1}


def views(count: int) -> list[PrefillView]:
    return [PrefillView(Server("prefill", f"http://p{n}:1")) for n in range(count)]


def look(tokens: Sequence[int]) -> Look:
    return Look(token_names(tokens, PAGE_TOKENS), PAGE_TOKENS, len(tokens))


def answered(view: PrefillView, prompt: Look, begun_s: float, took_s: float, cached: int) -> None:
    placed = view.send(prompt, view.figures(prompt, begun_s), begun_s)
    view.ended(placed, begun_s + took_s, Told(int(prompt.tokens), cached))


def test_a_prompt_goes_where_its_beginning_is_unless_the_wait_is_longer() -> None:
    cold, warm = views(2)
    for view in (cold, warm):
        for n in range(1, 20):
            answered(view, Look((), PAGE_TOKENS, 100 * n), -100.0 + 2 * n, n * 0.1, 0)
    prompt = look(range(1600))
    answered(warm, prompt, 10.0, 1.6, 0)
    longer = look([*range(1600), *range(100)])
    choice = place(longer, [cold, warm], 20.0, Random(1))
    assert (choice.view, choice.reason) == (warm, "cache")
    assert choice.figures.hit_tokens == 1600
    # Ten others wait there, of which the first one began when the last one ended.
    for _ in range(10):
        other = Look((), PAGE_TOKENS, 1000)
        warm.send(other, warm.figures(other, 20.0), 20.0)
    choice = place(longer, [cold, warm], 20.5, Random(1))
    assert (choice.view, choice.reason) == (cold, "queue")
    assert warm.queue_s(20.5) == pytest.approx(9.5, rel=0.05)
    assert place(longer, [warm], 20.5, Random(1)).reason == "only"
    assert place(look([7]), [cold, views(1)[0]], 20.5, Random(1)).reason == "load"


def test_a_prompt_is_late_because_of_those_before_it() -> None:
    (view,) = views(1)
    prompt = look(range(1600))

    def late_by_s(limit_s: float | None) -> float:
        return place(prompt, [view], 0.0, Random(1), limit_s).late_s

    nothing_before = view.figures(prompt, 0.0)
    own_s = expect(prompt.tokens, nothing_before).first_s
    assert late_by_s(own_s / 2) == 0.0, "nobody is before it"
    view.send(look([1] * 1600), nothing_before, 0.0)
    assert late_by_s(None) == late_by_s(2.5 * own_s) == 0.0
    assert late_by_s(1.5 * own_s) == pytest.approx(own_s / 2)


def test_a_server_that_is_late_is_passed_over_while_another_is_in_time() -> None:
    """The first one has the prompt, and costs the others the least."""
    has_it = figures(queue_s=3.0, times=Times(0.0, 0.001), hit_tokens=1900, under_way=1)
    free_soon = figures(queue_s=0.5, times=Times(0.0, 0.001), under_way=1)
    busy = figures(queue_s=9.0, times=Times(0.0, 0.001), under_way=1)
    servers = [busy, has_it, free_soon]
    for limit_s, index in ((None, 1), (3.5, 1), (2.8, 2), (2.0, 1)):
        assert best(2000, servers, Random(1), limit_s) == index
    assert [late_s(2000, one, 2.0) for one in servers] == pytest.approx([9.0, 1.1, 0.5])


def test_it_is_told_how_late_the_server_is_that_is_the_least_late() -> None:
    """Also where another one would be chosen, which has the prompt."""
    has_it, other = views(2)
    prompt = look(range(1600))
    for view in (has_it, other):
        for n in range(1, 20):
            answered(view, Look((), PAGE_TOKENS, 100 * n), -100.0 + 2 * n, n * 0.1, 0)
    answered(has_it, prompt, 0.0, 1.6, 0)
    for view, tokens in ((has_it, 3000), (other, 1000)):
        first = Look((), PAGE_TOKENS, tokens)
        view.send(first, view.figures(first, 2.0), 2.0)
    choice = place(prompt, [has_it, other], 2.0, Random(1), 1.0)
    assert choice.view is has_it
    assert choice.late_s == pytest.approx(1.6, rel=0.05)
    assert place(prompt, [has_it, other], 2.0, Random(1), 2.8).view is other


def test_a_queue_is_worked_off() -> None:
    """What is computed together has the time once that any prompt takes."""
    (view,) = views(1)
    for n in range(20):
        answered(view, Look((), PAGE_TOKENS, 100 * n), -300.0 + 10 * n, 0.1 + n * 0.1, 0)

    def send(now_s: float) -> Placed:
        one = Look((), 1, 900)
        return view.send(one, view.figures(one, now_s), now_s)

    def left_s(now_s: float) -> float:
        return view.figures(Look((), 1, 0), now_s).queue_s

    first, second, third = send(0.0), send(0.1), send(0.2)
    assert first.alone_s == pytest.approx(1.0, rel=0.01)
    assert left_s(0.2) == pytest.approx(0.8 + 2 * 0.9, rel=0.02)
    view.ended(first, 1.0, None)
    # The other two were there when it ended, and are computed together.
    assert left_s(1.5) == pytest.approx(1.9 - 0.5, rel=0.02)
    fourth = send(1.5)
    assert left_s(1.5) == pytest.approx(1.9 - 0.5 + 0.9, rel=0.02)
    for placed in (second, third):
        view.ended(placed, 2.9, None)
    assert left_s(2.9) == pytest.approx(1.0, rel=0.02)
    view.ended(fourth, 3.9, None)
    assert left_s(3.9) == 0.0


def test_a_server_that_is_stuck_is_not_taken_for_one_that_is_free() -> None:
    stuck, free = views(2)
    prompt = look(range(1600))
    answered(stuck, prompt, 0.0, 0.2, 0)
    placed = stuck.send(prompt, stuck.figures(prompt, 1.0), 1.0)
    assert place(prompt, [stuck, free], 10.0, Random(1)).view is free
    stuck.ended(placed, 10.0, None)
    assert place(prompt, [stuck, free], 10.0, Random(1)).view is stuck


def test_a_cache_that_had_less_than_expected_is_counted() -> None:
    (view,) = views(1)
    prompt = look(range(160))
    answered(view, prompt, 0.0, 1.0, 0)
    answered(view, prompt, 1.0, 1.0, 159)
    assert view.counts.missed == 0
    assert view.counts.expected_hits == 159
    answered(view, prompt, 2.0, 1.0, 0)
    assert view.counts.missed == 1


def test_the_error_is_that_of_what_was_expected_after_the_first_hundred_prompts() -> None:
    """Of all servers together, since each learns from the others, too."""
    kin = Kin()
    one, other = (PrefillView(Server("prefill", f"http://{name}:1"), kin=kin) for name in "ab")
    prompt = look(range(160))
    for n in range(100):
        answered((one, other)[n % 2], Look((), PAGE_TOKENS, 160), 2.0 * n, 1.0, 0)
    assert one.median_error is other.median_error is None
    answered(one, prompt, 300.0, 2.0, 0)
    assert one.median_error == pytest.approx(0.5, rel=0.05)


def test_a_cache_that_was_flushed_and_a_server_that_was_ill_have_nothing() -> None:
    (view,) = views(1)
    prompt = look(range(160))
    for forget in (view.forget, lambda: view.server.failed("gone", 0.0, 1)):
        answered(view, prompt, 0.0, 1.0, 0)
        assert view.figures(prompt, 1.0).hit_tokens == 159
        forget()
        assert view.figures(prompt, 1.0).hit_tokens == 0
