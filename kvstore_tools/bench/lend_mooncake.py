# SPDX-License-Identifier: Apache-2.0
"""``python -m kvstore_tools.bench.lend_mooncake MASTER_PORT PORT BYTES``: lends memory to Mooncake
Store until its input ends."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    """Says "ready" once it can be used."""
    master, port, lent = map(int, sys.argv[1:])
    module: Any = importlib.import_module("mooncake.store")
    store = module.MooncakeDistributedStore()
    here, there = f"127.0.0.1:{port}", f"127.0.0.1:{master}"
    code = store.setup(here, "P2PHANDSHAKE", lent, 64 << 20, "tcp", "", there)
    print("ready" if code == 0 else f"setup returned {code}", flush=True)  # noqa: T201
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
