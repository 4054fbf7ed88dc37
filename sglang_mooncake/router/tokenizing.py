# SPDX-License-Identifier: Apache-2.0
"""From text to the model's tokens, as SGLang's servers make them: by the files of the model.

What this module cannot make as they do (chats with tools, with images, with several parts) has no
tokens here, and goes by its text. So does a chat where the model has no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sglang_mooncake.router.sglang_http import CHAT, Body, given

__all__ = ["TEXT_MAX", "TextTokens", "load"]

#: Members of a chat that change its prompt in ways that this module does not follow.
_OTHER: Final = (
    "tools",
    "functions",
    "continue_final_message",
    "chat_template",
    "documents",
    "reasoning_effort",
    "task",
)
#: Characters of a text that tokens are made of, twice as many as the longest prompts of today's
#: models have. More would cost a processor seconds, and a client is free to send any text.
TEXT_MAX: Final = 2 << 20
_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


class _RenderError(Exception):
    """The chat template has failed for a request."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | None = None


_MESSAGES: Final = msgspec.json.Decoder(list[_Message])
_VALUES: Final = msgspec.json.Decoder(dict[str, Any] | None)


def load(directory: str) -> TextTokens:
    """The tokenizer and the chat template of the model in a directory. ``ValueError`` names the
    file that is missing or that cannot be used."""
    path = Path(directory)
    for name in _FILES:
        if not (path / name).is_file():
            raise ValueError(f"{directory} has no {name}: give the directory of the model")
    try:
        tokenizer = Tokenizer.from_file(str(path / _FILES[0]))
    except Exception as error:  # The package raises nothing finer.
        raise ValueError(f"{path / _FILES[0]} cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        settings = json.loads((path / _FILES[1]).read_text())
        template = _template(path, settings)
    except (OSError, ValueError, jinja2.TemplateError) as error:
        raise ValueError(f"the chat template of {directory} cannot be used: {error}") from error
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return TextTokens(tokenizer, template, special)


def _template(path: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
    file = path / "chat_template.jinja"
    text = file.read_text() if file.is_file() else settings.get("chat_template")
    if not isinstance(text, str):  # None, or several with names.
        return None
    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    world.filters["tojson"] = _to_json
    world.globals["raise_exception"] = _refuse
    world.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005
    return world.from_string(text)


class TextTokens:
    """Tokens of texts and of chats. Its methods may be called in any thread."""

    def __init__(
        self, tokenizer: Tokenizer, template: jinja2.Template | None, special: Mapping[str, str]
    ) -> None:
        """``special``: the special tokens by the names that templates use."""
        self._tokenizer, self._template, self._special = tokenizer, template, special

    def of_text(self, text: str) -> tuple[int, ...] | None:
        """Of a prompt that is text; None where it is longer than ``TEXT_MAX``."""
        return self._encoded(text, special=True)

    def of_chat(self, body: Body) -> tuple[int, ...] | None:
        """Of a chat's messages; None where they are of a kind that this module does not follow,
        or longer than ``TEXT_MAX``."""
        if self._template is None or any(given(body, name) for name in _OTHER):
            return None
        try:
            messages = _MESSAGES.decode(body.get("messages", b""))
            more = _VALUES.decode(body.get("chat_template_kwargs", b"null")) or {}
            begins = msgspec.json.decode(body.get("add_generation_prompt", b"true"), type=bool)
            text = self._rendered(self._template, messages, begins=begins, more=more)
        except (msgspec.DecodeError, RecursionError, _RenderError):
            return None  # A server says what is wrong with it, or knows more than this module.
        return self._encoded(text, special=False)

    def _rendered(
        self,
        template: jinja2.Template,
        messages: Sequence[_Message],
        *,
        begins: bool,
        more: Mapping[str, Any],
    ) -> str:
        """Raises ``_RenderError``."""
        values = {
            **self._special,
            "messages": [{"role": one.role, "content": one.content or ""} for one in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": begins,
            **more,
        }
        try:
            return template.render(**values)
        except Exception as error:
            # A program of the model's, with values of the client's: it may raise anything.
            raise _RenderError from error

    def _encoded(self, text: str, *, special: bool) -> tuple[int, ...] | None:
        if len(text) > TEXT_MAX:
            return None
        # `encode` would keep the interpreter lock until it has ended, and so stop the event loop.
        # The fast one leaves out where in the text each token is, a quarter of the cost.
        (one,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return tuple(one.ids)

    def of(self, body: Body, path: str, text: str) -> tuple[int, ...] | None:
        """Of a request whose prompt has this text."""
        return self.of_chat(body) if path == CHAT else self.of_text(text)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(sentence: str) -> NoReturn:
    raise jinja2.TemplateError(sentence)
