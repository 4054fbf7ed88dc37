# SPDX-License-Identifier: Apache-2.0
"""Tokens of prompts that come as text, by the files of the model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from router_world import World, run
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sglang_mooncake.router import looking, routing
from sglang_mooncake.router.looking import Looker
from sglang_mooncake.router.pages import own_names, token_digests
from sglang_mooncake.router.routing import LONG_TEXT_BYTES
from sglang_mooncake.router.sglang_http import CHAT, COMPLETIONS, GENERATE, Body, body_of
from sglang_mooncake.router.tokenizing import TEXT_MAX, TextTokens, load

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- bos_token if loop.first }}[{{ message.role }}]{{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% if thinking %}<{% endif %}{% endif %}"""
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a model whose tokens are characters, behind one that begins a text."""
    characters = [chr(n) for n in range(32, 127)]
    words = {word: n for n, word in enumerate(["<s>", "<?>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<?>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.fixture
def tokens(directory: Path) -> TextTokens:
    return load(str(directory))


def body(**members: object) -> Body:
    return body_of(json.dumps(members).encode())


def characters(text: str) -> tuple[int, ...]:
    return (0, *(ord(one) - 30 for one in text))


def test_a_text_is_as_long_as_it_is_and_begins_as_the_model_wants(tokens: TextTokens) -> None:
    text = "a longer one"
    assert tokens.of(body(), GENERATE, text) == characters(text)
    assert tokens.of(body(), COMPLETIONS, text) == characters(text)


def test_other_threads_go_on_while_tokens_are_made(tokens: TextTokens) -> None:
    """Among them the event loop, which has other clients."""

    async def steps_meanwhile() -> int:
        made = asyncio.create_task(asyncio.to_thread(tokens.of_text, "a b " * 250_000))
        steps = 0
        while not made.done():
            await asyncio.sleep(0.001)
            steps += 1
        return steps

    # Some 700; of a thread that keeps the interpreter lock a few, before it begins.
    assert asyncio.run(steps_meanwhile()) > 20


def test_a_text_that_no_model_has_room_for_costs_no_time(tokens: TextTokens) -> None:
    text = "a" * (TEXT_MAX + 1)
    assert tokens.of(body(), GENERATE, text) is None
    assert tokens.of(body(messages=[{"role": "user", "content": text}]), CHAT, text) is None


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "[user]hi[assistant]"),
        ({"add_generation_prompt": False}, "[user]hi"),
        ({"chat_template_kwargs": {"thinking": True}}, "[user]hi[assistant]<"),
        ({"tools": None, "temperature": 0.5}, "[user]hi[assistant]"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": None}]},
            "[user]hi[assistant][assistant]",
        ),
    ],
)
def test_a_chat_is_what_the_template_makes_of_it(
    tokens: TextTokens, more: dict[str, Any], text: str
) -> None:
    assert tokens.of(body(**{"messages": HELLO, **more}), CHAT, "") == characters(text)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}]},
        {"continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": []}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": "nonsense"},
        {"chat_template_kwargs": 7},
        {"chat_template_kwargs": {"messages": 7}},
        {"add_generation_prompt": None},
    ],
    ids=str,
)
def test_a_chat_that_this_module_does_not_follow_has_no_tokens(
    tokens: TextTokens, more: dict[str, Any]
) -> None:
    given = body(**{"messages": HELLO, **more})
    assert tokens.of(given, CHAT, "text") is None
    assert Looker(tokens).look(given, CHAT).digests(16) is None


@pytest.mark.parametrize(
    "more",
    [
        {"n": 10**9},  # Above what the sandbox takes: OverflowError.
        {"n": 0},  # ZeroDivisionError.
        {"n": {}},  # TypeError.
        {"d": "%" + "9" * 30 + "d"},  # ValueError or OverflowError.
        {"deep": True},  # RecursionError.
        {},
    ],
    ids=str,
)
def test_a_request_that_the_template_fails_for_is_served_by_its_text(
    directory: Path, more: dict[str, Any]
) -> None:
    template = """\
{%- macro down() %}{{ down() }}{% endmacro -%}
{%- if deep %}{{ down() }}{% endif %}{{ d % 7 }}{{ 1 // n }}
{%- for one in range(n) %}.{% endfor %}{{ messages[0].content }}"""
    settings = {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = load(str(directory))
    given = {"messages": HELLO, "chat_template_kwargs": {"d": "%d", "n": 1, **more}}

    async def job() -> None:
        async with World(prefill_policy="cache_aware", tokens=tokens) as world:
            assert (await world.ask(CHAT, **given))[0] == 200

    run(job())
    assert (tokens.of(body(**given), CHAT, "hi") is None) == bool(more)


def test_a_model_without_a_template_has_texts_alone(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    found = load(str(directory))
    assert found.of(body(messages=HELLO), CHAT, "") is None
    assert found.of_text("a") == characters("a")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load(str(directory)).of(body(messages=HELLO), CHAT, "") == characters("hi")[1:]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", None, "has no tokenizer_config.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be used"),
        ("tokenizer_config.json", "{", "chat template of"),
        ("chat_template.jinja", "{% if %}", "chat template of"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    directory: Path, name: str, text: str | None, why: str
) -> None:
    if text is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(text)
    with pytest.raises(ValueError, match=why):
        load(str(directory))


def test_a_text_is_looked_up_as_its_tokens_are(tokens: TextTokens) -> None:
    text = "a text of more than one page of sixteen"
    look, same = (
        Looker(tokens).look(body(**prompt), GENERATE)
        for prompt in ({"text": text}, {"input_ids": characters(text)})
    )
    assert look.names == same.names
    assert look.digests(16) == same.digests(16) == token_digests(characters(text), 16)
    assert look.tokens == len(text) + 1
    assert Looker().look(body(text=text), GENERATE).digests(16) is None


def test_pages_of_a_long_request_are_named_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = list[threading.Thread]()

    def made(tokens: Sequence[int], page: int, seed: bytes = b"") -> list[int]:
        threads.append(threading.current_thread())
        return own_names(tokens, page, seed)

    monkeypatch.setattr(looking, "own_names", made)
    monkeypatch.setattr(routing, "LONG_IDS_BYTES", 1000)

    async def job() -> None:
        async with World(prefill_policy="cache_aware") as world:
            for length in (1, 1000):
                assert (await world.ask(input_ids=[1] * length))[0] == 200

    run(job())
    assert [one is threading.main_thread() for one in threads] == [True, False]


def test_long_texts_are_made_tokens_of_too(tokens: TextTokens) -> None:
    text = "x" * LONG_TEXT_BYTES

    async def job() -> None:
        async with World(prefill_policy="cache_aware", tokens=tokens) as world:
            for prompt in ("short", text):
                assert (await world.ask(text=prompt))[0] == 200
            await world.idle()
            ((view,),) = world.views.values()
            look = Looker(tokens).look(body(text=text), GENERATE)
            assert view.figures(look, 0.0).hit_tokens == pytest.approx(len(text), abs=17)

    run(job())
