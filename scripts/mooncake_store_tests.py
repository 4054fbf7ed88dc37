# SPDX-License-Identifier: Apache-2.0
"""Runs Mooncake's own tests of its store's Python API over kvstore.

They are not part of this repository: FOLDER is a checkout of Mooncake, or the folder of it that has
the files. Exit status 1 if a test fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests_of_others import environment, folder_of, name_of, parser_of, run_pytest

FILES: Final = {
    "test_distributed_object_store.py": {},
    "test_replicated_distributed_object_store.py": {"copies": 2},
}
"""Of each the settings of the store that it needs: of Mooncake's, a put says how many copies."""
LEFT_OUT: Final = (
    "test_distributed_object_store.py::TestDistributedObjectStoreSingleStore::test_client_tear_down",
)
"""It wants objects to end with the client that has stored them. Here they are the host's."""
PLACES: Final = ("", "mooncake-wheel/tests")
"""Where the files are, below the folder."""
MEMORY: Final = "1200MiB"
"""Of each store. The tests ask for 3,200 MB, and fill a quarter of it."""
TIMEOUT_S: Final = 900.0


def run(script: str, folder: Path, file: str, settings: dict[str, int]) -> int:
    """The exit status of one file's tests."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        store = {"memory": MEMORY, "directory": directory} | settings
        given = environment(
            SGLANG_MOONCAKE_STORE=json.dumps(store),
            # Objects that were read have no lease here that a test would have to wait for.
            DEFAULT_KV_LEASE_TTL="0",
        )
        return run_pytest(script, folder, [file], given, TIMEOUT_S, LEFT_OUT)


def main() -> int:
    parser = parser_of(__file__, __doc__)
    options = parser.parse_args()
    folder = folder_of(parser, options.folder, "Mooncake's", FILES, PLACES)
    script = name_of(parser)
    codes = [run(script, folder, file, settings) for file, settings in FILES.items()]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
