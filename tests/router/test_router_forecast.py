# SPDX-License-Identifier: Apache-2.0
"""What the router learns of the time that prompts take: of those that are computed together, and of
servers that slow each other down."""

from __future__ import annotations

from itertools import count
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.router.fit import Kin, Work, WorkFit
from sglang_mooncake.router.placement import Look, Placed, PrefillView, expect
from sglang_mooncake.router.prefill_queue import Batches, Spent, left_s
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import Told
from sglang_mooncake.router.sharing import SHARE_MAX, Host

SECONDS = st.floats(-1e3, 1e9)


def view_at(host: Host, kin: Kin | None = None, name: str = "p") -> PrefillView:
    return PrefillView(Server("prefill", f"http://{name}:1"), kin=kin, host=host)


def send(view: PrefillView, tokens: float, now_s: float) -> Placed:
    look = Look((), 1, tokens)
    return view.send(look, view.figures(look, now_s), now_s)


def end(placed: Placed, now_s: float) -> None:
    placed.view.ended(placed, now_s, Told(int(placed.look.tokens), 0))


# --- prompts that are computed together ---


def test_what_is_computed_together_is_learnt_as_one() -> None:
    view = view_at(Host())
    now_s = count(0.0, 100.0)
    for n in range(1, 60):
        begun_s = next(now_s)
        placed = [send(view, 100 * (1 + (n + at) % 5), begun_s) for at in range(1 + n % 3)]
        took_s = 0.1 + 1e-3 * sum(one.look.tokens for one in placed)
        for at, one in enumerate(placed):
            end(one, begun_s + took_s + 1e-3 * at)
    for tokens in (200, 1000):
        figures = view.figures(Look((), 1, tokens), next(now_s))
        took_s = 0.1 + 1e-3 * tokens
        assert expect(tokens, figures).first_s == pytest.approx(took_s, rel=0.2)


def test_a_batch_ends_soon_after_its_first_prompt() -> None:
    """Prompts that are as short as what may lie between two ends of a batch do not make one that
    never ends."""
    batches, found = Batches(), 0
    for n in range(100):
        found += batches.add(Work(10, 50), Spent(0.05, 0.0), 1.0 + 0.05 * n) is not None
    assert found > 20
    batches = Batches()
    assert batches.add(Work(100, 5000, 100), Spent(1.0, 0.5), 1.0) is None
    assert batches.add(Work(50, 1250, 60), Spent(0.09, 0.0), 1.09) is None
    assert batches.take(1.1) is None
    assert batches.add(Work(7, 25), Spent(0.02, 0.0), 1.11) == (
        (150, 6250, 160),
        (1.09, 0.5),
        pytest.approx(1.1),
    )
    assert batches.take(2.0) == ((7, 25, 0), (0.02, 0.0), pytest.approx(1.112))
    assert batches.take(2.0) is None


@given(st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_what_is_left_is_never_less_than_nothing(
    expected_s: float, passed_s: float, more_s: float
) -> None:
    left = left_s(expected_s, passed_s)
    assert left >= 0.0
    if passed_s >= expected_s:
        assert left_s(expected_s, passed_s + more_s) >= left


# --- servers of one host ---


def test_who_is_at_work_is_summed_up() -> None:
    host = Host()
    host.begins(1.0)
    host.begins(2.0)
    assert (host.busy, host.work_s(3.0)) == (2, 3.0)
    host.ends(4.0)
    assert (host.busy, host.work_s(6.0)) == (1, 7.0)
    host.ends(6.0)
    assert host.work_s(9.0) == 7.0
    assert host.work_s(5.0) == 7.0, "a clock does not go back"


def test_how_many_were_at_work_beside_a_prompt_is_known() -> None:
    host = Host()
    one, other = view_at(host), view_at(host)
    spent = []
    one._learn = lambda *told: spent.append(told[-1])  # type: ignore[method-assign]
    first = send(one, 100, 0.0)
    beside = send(other, 100, 1.0)
    second = send(one, 100, 1.5)
    end(beside, 3.0)
    end(first, 4.0)
    end(second, 6.0)
    assert spent == [(4.0, 2.0), (2.0, 0.0)]
    assert spent[0].others == 0.5
    assert host.busy == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_how_much_servers_slow_each_other_down_is_learnt(share: float) -> None:
    random, host, fit = Random(1), Host(), WorkFit()
    for _ in range(400):
        tokens, others = random.randrange(50, 2000), random.choice([0.0, 0.5, 1.0, 2.0])
        took_s = (0.1 + 1e-3 * tokens) * (1 + share * others)
        alone_s = took_s / host.slowdown(others)
        if fit.learnt:
            host.learn(others, took_s, fit.work_s(Work(tokens)))
        fit.learn(Work(tokens), alone_s)
        fit.counted()
    assert host.share == pytest.approx(share, abs=0.1)
    for others in (0.0, 1.0, 2.0):
        expected_s = fit.work_s(Work(1000)) * host.slowdown(others)
        assert expected_s == pytest.approx(1.1 * (1 + share * others), rel=0.1)


def test_servers_of_one_host_are_expected_to_be_slower_while_others_are_at_work() -> None:
    """Of other hosts they are not."""
    kin = Kin()
    host = Host()
    one, other, far = view_at(host, kin), view_at(host, kin, "q"), view_at(Host(), kin, "far")
    for n in range(100):
        begun_s, both = 100.0 * n, n % 2
        tokens = 100 * (1 + n % 7)
        placed = [send(view, tokens, begun_s) for view in ([one, other] if both else [one])]
        for at in placed:
            end(at, begun_s + tokens * 1e-3 * (1 + 0.6 * both))
    look = Look((), 1, 1000)
    alone = one.figures(look, 1e5)
    assert expect(1000, alone).first_s == pytest.approx(1.0, rel=0.15)
    send(other, 1000, 1e5)
    slow = one.figures(look, 1e5)
    assert expect(1000, slow).first_s == pytest.approx(1.6, rel=0.15)
    assert slow.slowdown / alone.slowdown == pytest.approx(1.6, rel=0.15)
    assert far.figures(look, 1e5).slowdown == 1.0


@given(st.lists(st.tuples(st.floats(0, 1e6), SECONDS, SECONDS), max_size=40))
def test_nothing_that_is_measured_makes_a_host_infinitely_slow(
    learnt: list[tuple[float, float, float]],
) -> None:
    host = Host()
    for one in learnt:
        host.learn(*one)
    assert 0.0 <= host.share <= SHARE_MAX
    assert host.slowdown(0.0) == 1.0
    assert host.slowdown(3.0) >= host.slowdown(0.0)


@pytest.mark.parametrize("strange_s", [0.0, 1e-6, 60.0, 1e7])
def test_a_strange_measurement_spoils_nothing(strange_s: float) -> None:
    random, host, fit = Random(2), Host(), WorkFit()
    errors = []
    for n in range(300):
        tokens, others = random.randrange(10, 2000), random.choice([0.0, 1.0])
        took_s = (0.1 + 1e-3 * tokens) * (1 + 0.5 * others)
        expected_s = fit.work_s(Work(tokens)) * host.slowdown(others)
        if n % 25 == 24:
            took_s = strange_s
        elif n > 100:
            errors.append(abs(expected_s - took_s) / took_s)
        host.learn(others, took_s, fit.work_s(Work(tokens)))
        fit.learn(Work(tokens), took_s / host.slowdown(others))
    assert median(errors) < 0.2


# --- all of it ---


def _simulated_error(*, shares: bool) -> float:
    """Three servers on two processors, with prompts of which most are short; the median error.
    ``shares``: whether it is known that they are on one host."""
    random, kin, host = Random(3), Kin(), Host()
    views = [view_at(host if shares else Host(), kin, f"p{n}") for n in range(3)]
    queues: list[list[Placed]] = [[] for _ in views]
    batches: list[list[Placed]] = [[] for _ in views]
    left = [0.0] * len(views)
    now_s, next_s, sent, errors = 0.0, 0.0, 0, list[float]()
    while sent < 400 or any(batches):
        busy = [n for n, batch in enumerate(batches) if batch]
        rate = min(1.0, 2 / len(busy)) if busy else 1.0
        ends_s, at = min(((now_s + left[n] / rate, n) for n in busy), default=(1e9, -1))
        arrives = sent < 400 and next_s <= ends_s
        then_s = next_s if arrives else ends_s
        for n in busy:
            left[n] -= (then_s - now_s) * rate
        now_s = then_s
        if arrives:
            sent, next_s = sent + 1, next_s + random.expovariate(6.0)
            at = random.randrange(len(views))
            queues[at].append(send(views[at], random.choice([20, 50, 50, 100, 900]), now_s))
        else:
            for one in batches[at]:
                took_s = now_s - one.sent_s
                if sent > 100:
                    errors.append(abs(one.expected.first_s - took_s) / took_s)
                end(one, now_s)
            batches[at] = []
        if not batches[at] and queues[at]:
            batches[at], queues[at] = queues[at], []
            left[at] = 0.1 + 1e-3 * sum(one.look.tokens for one in batches[at])
            left[at] *= random.lognormvariate(0.0, 0.1)
    return median(errors)


def test_the_first_token_of_servers_that_share_processors_is_foreseen() -> None:
    error = _simulated_error(shares=True)
    assert error < 0.22
    assert error < _simulated_error(shares=False)
