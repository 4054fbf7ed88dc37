# SPDX-License-Identifier: Apache-2.0
"""`scripts/route-bench`."""

from __future__ import annotations

import sys

from route_bench.command import main

if __name__ == "__main__":  # The processes of servers are forked from one that imports this.
    sys.exit(main(sys.argv[1:]))
