# SPDX-License-Identifier: Apache-2.0
"""A stock backend's packages and settings, for all servers of a run."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

from chaos_run.backends import STOCK, Backend
from te.version import version

__all__ = ["NoPeer", "environment_of", "versions_of"]

_ROOT: Final = Path(__file__).resolve().parents[2]


class NoPeer(Exception):
    """It cannot run here; the message says why."""


def environment_of(backend: Backend) -> dict[str, str]:
    """Variables that servers get. Installs its packages first. Raises NoPeer."""
    if subprocess.run([_ROOT / "scripts/setup", "peer", backend], check=False).returncode:
        raise NoPeer(f"{backend} cannot run here, as scripts/setup peer {backend} says above")
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (str(_folder(backend)), inherited)))
    return {**STOCK[backend].settings, "PYTHONPATH": path}


def versions_of(backend: Backend) -> str:
    """Of SGLang, and of what moves its bytes, for people."""
    sglang = f"SGLang {metadata.version('sglang')}"
    if backend not in STOCK:
        return f"{sglang}, sglang-mooncake {version()}"
    names = {one.name: one.version for one in metadata.distributions(path=[str(_folder(backend))])}
    return ", ".join([sglang, *(f"{name} {names[name]}" for name in STOCK[backend].packages)])


def _folder(backend: Backend) -> Path:
    return _ROOT / "build/peers" / backend
