# SPDX-License-Identifier: Apache-2.0
"""Runs Mooncake's own tests of its store's Python API over kvstore.

They are not part of this repository: FOLDER is a checkout of Mooncake, or the folder of it that has
the files. Exit status 1 if a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from command_line import Parser

FILES: Final = {
    "test_distributed_object_store.py": {},
    "test_replicated_distributed_object_store.py": {"copies": 2},
}
"""Of each the settings of the store that it needs: of Mooncake's, a put says how many copies."""
PLACES: Final = ("", "mooncake-wheel/tests")
"""Where the files are, below the folder."""
ROOT: Final = Path(__file__).resolve().parents[1]
MEMORY: Final = "1200MiB"
"""Of each store. The tests ask for 3,200 MB, and fill a quarter of it."""
TIMEOUT_S: Final = 900.0

PARSER = Parser(
    ".venv/bin/python scripts/mooncake_store_tests.py",
    __doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
PARSER.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")


def found(folder: Path) -> Path | None:
    """Where the files are."""
    places = (folder / one for one in PLACES)
    return next((one for one in places if all((one / name).is_file() for name in FILES)), None)


def environment(directory: str, settings: dict[str, object]) -> dict[str, str]:
    """Of the tests' process: ``mooncake.store`` is kvstore there."""
    from sglang_mooncake.sglang.running import environment_for

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    store = {"memory": MEMORY, "directory": directory} | settings
    # Objects that were read have no lease here that a test would have to wait for.
    of_tests = {"DEFAULT_KV_LEASE_TTL": "0"}
    ours = {"PYTHONPATH": path, "SGLANG_MOONCAKE_STORE": json.dumps(store)}
    return dict(environment_for(os.environ | of_tests | ours))


def run(folder: Path, name: str, settings: dict[str, object]) -> int:
    """The exit status of pytest, which knows nothing of this project's settings."""
    argv = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    argv += ["-c", os.devnull, "--rootdir", str(folder), name]
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        try:
            given = environment(directory, settings)
            return subprocess.run(argv, cwd=folder, env=given, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"mooncake_store_tests: {name} has not ended within {TIMEOUT_S:g} s\n")
            return 1


def main() -> int:
    options = PARSER.parse_args()
    if options.folder is None:
        PARSER.error("name the folder of Mooncake's checkout")
    folder = found(options.folder)
    if folder is None:
        sys.stderr.write(f"mooncake_store_tests: {options.folder} has no {' and '.join(FILES)}\n")
        return 2
    codes = [run(folder, name, settings) for name, settings in FILES.items()]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
