# SPDX-License-Identifier: Apache-2.0
"""The rows of vLLM's servers: the same faults to a pair of each contender, and how soon a first
token comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from cpu_serving.processes import ServingError
from cpu_serving.severed import sever
from cpu_serving.traffic import Answer, Request, make_requests
from cpu_serving.vllm_proxy import ask_decode, ask_prefill
from cpu_serving.vllm_servers import VllmServer, body_of, imported_tokens

from nixl_beside.options import BesideOptions
from nixl_beside.rows import Answers, Served, Spent
from nixl_beside.servers import Clients, Known, Pair, timed

__all__ = ["KNOWN", "row", "ttft"]

#: Prompts, and tokens of the longest one.
KNOWN: Final = (8, 600)
CLIENTS: Final = 4
_STANDS_STILL_S: Final = 5.0
_SEVERED = 3
_ANSWER_TIMEOUT_S: Final = 120.0
_LOOK_S: Final = 0.2
_TTFT_TOKENS: Final = 2000

Found: TypeAlias = Answers | Served


class Question(NamedTuple):
    ask: Callable[[], tuple[int, ...]]
    right: tuple[int, ...]
    #: Without what the other server has computed.
    compute_s: float


def prefill_stopped(pair: Pair, asked: Known, options: BesideOptions) -> Served:
    with pair.proxy() as proxy:
        timed(proxy, asked.requests[0])  # the two know each other: what stands still is a read
    question = _promised(pair, asked)
    pair.prefill.process.freeze()
    return _served(question, options.patience_s, pair.prefill.process.thaw)


def decode_stopped(pair: Pair, asked: Known, options: BesideOptions) -> Answers:
    def stand_still(clients: Clients) -> None:  # noqa: ARG001 - they go on
        pair.decode.process.freeze()
        time.sleep(_STANDS_STILL_S)
        pair.decode.process.thaw()

    return _under_traffic(pair, asked, options, stand_still)


def prefill_killed(pair: Pair, asked: Known, options: BesideOptions) -> Answers:
    """Meanwhile the decode server is asked for a prompt that it was promised."""

    def kill(clients: Clients) -> Served:
        return _restart(pair, pair.prefill, clients, _promised(pair, asked), options.patience_s)

    return _under_traffic(pair, asked, options, kill)


def decode_killed(pair: Pair, asked: Known, options: BesideOptions) -> Answers:
    """Meanwhile the prefill server is asked as an ordinary one."""
    request, right = asked.requests[-1], asked.answers[-1].output_ids
    compute_s = timed(pair.prefill, request).elapsed_s
    question = Question(lambda: timed(pair.prefill, request).output_ids, right, compute_s)

    def kill(clients: Clients) -> Served:
        return _restart(pair, pair.decode, clients, question, options.patience_s)

    return _under_traffic(pair, asked, options, kill)


def severed(pair: Pair, asked: Known, options: BesideOptions) -> Answers:
    """One request after another, so that it can be said of each whether its prompt came."""
    got: list[tuple[int, Answer]] = []
    handed_over = 0
    with pair.proxy() as proxy:
        timed(proxy, asked.requests[0])  # now there are connections
        for _ in range(_SEVERED):
            # NVIDIA's NIXL makes none anew: the second time there is nothing left to sever.
            if not sever(pair.decode.process.pid, pair.prefill.process.pid) and not got:
                raise ServingError("there was no connection to sever")
            for number in range(options.requests):
                at, before = number % len(asked.requests), imported_tokens(pair.decode)
                got.append((at, timed(proxy, asked.requests[at])))
                handed_over += imported_tokens(pair.decode) > before
    return replace(asked.counted(got), came=handed_over)


_STEPS: Final[Mapping[str, Callable[[Pair, Known, BesideOptions], Found]]] = {
    "prefill-stopped": prefill_stopped,
    "decode-stopped": decode_stopped,
    "prefill-killed": prefill_killed,
    "decode-killed": decode_killed,
    "severed": severed,
}


def row(name: str, pair: Pair, asked: Known, options: BesideOptions) -> Found:
    """Raises ServingError."""
    return _STEPS[name](pair, asked, options)


def ttft(pairs: Mapping[str, Pair], rounds: int) -> Mapping[str, Spent]:
    """Of each contender, in turn, while the others stand still: the time of an answer of one token.
    Each round begins with another one, and one that does not count comes first. Raises
    ServingError."""
    times: dict[str, list[float]] = {one: [] for one in pairs}
    order = list(pairs)
    for pair in pairs.values():
        pair.rest()
    for number in range(rounds + 1):
        request = _long_request(number)
        answers = {}
        for one in order[number % len(order) :] + order[: number % len(order)]:
            pair = pairs[one]
            pair.go_on()
            before = imported_tokens(pair.decode)
            with pair.proxy() as proxy:
                answers[one] = timed(proxy, request)
            if answers[one].error or imported_tokens(pair.decode) == before:
                raise ServingError(f"{one}: no prompt was handed over: {answers[one].error}")
            pair.rest()
            if number:
                times[one].append(answers[one].elapsed_s)
        if len({answer.output_ids for answer in answers.values()}) != 1:
            raise ServingError(f"the tokens of round {number} differ: {answers}")
    for pair in pairs.values():
        pair.go_on()
    return {one: Spent(found) for one, found in times.items()}


def _long_request(seed: int) -> Request:
    return max(
        make_requests(2, _TTFT_TOKENS, seed=seed, new_tokens=1), key=lambda one: len(one.input_ids)
    )


def _promised(pair: Pair, asked: Known) -> Question:
    """To the decode server, for the longest prompt: the prefill server has computed it."""
    longest = max(range(len(asked.requests)), key=lambda at: len(asked.requests[at].input_ids))
    body = body_of(asked.requests[longest])
    compute_s = timed(pair.decode, asked.requests[longest]).elapsed_s
    params = ask_prefill(pair.prefill.url, body)

    def ask() -> tuple[int, ...]:
        return tuple(ask_decode(pair.decode.url, body, params)["choices"][0]["token_ids"])

    return Question(ask, asked.answers[longest].output_ids, compute_s)


def _served(question: Question, patience_s: float, then: Callable[[], None]) -> Served:
    """``then``: once it was answered, or waited for so long."""
    tokens: list[tuple[int, ...]] = []
    waiting = threading.Thread(target=lambda: tokens.append(question.ask()))
    try:
        began_s = time.monotonic()
        waiting.start()
        waiting.join(patience_s)
        after_s = None if waiting.is_alive() else time.monotonic() - began_s
    finally:
        then()
    waiting.join(_ANSWER_TIMEOUT_S)
    return Served(after_s, patience_s, tokens == [question.right], question.compute_s)


def _under_traffic(
    pair: Pair, asked: Known, options: BesideOptions, fault: Callable[[Clients], Served | None]
) -> Answers:
    """Before, during and after it."""
    with pair.proxy() as proxy, Clients(proxy, asked, CLIENTS) as clients:
        clients.wait(2 * CLIENTS, _ANSWER_TIMEOUT_S)
        meanwhile = fault(clients)
        before, began_s, again_s = imported_tokens(pair.decode), time.monotonic(), None
        while again_s is None and time.monotonic() - began_s < options.patience_s:
            time.sleep(_LOOK_S)
            if imported_tokens(pair.decode) > before:
                again_s = time.monotonic() - began_s
        clients.wait(2 * CLIENTS, _ANSWER_TIMEOUT_S)
    return replace(clients.answers(), meanwhile=meanwhile, again_s=again_s, has_again=True)


def _restart(
    pair: Pair, server: VllmServer, clients: Clients, question: Question, patience_s: float
) -> Served:
    """What the other one answers meanwhile. Clients begin nothing until the server is there again:
    that says nothing of a hand-over."""
    with clients.resting():
        server.process.kill()
        return _served(question, patience_s, lambda: pair.again(server))
