# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for their turn: priorities, shares of tenants, who is turned away."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, never_answers, run, until

from sglang_mooncake.router import shares
from sglang_mooncake.router.gate import Gate, TurnedAway
from sglang_mooncake.router.shares import Entry, Shares


def served(queue: Shares[str], count: int) -> list[str | None]:
    return [queue.leave() for _ in range(count)]


def test_priority_comes_first_and_then_who_came_first() -> None:
    queue: Shares[str] = Shares(1, 9)
    assert queue.enter("a", "t", 0, 1.0) == Entry(True)
    for who, priority in (("b", 0), ("c", 2), ("d", -1), ("e", 2)):
        assert queue.enter(who, "t", priority, 1.0) == Entry(False)
    assert served(queue, 5) == ["c", "e", "b", "d", None]
    assert queue.enter("f", "t", 0, 1.0).is_in


def test_a_tenant_that_asks_for_much_waits_for_those_that_ask_for_little() -> None:
    queue: Shares[str] = Shares(1, 99)
    queue.enter("", "much", 0, 1.0)
    for n in range(4):
        queue.enter(f"much {n}", "much", 0, 1.0)
    for n in range(2):
        queue.enter(f"little {n}", "little", 0, 1.0)
    # The first one came when nobody waited, so that both begin with nothing.
    assert served(queue, 6)[:4] == ["much 0", "little 0", "much 1", "little 1"]


def test_shares_are_of_what_requests_cost() -> None:
    queue: Shares[str] = Shares(1, 999)
    queue.enter("", "a", 0, 1.0)
    for n in range(300):
        queue.enter(f"a{n}", "a", 0, 3.0)
        queue.enter(f"b{n}", "b", 0, 1.0)
    counts = Counter(who[0] for who in served(queue, 200) if who is not None)
    assert counts["b"] == pytest.approx(3 * counts["a"], abs=4)


def test_a_tenant_has_no_claim_to_what_it_left_to_others() -> None:
    queue: Shares[str] = Shares(1, 999)
    queue.enter("", "early", 0, 1.0)
    for n in range(100):
        queue.enter(f"early {n}", "early", 0, 1.0)
    served(queue, 50)
    for n in range(100):
        queue.enter(f"late {n}", "late", 0, 1.0)
    counts = Counter(who[:4] for who in served(queue, 20) if who is not None)
    assert counts["late"] in (10, 11)


@pytest.mark.parametrize("is_over", [False, True])
def test_what_a_tenant_gets_while_nobody_waits_costs_it_nothing_later(is_over: bool) -> None:
    queue: Shares[str] = Shares(2, 99)
    queue.enter("a stream that does not end", "c", 0, 1.0)
    queue.enter("alone", "a", 0, 1e6)
    if is_over:
        assert queue.leave() is None
        queue.enter("first", "b", 0, 1.0)
    for _ in range(20):
        queue.enter("a", "a", 0, 1.0)
        queue.enter("b", "b", 0, 1.0)
    assert Counter(served(queue, 20)) == {"a": 10, "b": 10}


def test_of_too_many_the_last_one_of_who_has_the_most_is_turned_away() -> None:
    queue: Shares[str] = Shares(1, 3)
    queue.enter("", "a", 0, 1.0)
    for who, tenant, priority in (("a1", "a", 1), ("a2", "a", 0), ("a3", "a", 0)):
        assert queue.enter(who, tenant, priority, 1.0) == Entry(False)
    assert queue.enter("a4", "a", 0, 1.0) == Entry(False, "a4"), "itself"
    assert queue.enter("b1", "b", 0, 1.0) == Entry(False, "a3")
    assert queue.enter("b2", "b", -1, 1.0) == Entry(False, "b2")
    assert queue.enter("c1", "c", 5, 1.0) == Entry(False, "b1")
    queue.give_up("a2")
    assert served(queue, 3) == ["c1", "a1", None]


def test_tenants_that_are_made_up_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "TENANTS_MAX", 3)
    queue: Shares[int] = Shares(1, 9)
    queue.enter(0, "a", 0, 9.0)
    for n in range(1, 6):
        queue.enter(n, f"made up {n}", 0, 1.0)
        assert len(queue._had) <= 3
    assert [queue.leave() for _ in range(6)] == [*range(1, 6), None]


@given(
    steps=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 2)), max_size=60),
    most=st.integers(1, 3),
    waiting_max=st.integers(0, 4),
)
def test_nobody_is_lost(steps: list[tuple[int, int]], most: int, waiting_max: int) -> None:
    """Whoever comes is in, waits, or was turned away; a free place is taken at once."""
    queue: Shares[int] = Shares(most, waiting_max)
    inside: set[int] = set()
    waiting: set[int] = set()
    for number, (tenant, priority) in enumerate(steps):
        if tenant < 0:
            if inside:
                inside.pop()
                if (nxt := queue.leave()) is not None:
                    waiting.remove(nxt)
                    inside.add(nxt)
            continue
        entry = queue.enter(number, str(tenant), priority, 1.0)
        (inside if entry.is_in else waiting).add(number)
        waiting.discard(-1 if entry.turned_away is None else entry.turned_away)
        assert len(queue) == len(waiting) <= waiting_max
        assert len(inside) == most or not waiting


def test_who_waits_no_more_is_not_let_in_and_has_had_nothing() -> None:
    queue: Shares[str] = Shares(1, 9)
    queue.enter("", "x", 0, 1.0)
    for who, tenant, cost in (
        ("gone", "a", 9.0),
        ("a", "a", 1.0),
        ("b1", "b", 1.0),
        ("b2", "b", 1.0),
    ):
        queue.enter(who, tenant, 0, cost)
    assert queue.leave(lambda who: who != "gone") == "a"
    assert queue.leave() == "b1"
    queue.enter("a2", "a", 0, 1.0)
    assert {queue.leave(), queue.leave()} == {"b2", "a2"}
    assert queue.leave() is None


def test_one_that_leaves_as_its_turn_comes_holds_no_place() -> None:
    async def job() -> None:
        gate = Gate(1, 9, 60.0)
        await gate.enter("a", 0, 1.0)
        waiting = [asyncio.create_task(gate.enter("a", 0, 1.0)) for _ in range(3)]
        await until(lambda: gate.waiting == 3)
        waiting[0].cancel()  # It is gone as its turn comes.
        gate.leave()
        await waiting[1]
        gate.leave()
        waiting[2].cancel()  # It was let in already.
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [one.cancelled() for one in waiting] == [True, False, True]
        await gate.enter("a", 0, 1.0)
        assert (gate.waiting, gate.waited) == (0, 1)

    run(job())


def test_one_that_waits_too_long_is_turned_away() -> None:
    async def job() -> None:
        gate = Gate(1, 9, 0.01)
        await gate.enter("a", 0, 1.0)
        with pytest.raises(TurnedAway, match=r"has waited 0\.01 s .*--queue-timeout-secs"):
            await gate.enter("a", 0, 1.0)
        assert gate.waiting == 0
        assert (gate.waited, gate.retry_after_s) == (0, 1)

    run(job())


def test_who_is_turned_away_is_told_how_long_others_waited() -> None:
    async def job() -> None:
        now_s = [0.0]
        gate = Gate(1, 1, 60.0, lambda: now_s[0])
        await gate.enter("a", 0, 1.0)
        assert gate.retry_after_s == 1, "nobody has waited yet"
        for waited_s in (9.2, 5.0):
            next_one = asyncio.create_task(gate.enter("a", 0, 1.0))
            await until(lambda: gate.waiting == 1)
            now_s[0] += waited_s
            gate.leave()
            await next_one
        waiting = asyncio.create_task(gate.enter("a", 0, 1.0))
        await until(lambda: gate.waiting == 1)
        with pytest.raises(TurnedAway) as refused:
            await gate.enter("a", 0, 1.0)
        assert refused.value.retry_after_s == 8, "7.1 s on average"
        gate.leave()
        await waiting

    run(job())


@pytest.mark.parametrize("queue_size", [0, 1])
def test_a_client_that_is_turned_away_is_told_when_to_come_again(
    queue_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "retry_after_s", 7)

    async def job() -> None:
        async with World(max_requests=1, queue_size=queue_size) as world:
            world.decode[0].script = [never_answers]
            others = [asyncio.create_task(world.ask(text="a"))]
            await until(lambda: world.decode[0].asked)
            for _ in range(queue_size):
                others.append(asyncio.create_task(world.ask(text="a")))
                while "waiting_requests 1" not in (await world.get("/metrics"))[1]:
                    await asyncio.sleep(0.005)
            async with world.client.post(f"{world.url}/generate", json={"text": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "7")
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    run(job())


@pytest.mark.parametrize("is_low_first", [False, True])
def test_requests_wait_for_their_turn_by_priority_and_tenant(is_low_first: bool) -> None:
    sign = -1 if is_low_first else 1

    async def job() -> None:
        async with World(
            max_requests=1,
            queue_size=3,
            tenant_header="X-Tenant",
            default_priority=sign,
            is_low_first=is_low_first,
        ) as world:
            world.decode[0].script = [never_answers]
            first = asyncio.create_task(world.ask(text="first"))
            await until(lambda: world.decode[0].asked)
            others = []
            for text, tenant, more in (
                ("low", "a", {"priority": 0}),
                ("usual", "a", {}),
                ("high", "a", {"priority": 7 * sign}),
                ("other", "b", {"priority": sign}),
            ):
                ask = world.ask(text=text, headers={"x-tenant": tenant}, **more)
                others.append(asyncio.create_task(ask))
                waiting = f"sglang_mooncake_router_waiting_requests {min(3, len(others))}"
                while waiting not in (await world.get("/metrics"))[1].splitlines():
                    await asyncio.sleep(0.005)
            status, answer = await others[0]
            assert status == 429, "the least of them has made room for the last"
            assert "3 before it wait for them (--queue-size)" in answer["error"]["message"]
            first.cancel()
            assert [one[0] for one in await asyncio.gather(*others[1:])] == [200] * 3
            assert [body["text"] for body in world.decode[0].asked][1] == "high"
            _, text = await world.get("/metrics")
            assert "sglang_mooncake_router_waited_total 3" in text.splitlines()

    run(job())
