# SPDX-License-Identifier: Apache-2.0
"""Runs LMCache's own tests of its transfer channels of NIXL over te.

They are not part of this repository: FOLDER is a checkout of LMCache, or its unpacked source
distribution, of the release that is installed. Exit status 1 if a test fails.
"""

from __future__ import annotations

import sys
from typing import Final

from tests_of_others import environment, folder_of, name_of, parser_of, run_pytest

FILES: Final = (
    "tests/disagg/test_nixl_channel.py",
    "tests/v1/distributed/transfer_channel/test_nixl_impl.py",
)
TIMEOUT_S: Final = 300.0


def main() -> int:
    parser = parser_of(__file__, __doc__)
    options = parser.parse_args()
    paths = [folder_of(parser, options.folder, "LMCache's", FILES, ("",)) / one for one in FILES]
    given = environment(SGLANG_MOONCAKE_HOST="127.0.0.1", LMCACHE_TRACK_USAGE="false")
    script = name_of(parser)
    codes = [run_pytest(script, one.parent, [one.name], given, TIMEOUT_S) for one in paths]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
