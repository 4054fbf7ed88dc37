# SPDX-License-Identifier: Apache-2.0
"""The installed SGLang in this process, on the CPU."""

from __future__ import annotations

import os
import runpy
import sys

from cpu_serving.servers import SHIM

# Before any test module imports SGLang, and inherited by processes that tests start.
sys.path.insert(0, str(SHIM))
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
runpy.run_path(str(SHIM / "sitecustomize.py"))
