# SPDX-License-Identifier: Apache-2.0
"""SGLang in other releases than the installed one, beside the same dependencies."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from cpu_serving.processes import ServingError
from cpu_serving.servers import SHIM, ServerOptions, base_environment

__all__ = ["environment_of", "in_release", "prepared"]

ROOT = Path(__file__).parents[3]
INSTALL_TIMEOUT_S = 600.0


def prepared(release: str) -> Path:
    """The folder with that release, installed if need be; ServingError."""
    folder = ROOT / "build/sglang" / release
    if not folder.is_dir():
        argv = [str(ROOT / "scripts/setup"), "release", release]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise ServingError(f"SGLang {release} cannot be installed: {done.stderr[-2000:]}")
    return folder


def environment_of(release: str) -> dict[str, str]:
    """What every server of that release has."""
    env = base_environment()
    rest = env["PYTHONPATH"].removeprefix(f"{SHIM}:")
    return env | {"PYTHONPATH": ":".join([str(SHIM), str(prepared(release)), rest])}


def in_release(options: ServerOptions, release: str) -> ServerOptions:
    """The same server in that release."""
    path = environment_of(release)["PYTHONPATH"]
    return replace(options, extra_env={**options.extra_env, "PYTHONPATH": path})
