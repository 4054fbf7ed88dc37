# SPDX-License-Identifier: Apache-2.0
"""Which weights a running server has, after those that it was started with.

SGLang updates weights in place and tells no cache, so its methods that do it are hooked for as long
as the process lives. Pages that were computed before an update may be offered to the store after
it, and requests that run during an update mix both. So nothing is stored or loaded from an update
on until SGLang's cache was flushed. If no page was computed since the last flush, nothing is mixed.

Weights that were read from files are known by these. Others get a random name: no other server has
it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_serving

from kvstore.objects.weights import identity
from sglang_mooncake.sglang.layerwise.patch import Patches
from sglang_mooncake.sglang.store.refusals import LOAD_FORMATS

__all__ = ["Updates", "updates"]

logger = logging.getLogger(__name__)

FROM_DISK: Final = "update_weights_from_disk"
UPDATES: Final = (
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "load_weights_from_distributed",
    "begin_weight_update",
    "end_weight_update",
)
READ_ONLY_CHECKS: Final = {"snapshot", "compare", "checksum"}


class Updates:
    """What has happened to the weights since the start. The scheduler's thread changes it, and
    others may ask."""

    def __init__(self, version: Callable[[], str]) -> None:
        """``version``: SGLang's name for the weights, which may change at any time."""
        self._version = version
        self._epoch = ""
        self._known: tuple[str, str] | None = (version(), "")
        self._has_computed = False

    @property
    def now(self) -> str | None:
        """What tells the weights now from those of the start and of other servers; None while
        there may be pages of several."""
        known = self._known
        if known is None:
            return None
        if known[0] != self._version():
            self.changed()  # Somebody else has changed the weights, and says so by the version.
            return self.now
        return " ".join(["version", *filter(None, known)])

    def changed(self, epoch: str | None = None) -> str:
        """The weights are others. ``epoch``: what tells them from all others; None if that is not
        known. Returns that of those before."""
        before = self._epoch
        self._epoch = secrets.token_hex(16) if epoch is None else epoch
        if self._has_computed:
            if self._known is not None:
                logger.warning(
                    "the weights were changed while pages of the former ones are cached: the store"
                    " is not used until the cache is flushed (POST /flush_cache)"
                )
            self._known = None
        else:
            self._known = self._version(), self._epoch
        return before

    def computed(self) -> None:
        """A forward: from now on there may be pages of these weights."""
        self._has_computed = True

    def flushed(self) -> None:
        """No page is left."""
        self._has_computed = False
        if self._known is None:
            logger.info("the cache was flushed: the store is used again, with the new weights")
        self._known = self._version(), self._epoch

    def read(self, folder: str, load_format: Any, before: str) -> None:
        """The weights are those of a directory, and where it has none, those before: ``before`` is
        what ``changed`` has returned."""
        epoch = None
        if str(getattr(load_format, "value", load_format)).lower() in LOAD_FORMATS:
            try:
                found = identity(Path(folder))
            except (OSError, ValueError) as exc:
                logger.warning("the weights of %s cannot be told from others: %s", folder, exc)
            else:
                text = f"{before} then {found}"
                epoch = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.changed(epoch)


@functools.cache
def updates() -> Updates:
    """Of this process. Its hooks stay: a store that is made later must know of all updates."""
    found = Updates(lambda: str(get_serving().weight_version))
    patches = Patches()

    def around(owner: type, name: str, hook: Callable[..., Any]) -> None:
        if not callable(getattr(owner, name, None)):
            raise ValueError(
                f"the store must see updates of weights, and this SGLang has no"
                f" {owner.__name__}.{name}: leave the store out, or use a release that it knows"
            )
        patches.around(owner, name, hook)

    def from_disk(
        original: Any, updater: Any, model_path: str, load_format: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before = found.changed()  # Also if it raises.
        result = original(updater, model_path, load_format, *args, **kwargs)
        is_whole = not args and not kwargs.get("weight_name_filter")
        if result[0] and is_whole:
            found.read(model_path, load_format, before)
        return result

    def update(original: Any, *args: Any, **kwargs: Any) -> Any:
        found.changed()
        return original(*args, **kwargs)

    def check(original: Any, runner: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        if action not in READ_ONLY_CHECKS:
            found.changed()
        return original(runner, action, *args, **kwargs)

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        found.computed()
        return original(*args, **kwargs)

    def reset(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found.flushed()
        return result

    around(WeightUpdater, FROM_DISK, from_disk)
    for name in UPDATES:
        around(WeightUpdater, name, update)
    around(ModelRunner, "check_weights", check)
    around(ModelRunner, "forward", forward)
    around(UnifiedRadixCache, "reset", reset)
    return found
