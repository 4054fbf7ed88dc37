# SPDX-License-Identifier: Apache-2.0
"""What the router knows of the store that prefill servers load from."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, answers, run, until
from store_host import pid_of, shared, store_directory
from store_makers import SIG, TIMEOUT_S
from store_makers import until as soon
from store_objects import filled

from bootstrap_server.admission.secret import Keys
from kvstore.host.lease import Lease
from kvstore.objects.changes import Keys as PageKeys
from kvstore.objects.outcomes import Put
from kvstore.store import Store
from sglang_mooncake.router import store_source
from sglang_mooncake.router.fit import LoadFit, Times
from sglang_mooncake.router.pages import token_digests
from sglang_mooncake.router.placement import Figures, Look, PrefillView, expect, place
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import Told
from sglang_mooncake.router.store_source import NEVER, SILENT_S, StoreSource, open_store

PAGE = 16
PROMPT = list(range(10 * PAGE))


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


def keys_of(tokens: Sequence[int]) -> PageKeys:
    """As servers store the pages."""
    raw = b"".join(one[:16] for one in token_digests(tokens, PAGE))
    return np.frombuffer(raw, np.uint8).reshape(-1, 16)


def stored(store: Store, tokens: Sequence[int]) -> None:
    keys = keys_of(tokens)
    room = filled(store, len(keys), 1000)
    assert store.put(keys, SIG, room.pieces, TIMEOUT_S) == [Put.STORED] * len(keys)


def look(tokens: Sequence[int]) -> Look:
    return Look((), PAGE, len(tokens), prompt=tokens)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_knows_what_the_owner_has(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lends nothing itself."""
    settings = json.dumps({"directory": str(directory), "memory": "1GiB"})
    clock = Clock()
    with Store(shared(directory)) as lender, open_store(settings, Keys()) as own:
        source = StoreSource(own, clock)
        assert own.status().memory == 0
        soon(lambda: source.look() or source.owners == 1)  # type: ignore[func-returns-value]
        assert source.state == "live"
        stored(lender, PROMPT[: 4 * PAGE])
        soon(lambda: source.first_of(token_digests(PROMPT, PAGE)) == 4)
        assert look(PROMPT).stored_tokens(source, PAGE) == 4 * PAGE
        assert source.first_of(token_digests([7, *PROMPT], PAGE)) == 0
        assert look(["text"]).stored_tokens(source, PAGE) == 0  # type: ignore[list-item]
        assert source.age_s(clock.now_s + 2.0) == 2.0
        monkeypatch.setattr(Lease, "_start", lambda _: None)  # The next owner would answer.
        os.kill(pid_of(lender), signal.SIGKILL)
        soon(lambda: source.look() or not source.owners)  # type: ignore[func-returns-value]
        clock.now_s += SILENT_S
        source.look()
        assert source.state == "silent"
        assert source.first_of(token_digests(PROMPT, PAGE)) == 0
        assert "no owner of the store answers" in caplog.text


def test_an_owner_that_stands_still_is_silent(directory: Path) -> None:
    """Its process lives, and its table can be read."""
    clock = Clock()
    with Store(shared(directory)) as lender, Store(shared(directory, 0)) as own:
        source = StoreSource(own, clock)
        soon(lambda: source.look() or source.owners == 1)  # type: ignore[func-returns-value]
        stored(lender, PROMPT)
        assert source.first_of(token_digests(PROMPT, PAGE)) == 10
        own._owners._link._timeout_s = 0.1  # type: ignore[attr-defined]
        os.kill(pid_of(lender), signal.SIGSTOP)
        try:
            soon(lambda: source.look() or not source.owners)  # type: ignore[func-returns-value]
            clock.now_s += SILENT_S
            source.look()
            assert source.state == "silent"
            assert source.first_of(token_digests(PROMPT, PAGE)) == 0
        finally:
            os.kill(pid_of(lender), signal.SIGCONT)
        soon(lambda: source.look() or source.state == "live")  # type: ignore[func-returns-value]


def test_an_owner_that_lends_nothing_is_none(directory: Path) -> None:
    with Store(shared(directory, 0)) as own:
        soon(own._owners.usable, "its host has an owner")
        source = StoreSource(own, Clock())
        source.look()
        assert (source.state, source.owners) == ("silent", 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ('{"indx": ""}', "did you mean 'index'"),
        ('{"index": "redis://127.0.0.1:1"}', "needs a secret"),
    ],
)
def test_settings_that_are_none(settings: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_store(settings, Keys())


def test_a_store_that_never_hits_is_told(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store(shared(directory)) as lender, Store(shared(directory, 0)) as own:
        source = StoreSource(own, Clock())
        stored(lender, PROMPT)
        soon(lambda: source.look() or source.objects == 10)  # type: ignore[func-returns-value]
        others = token_digests([9] * PAGE, PAGE)
        for _ in range(NEVER):
            assert source.state == "live"
            assert source.first_of(others) == 0
        source.look()
        assert source.state == "never hits"
        assert f"nothing of the last {NEVER} prompts is in it" in caplog.text
        assert source.first_of(token_digests(PROMPT, PAGE)) == 10
        source.look()
        assert source.state == "live"
        for _ in range(NEVER):
            source.told(16, 0)
        source.look()
        assert source.state == "never hits"
        source.told(16, 16)
        source.look()
        assert source.state == "live"


# --- what follows from it ---


class Pool:
    """So many pages of any prompt are in it."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.said: list[tuple[float, float]] = []

    def first_of(self, digests: Sequence[bytes]) -> int:
        return min(self.pages, len(digests))

    def told(self, expected: float, found: float) -> None:
        self.said.append((expected, found))


def view_with(pool: Pool) -> PrefillView:
    view = PrefillView(Server("prefill", "http://p:1"), pool)
    view.page_size = PAGE
    for n in range(1, 20):
        answered(view, Look((), PAGE, 100 * n), n * 0.1, 0)
    return view


NOW_S = itertools.count(0.0, 100.0)


def answered(view: PrefillView, prompt: Look, took_s: float, cached: int) -> None:
    """Long after all that was before."""
    now_s = next(NOW_S)
    figures = view.figures(prompt, now_s)
    placed = view.send(prompt, figures, now_s)
    view.ended(placed, now_s + took_s, Told(int(prompt.tokens), cached))


def test_what_is_loaded_is_not_computed_and_its_time_is_measured() -> None:
    pool = Pool(5)
    view = view_with(pool)
    tokens = len(PROMPT)
    figures = view.figures(look(PROMPT), next(NOW_S))
    assert (figures.hit_tokens, figures.load_tokens) == (0, 5 * PAGE)
    assert figures.load_token_s == pytest.approx(1e-4, rel=0.1)
    computed_s = (tokens - 5 * PAGE) * 1e-3
    for _ in range(200):  # Loading takes half of what computing takes.
        answered(view, look(PROMPT), computed_s + 5 * PAGE * 5e-4, 5 * PAGE)
    figures = view.figures(look(PROMPT), next(NOW_S))
    assert figures.load_token_s == pytest.approx(5e-4, rel=0.1)
    assert expect(tokens, figures).work_s == pytest.approx(0.12, rel=0.05)
    assert pool.said == [(5 * PAGE, 5 * PAGE)] * 200
    assert view.counts.loads == view.counts.expected_loads == 200 * 5 * PAGE
    answered(view, look(PROMPT), tokens * 1e-3, 0)
    assert pool.said[-1] == (5 * PAGE, 0)
    assert view.counts.missed == 0, "its own cache had no less than was expected"


def test_a_store_that_is_slower_than_computing_is_still_measured() -> None:
    view = view_with(Pool(5))
    for took_s in [1.0] * 100 + [0.081] * 1000:
        answered(view, look(PROMPT), took_s, 5 * PAGE)
    assert view.figures(look(PROMPT), next(NOW_S)).load_token_s < 1e-3


def test_a_server_that_has_told_no_page_size_loads_nothing() -> None:
    view = PrefillView(Server("prefill", "http://p:1"), Pool(5))
    assert view.figures(look(PROMPT), next(NOW_S)).load_tokens == 0


def test_a_prompt_goes_elsewhere_when_loading_is_sooner_than_waiting() -> None:
    pool = Pool(10)
    free, warm = view_with(pool), view_with(pool)
    prompt = Look([1] * 10, PAGE, len(PROMPT), prompt=PROMPT)
    answered(warm, prompt, 0.01, 0)
    now_s = next(NOW_S)
    for _ in "ab":
        other = Look((), PAGE, 1000)
        warm.send(other, warm.figures(other, now_s), now_s)
    choice = place(prompt, [free, warm], now_s, Random(1))
    assert (choice.view, choice.reason) == (free, "queue")


@given(
    hits=st.floats(0, 2e3),
    loads=st.floats(0, 2e3),
    load_s=st.floats(0, 2e-3),
    tokens=st.integers(1, 2000),
)
def test_a_store_makes_no_prompt_later(
    hits: float, loads: float, load_s: float, tokens: int
) -> None:
    without = Figures(0.0, Times(0.1, 1e-3), hits, 0)
    having = without._replace(load_tokens=loads, load_token_s=load_s)
    assert expect(tokens, having).work_s <= expect(tokens, without).work_s + 1e-9
    assert expect(tokens, having).load_tokens <= max(0.0, tokens - hits)


def test_a_load_that_took_no_time_is_no_debt() -> None:
    fit = LoadFit()
    fit.learn(100, -5.0)
    assert fit.token_s(1.0) == 0.0


@pytest.mark.slow
def test_requests_are_served_though_the_stores_owner_is_killed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_source, "LOOK_S", 0.02)
    monkeypatch.setattr(store_source, "SILENT_S", 0.1)
    monkeypatch.setattr("sglang_mooncake.router.event_source.ASK_AGAIN_S", 0.02)
    settings = json.dumps({"directory": str(directory), "memory": "1GiB"})

    async def job(source: StoreSource, owner: int) -> None:
        async with World(prefill_policy="cache_aware", pool=source) as world:
            world.prefill[0].info = {"page_size": PAGE}
            ((view,),) = world.views.values()
            await until(lambda: source.objects == 4 and view.page_size == PAGE)
            assert (await world.ask(input_ids=PROMPT))[0] == 200
            monkeypatch.setattr(Lease, "_start", lambda _: None)  # The next owner would answer.
            os.kill(owner, signal.SIGKILL)
            assert (await world.ask(input_ids=PROMPT))[0] == 200
            await until(lambda: source.state == "silent")
            assert (await world.ask(input_ids=PROMPT))[0] == 200
            _, text = await world.get("/metrics")
            assert "sglang_mooncake_router_store_is_live 0\n" in text
            looks = source.looks
            assert (await world.ask(input_ids=PROMPT))[0] == 200
            assert source.looks == looks, "nobody has anything"

    with (
        Store(shared(directory)) as lender,
        closing(StoreSource(open_store(settings, Keys()))) as source,
    ):
        stored(lender, PROMPT[: 4 * PAGE])
        run(job(source, pid_of(lender)))


def test_a_router_with_a_store_tells_of_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_source, "LOOK_S", 0.02)
    monkeypatch.setattr("sglang_mooncake.router.event_source.ASK_AGAIN_S", 0.02)

    async def job(source: StoreSource) -> None:
        async with World(prefill_policy="cache_aware", pool=source) as world:
            told = {"output_ids": [1], "meta_info": {"prompt_tokens": 160, "cached_tokens": 64}}
            world.prefill[0].answer = answers(told)
            world.prefill[0].info = {"page_size": PAGE}
            ((view,),) = world.views.values()
            await until(lambda: source.objects == 4 and view.page_size == PAGE)
            assert (await world.ask(input_ids=PROMPT))[0] == 200
            await world.idle()
            _, text = await world.get("/v1/router")
            status = json.loads(text)
            assert status["store"]["found"] == status["store"]["looks"] == 1
            assert status["store"]["loaded_tokens"] == 64
            assert status["servers"]["prefill"][0]["store_tokens"] == 64
            _, text = await world.get("/")
            assert "store: live, 1 owners, 4 objects, 1 of 1 prompts found" in text
            _, text = await world.get("/metrics")
            assert "sglang_mooncake_router_store_is_live 1\n" in text

    with (
        Store(shared(directory)) as lender,
        Store(shared(directory, 0)) as own,
        closing(StoreSource(own)) as source,
    ):
        stored(lender, PROMPT[: 4 * PAGE])
        soon(lambda: own.known(keys_of(PROMPT[: 4 * PAGE])).all())
        run(job(source))
    assert source.first_of(token_digests(PROMPT, PAGE)) == 0
    source.look()
    assert source.owners == 0
