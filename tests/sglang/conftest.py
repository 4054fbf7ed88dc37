# SPDX-License-Identifier: Apache-2.0
"""The installed SGLang in this process, on the CPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest
from cpu_serving.servers import SHIM

# Before any test module imports SGLang, and inherited by processes that tests start.
sys.path.insert(0, str(SHIM))
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
runpy.run_path(str(SHIM / "sitecustomize.py"))


# The fast environment has no torch, which these need to be read at all.
NEED_TORCH = [
    "test_overlap_stand_in.py",
    "test_planning.py",
    "test_pools.py",
    "test_page_numbers.py",
]
collect_ignore = [] if importlib.util.find_spec("torch") else NEED_TORCH


@pytest.fixture(scope="module")
def srt() -> Path:
    """SGLang's own folder of modules."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "SGLang is not installed: run scripts/setup serving"
    assert spec.origin is not None
    return Path(spec.origin).parent / "srt"


def pytest_unconfigure() -> None:
    """SGLang imports sentencepiece (0.2.1), whose SWIG runtime crashes when the interpreter takes
    it down at exit, depending on what else was imported. References that nobody gives back keep
    what it holds from being taken down."""
    for name, module in list(sys.modules.items()):
        if name.startswith("swig_runtime_data"):
            for held in vars(module).values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
