# SPDX-License-Identifier: Apache-2.0
"""Runs NIXL's own tests of its Python API over te.

They are not part of this repository: FOLDER is a checkout of NIXL, or the folder of it that has the
files. Exit status 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from command_line import Parser

FILES: Final = ("test_nixl_api.py", "test_nixl_bindings.py")
PLACES: Final = ("", "test/python")
"""Where the files are, below the folder."""
ROOT: Final = Path(__file__).resolve().parents[1]
TIMEOUT_S: Final = 600.0

PARSER = Parser(
    ".venv/bin/python scripts/nixl_tests.py",
    __doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
PARSER.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")


def found(folder: Path) -> Path | None:
    """Where the files are."""
    places = (folder / one for one in PLACES)
    return next((one for one in places if all((one / name).is_file() for name in FILES)), None)


def environment() -> dict[str, str]:
    """Of the tests' process: ``nixl`` is te there."""
    from sglang_mooncake.sglang.running import environment_for

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Agents of the tests meet each other here and nobody else.
    ours = {"PYTHONPATH": path, "SGLANG_MOONCAKE_HOST": "127.0.0.1"}
    return dict(environment_for(os.environ | ours))


def run(folder: Path) -> int:
    """The exit status of pytest, which knows nothing of this project's settings."""
    argv = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    argv += ["-c", os.devnull, "--rootdir", str(folder), *FILES]
    try:
        return subprocess.run(argv, cwd=folder, env=environment(), timeout=TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"nixl_tests: the tests have not ended within {TIMEOUT_S:g} s\n")
        return 1


def main() -> int:
    options = PARSER.parse_args()
    if options.folder is None:
        PARSER.error("name the folder of NIXL's checkout")
    folder = found(options.folder)
    if folder is None:
        sys.stderr.write(f"nixl_tests: {options.folder} has no {' and '.join(FILES)}\n")
        return 2
    return 1 if run(folder) else 0


if __name__ == "__main__":
    sys.exit(main())
