# SPDX-License-Identifier: Apache-2.0
"""Asks SGLang again for what a request wanted, when pages of the store were lost while they came.

By then the model computes with the layers that have come, so SGLang 0.5.23 ends the request with
status 503 (`UnifiedRadixCache.finish_external_linker_loads`). The store knows by then which owner
does not answer, and its pages are misses: asked again, they are computed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any, Final

__all__ = ["LOST", "PAUSES_S", "ask_again", "hook_tokenizer"]

logger = logging.getLogger(__name__)

#: What SGLang says of such a request.
LOST: Final = "External KV cache load failed"
#: Before each further attempt. Owners that stand still are noticed one by one, or all of them
#: within 3 s, by their silence.
PAUSES_S: Final = (0.0, 1.0, 3.0)
_MODULE: Final = "sglang.srt.managers.tokenizer_manager"
_METHOD: Final = "generate_request"

Generate = Callable[..., AsyncGenerator[Any, None]]


def hook_tokenizer() -> None:
    """In the process that has clients' requests: the only one that has imported their module.

    Raises:
        LookupError: this SGLang has another one.
    """
    if _MODULE not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = getattr(sys.modules[_MODULE], "TokenizerManager", None)
    if not callable(getattr(manager, _METHOD, None)):
        raise LookupError(f"this version of SGLang has no TokenizerManager.{_METHOD}")
    target = f"{_MODULE}.TokenizerManager.{_METHOD}"
    HookRegistry.register(target, ask_again, HookType.AROUND)


async def ask_again(
    original: Generate, manager: Any, obj: Any, request: Any = None, **others: Any
) -> AsyncGenerator[Any, None]:
    """Around `TokenizerManager.generate_request`: an attempt whose pages were lost before anything
    of its answer was given out is made again.

    Not for several prompts in one request, whose arguments SGLang changes as it splits them; nor
    for one of a pair of servers (`bootstrap_room`), whose other half has ended as well.
    """
    for pause_s in (*PAUSES_S, None):
        attempt = original(manager, obj, request, **others)
        is_given_out = False
        try:
            async for answer in attempt:
                if pause_s is not None and not is_given_out and _may(obj) and _is_lost(answer):
                    break
                is_given_out = True
                yield answer
            else:
                return
        except Exception as error:
            if pause_s is None or is_given_out or not _may(obj) or not _is_refusal(error):
                raise
        await attempt.aclose()
        assert pause_s is not None, "the last attempt's answer is what the client gets"
        logger.warning(
            "pages of the store were lost while they were loaded for request %s: it is asked again",
            obj.rid,
        )
        await asyncio.sleep(pause_s)


def _may(obj: Any) -> bool:
    """Of a request that SGLang has looked at."""
    return bool(obj.is_single) and getattr(obj, "bootstrap_room", None) is None


def _is_lost(answer: Any) -> bool:
    """As a stream tells it, in its first and last piece."""
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    reason = meta.get("finish_reason")
    return (
        isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("message") == LOST
    )


def _is_refusal(error: Exception) -> bool:
    """As everything but a stream tells it (`fastapi.HTTPException`)."""
    status, detail = getattr(error, "status_code", None), getattr(error, "detail", None)
    return bool(status == HTTPStatus.SERVICE_UNAVAILABLE and detail == LOST)
