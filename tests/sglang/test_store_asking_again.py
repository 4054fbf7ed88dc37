# SPDX-License-Identifier: Apache-2.0
"""Requests whose pages were lost while they were loaded are asked again, as SGLang's tokenizer
process gives them. What the real one says of them: tests/serving/test_serving_store_windows.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import fastapi
import pytest

from sglang_mooncake.sglang.store import asking_again
from sglang_mooncake.sglang.store.asking_again import LOST, ask_again, hook_tokenizer

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

REFUSAL = fastapi.HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, LOST)


def told(message: str | None, **of_abort: Any) -> dict[str, Any]:
    """A piece of a stream."""
    reason = message and {"type": "abort", "message": message, **of_abort}
    return {"text": "", "meta_info": {"finish_reason": reason}}


ABORT = told(LOST, status_code=503)
TOKEN = told(None)


@dataclass
class Request:
    """As SGLang has looked at it."""

    is_single: bool = True
    bootstrap_room: int | None = None
    rid: str = "r"


@dataclass
class Tokenizer:
    """Gives out one script after the other: answers, or an exception instead of one."""

    scripts: Sequence[Sequence[Any]]
    asked: list[Any] = field(default_factory=list)
    ended: int = 0

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        self.asked.append((obj, request))
        try:
            for one in self.scripts[len(self.asked) - 1]:
                if isinstance(one, BaseException):
                    raise one
                yield one
        finally:
            self.ended += 1


def run(tokenizer: Tokenizer, obj: Any, request: Any = None) -> list[Any]:
    async def collect() -> list[Any]:
        generate = ask_again(Tokenizer.generate_request, tokenizer, obj, request)
        return [one async for one in generate]

    return asyncio.run(collect())


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_again, "PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("lost", [REFUSAL, ABORT])
@pytest.mark.parametrize("times", [0, 1, 3])
def test_the_answer_is_that_of_the_attempt_that_had_its_pages(lost: Any, times: int) -> None:
    tokenizer = Tokenizer([*[[lost]] * times, [TOKEN, TOKEN]])
    request, client = Request(), object()
    assert run(tokenizer, request, client) == [TOKEN, TOKEN]
    assert tokenizer.asked == [(request, client)] * (times + 1)
    assert tokenizer.ended == times + 1


def test_at_last_the_client_is_told() -> None:
    assert run(Tokenizer([[ABORT]] * 4), Request()) == [ABORT]
    with pytest.raises(fastapi.HTTPException, match=LOST):
        run(Tokenizer([[REFUSAL]] * 4), Request())


@pytest.mark.parametrize("other", [
    fastapi.HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the queue is full"),
    fastapi.HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, LOST),
    ValueError(LOST),
    asyncio.CancelledError(),
])  # fmt: skip
def test_what_ends_for_another_reason_is_not_asked_again(other: BaseException) -> None:
    tokenizer = Tokenizer([[other], [TOKEN]])
    with pytest.raises(type(other)):
        run(tokenizer, Request())
    assert len(tokenizer.asked) == 1


def test_another_abort_is_passed_on() -> None:
    abort = told("the client has gone", status_code=503)
    assert run(Tokenizer([[abort], [TOKEN]]), Request()) == [abort]


@pytest.mark.parametrize("request_", [Request(is_single=False), Request(bootstrap_room=7)])
def test_several_prompts_and_halves_of_a_pair_are_not_asked_again(request_: Request) -> None:
    assert run(Tokenizer([[ABORT], [TOKEN]]), request_) == [ABORT]
    with pytest.raises(fastapi.HTTPException):
        run(Tokenizer([[REFUSAL], [TOKEN]]), request_)


def test_what_was_given_out_is_not_given_out_twice() -> None:
    assert run(Tokenizer([[TOKEN, ABORT], [TOKEN]]), Request()) == [TOKEN, ABORT]


def test_who_goes_ends_the_attempt() -> None:
    tokenizer = Tokenizer([[TOKEN, TOKEN]])

    async def take_one() -> None:
        generate = ask_again(Tokenizer.generate_request, tokenizer, Request())
        async for _ in generate:
            break
        await generate.aclose()

    asyncio.run(take_one())
    assert tokenizer.ended == 1


def test_it_stands_around_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(HookRegistry, "register", lambda *call: registered.append(call))
    hook_tokenizer()
    ((target, hook, _),) = registered
    module, _, name = target.rpartition(".")
    assert module == f"{TokenizerManager.__module__}.TokenizerManager"
    assert callable(getattr(TokenizerManager, name))
    assert hook is ask_again
