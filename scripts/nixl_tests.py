# SPDX-License-Identifier: Apache-2.0
"""Runs NIXL's own tests of its Python API over te.

They are not part of this repository: FOLDER is a checkout of NIXL, or the folder of it that has the
files. Exit status 1 if a test fails.
"""

from __future__ import annotations

import sys
from typing import Final

from tests_of_others import environment, folder_of, name_of, parser_of, run_pytest

FILES: Final = ("test_nixl_api.py", "test_nixl_bindings.py")
PLACES: Final = ("", "test/python")
"""Where the files are, below the folder."""
TIMEOUT_S: Final = 600.0


def main() -> int:
    parser = parser_of(__file__, __doc__)
    options = parser.parse_args()
    folder = folder_of(parser, options.folder, "NIXL's", FILES, PLACES)
    # Agents of the tests meet each other here and nobody else.
    given = environment(SGLANG_MOONCAKE_HOST="127.0.0.1")
    return 1 if run_pytest(name_of(parser), folder, FILES, given, TIMEOUT_S) else 0


if __name__ == "__main__":
    sys.exit(main())
