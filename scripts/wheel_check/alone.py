# SPDX-License-Identifier: Apache-2.0
"""What a wheel must do where nothing but its declared dependencies is installed.

Run by that environment's interpreter, with -I. Exits with a sentence when something does not work.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
PLAN = ("--model", "llama-70b", "--prefill", "tp=8", "--decode", "tp=4")
#: (command, exit status, what its output must contain)
COMMANDS: tuple[tuple[tuple[str, ...], set[int], str], ...] = (
    (("te", "--version"), {0}, "te 0."),
    (("te", "bench"), {2}, "te bench is not part of the wheel"),
    (("te", "doctor"), {0, 1, 2}, "tcp"),
    (("sglang-mooncake", "--version"), {0}, "sglang-mooncake 0."),
    (("kvstore", "--version"), {0}, "kvstore 0."),
    (("kvstore", "top", "--once"), {0}, ""),
    (("kvstore", "bench"), {2}, "kvstore bench is not part of the wheel"),
    (("kvstore", "replay"), {2}, "kvstore replay is not part of the wheel"),
    (("sglang-mooncake", "plan", *PLAN), {0}, "prefill"),
    (("python", "-m", "bootstrap_server", "--version"), {0}, "bootstrap_server 0."),
)
TRANSFER = Path(__file__).with_name("transfer.py")
IMPORTS = ("te", "bootstrap_server", "kvstore.store", "sglang_mooncake.sglang.config")
ROUNDS = 7


def main() -> None:
    for name in ("cc", "gcc", "sglang", "nvidia-smi"):
        if shutil.which(name):
            sys.exit(f"this environment has {name}, so that it proves nothing")
    for name in ("torch", "sglang"):
        if importlib.util.find_spec(name):
            sys.exit(f"this environment has the package {name}, so that it proves nothing")
    for name in IMPORTS:
        module = importlib.import_module(name)
        if not Path(str(module.__file__)).is_relative_to(sys.prefix):
            sys.exit(f"{name} comes from {module.__file__}, not from the wheel")
    for command, statuses, text in COMMANDS:
        _run(command, statuses, text)
    subprocess.run([sys.executable, "-I", str(TRANSFER)], check=True, timeout=300)
    print(f"import te: {_import_s() * 1e3:.0f} ms, the median of {ROUNDS}")


def _run(command: tuple[str, ...], statuses: set[int], text: str) -> None:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], capture_output=True, text=True, timeout=120
    )
    said = done.stdout + done.stderr
    if done.returncode not in statuses or text.lower() not in said.lower() or "Traceback" in said:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}, and it said\n{said}")


def _import_s() -> float:
    """The median of what the import adds to an interpreter that has started."""
    code = "import time; t = time.perf_counter(); import te; print(time.perf_counter() - t)"
    argv = [sys.executable, "-I", "-c", code]
    return statistics.median(
        float(subprocess.check_output(argv, timeout=60)) for _ in range(ROUNDS)
    )


if __name__ == "__main__":
    main()
