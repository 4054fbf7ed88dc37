# SPDX-License-Identifier: Apache-2.0
"""Servers that hand KV over layer by layer: the setting, KV that is garbage until its layer is
written (`shim/cpu_published.py`), and the negative controls (`shim/cpu_layers.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Layerwise", "layers_announced_early", "layers_left_out"]

# As in shim/cpu_layers.py.
VARIABLE = "CPU_SERVING_LAYERS"
ONE_TOO_EARLY = "announce-one-layer-more"
LEFT_OUT = "leave-early-layers-out"


@dataclass(frozen=True)
class Layerwise:
    """The prefill server sends groups of layers while it computes the others.

    always: also of prompts so short that nothing is gained.
    """

    always: bool = False

    def environment(self, role: str, folder: Path, *, has_streams: bool) -> dict[str, str]:
        """Of a server with this role; `folder` is for the controls.

        has_streams: whether overlap scheduling publishes the pool already (`overlap.Overlap`).
        """
        if role != "prefill":
            return {}
        settings = {
            "folder": str(folder),
            "published": not has_streams,
            "always": self.always,
        }
        return {"SGLANG_MOONCAKE_LAYERWISE": "1", VARIABLE: json.dumps(settings)}


def layers_announced_early(folder: Path) -> AbstractContextManager[None]:
    """A negative control: meanwhile each group is said to have a layer more than is written."""
    return _while_there(folder / ONE_TOO_EARLY)


def layers_left_out(folder: Path) -> AbstractContextManager[None]:
    """A negative control: meanwhile layers that go early count as sent, and are not."""
    return _while_there(folder / LEFT_OUT)


@contextmanager
def _while_there(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()
