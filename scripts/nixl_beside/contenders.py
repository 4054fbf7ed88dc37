# SPDX-License-Identifier: Apache-2.0
"""Whose `nixl` a process has, this package's or NVIDIA's: over TCP, and else as it comes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from cpu_serving.ports import HOST

from sglang_mooncake.sglang.running import environment_for
from te.version import version

__all__ = ["ROOT", "Absent", "about", "environment"]

ROOT: Final = Path(__file__).parents[2]
_NVIDIAS: Final = ROOT / "build/peers/nixl"


class Absent(Exception):
    """NVIDIA's package is not there; the sentence says how it comes."""


def environment(contender: str) -> Mapping[str, str]:
    """Variables of a process beside the others; its PYTHONPATH comes before theirs. Raises
    Absent."""
    if contender == "te":
        # As `sglang-mooncake run` makes it.
        return {
            **environment_for({}),
            "SGLANG_MOONCAKE_TRANSPORTS": "tcp",
            "SGLANG_MOONCAKE_HOST": HOST,
        }
    if not _NVIDIAS.is_dir():
        raise Absent(f"there is no {_NVIDIAS}: run scripts/setup peer nixl")
    # Left alone UCX copies between processes of one host, where no connection can be severed.
    return {"PYTHONPATH": str(_NVIDIAS), "UCX_TLS": "tcp", "UCX_LOG_LEVEL": "error"}


def about() -> str:
    """The versions."""
    found = [one.version for one in distributions(name="nixl", path=[str(_NVIDIAS)])]
    return f"te {version()}, nixl {', '.join(found) or 'absent'}, {os.cpu_count()} processors"
