# SPDX-License-Identifier: Apache-2.0
"""Hand-over layer by layer on a CPU: KV that others see when its layer is written, and not before
(`cpu_published`), and two ways to break the hand-over, which must not go unnoticed.

Set up by the JSON of `CPU_SERVING_LAYERS`, see `Settings`.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cpu_published

__all__ = ["Settings", "install"]

VARIABLE = "CPU_SERVING_LAYERS"
#: While the folder holds a file of this name, what is announced has a layer more than is written.
ONE_TOO_EARLY = "announce-one-layer-more"
#: While it holds this one, layers that go before `send()` count as sent and are not.
LEFT_OUT = "leave-early-layers-out"


class Settings(NamedTuple):
    """folder: of the files that begin a negative control.
    published: whether to publish the KV pool at once (a server without streams).
    always: whether layers go early where nothing is gained, too.
    """

    folder: str
    published: bool
    always: bool


def install() -> cpu_published.Patches:
    """What to do with which module once it is imported: nothing without `CPU_SERVING_LAYERS`."""
    text = os.environ.get(VARIABLE)
    if not text:
        return {}
    settings = Settings(**json.loads(text))
    folder = Path(settings.folder)
    patches: cpu_published.Patches = {
        "sglang_mooncake.prefill_side": lambda module: _announce_more(module, folder),
        "sglang_mooncake.layout.plan": lambda module: _leave_out(module, folder),
    }
    if settings.always:
        patches["sglang_mooncake.layer_groups"] = _send_always
    if settings.published:
        patches |= cpu_published.patches(cpu_published.at_once)
    return patches


def _send_always(module: ModuleType) -> None:
    module.WORTH_S, module.SHARE_OF_FORWARD = 0.0, float("inf")


def _announce_more(module: ModuleType, folder: Path) -> None:
    send_layers = module.PrefillSide.send_layers

    @functools.wraps(send_layers)
    def wrapped(side: Any, view: Any, pages: Any, first: int, below: int, *others: Any) -> None:
        more = (folder / ONE_TOO_EARLY).exists()
        send_layers(side, view, pages, first, below + more, *others)

    module.PrefillSide.send_layers = wrapped


def _leave_out(module: ModuleType, folder: Path) -> None:
    import te

    part, nothing = module.Plan.part, te.Blocks.concat([])

    @functools.wraps(part)
    def wrapped(plan: Any, pages: Any, first: int, named: Any, layers: range) -> Any:
        is_early = layers.stop < module.EVERY_LAYER.stop
        if is_early and (folder / LEFT_OUT).exists():
            return nothing
        return part(plan, pages, first, named, layers)

    module.Plan.part = wrapped
