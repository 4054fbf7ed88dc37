# SPDX-License-Identifier: Apache-2.0
"""Runs the rules in vLLM's environment: ``python -m vllm_rules [--release-at FOLDER]``. The python
is that of .venv, whose pytest comes behind all that .venv-vllm has."""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

from cpu_serving.servers import SHIM
from cpu_serving.vllm_servers import PYTHON, ROOT

RULES = Path(__file__).with_name("rules.py")
RUN = "import sys; sys.path.append(sys.argv[1]); import pytest; sys.exit(pytest.main(sys.argv[2:]))"


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm_rules")
    parser.add_argument(
        "--release-at", type=Path, metavar="FOLDER", help="where another release of vLLM lies"
    )
    at = parser.parse_args().release_at
    paths = [SHIM, *([at.absolute()] if at else []), ROOT, ROOT / "tests/support"]
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(RULES.parent), "-q"]
    os.execve(
        PYTHON,
        [
            *(str(PYTHON), "-P", "-c", RUN, sysconfig.get_path("purelib")),
            *(*options, "-p", "no:cacheprovider", str(RULES)),
        ],
        os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "VLLM_TARGET_DEVICE": "cpu",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        },
    )


if __name__ == "__main__":
    main()
