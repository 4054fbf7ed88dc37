# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapters are called in the names of pages.

SGLang names a page by its tokens and by the request's `extra_key`, to which it appends the
adapter's `lora_id`. That is made of name and path for adapters of `--lora-paths`, so that one that
was trained again has the same; and a request that names no adapter may have an `extra_key` that
reads like both. So requests get another `extra_key` here: it has the contents of the adapter, and
can be read in one way.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from sglang.srt.managers.schedule_batch import Req

from kvstore.objects.weights import identity
from sglang_mooncake.sglang.layerwise.patch import Patches

__all__ = ["contents_of", "extra_key_of", "name_adapters"]

logger = logging.getLogger(__name__)

_ADAPTER: Final = "adapter "
_PLAIN: Final = "plain "


def extra_key_of(user: str | None, lora_id: str | None, contents: Mapping[str, str]) -> str | None:
    """What stands for the request's own key and its adapter. No two pairs have the same.

    contents: of adapters by their ``lora_id``. SGLang gives a random one, once, to an adapter that
    was loaded later.
    """
    if lora_id is not None:
        return f"{_ADAPTER}{lora_id} {contents.get(lora_id, 'loaded')} {user or ''}"
    if user is not None and user.startswith((_ADAPTER, _PLAIN)):
        return _PLAIN + user
    return user


def contents_of(adapters: Sequence[Any]) -> dict[str, str]:
    """Of the adapters that a server was started with, by their ``lora_id``."""
    return {one.lora_id: _contents(one.lora_path) for one in adapters}


@functools.cache
def name_adapters(adapters: Callable[[], Sequence[Any]]) -> None:
    """From now on requests of this process have such keys. The hook stays: pages of requests keep
    their names."""
    contents = contents_of(adapters())

    def made(original: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(request, *args, **kwargs)
        user, lora_id = request.extra_key, request.lora_id
        if lora_id is not None:
            user = user.removesuffix(lora_id)
        request.extra_key = extra_key_of(user, lora_id, contents)

    Patches().around(Req, "__init__", made)


def _contents(path: str) -> str:
    folder = Path(path)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(path, local_files_only=True))
        return identity(folder)
    except (OSError, ValueError, LocalEntryNotFoundError) as exc:
        logger.warning(
            "the adapter %s cannot be told from others, so that its pages are not shared: %s",
            path,
            exc,
        )
        return secrets.token_hex(16)
