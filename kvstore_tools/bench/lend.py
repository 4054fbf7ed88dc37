# SPDX-License-Identifier: Apache-2.0
"""``python -m kvstore_tools.bench.lend DIRECTORY BYTES TRANSPORT...``: lends memory until its input
ends."""

from __future__ import annotations

import sys
from pathlib import Path

import te
from kvstore.config import Config
from kvstore.store import Store


def main() -> None:
    """Says "ready" once it can be used."""
    directory, lent, *transports = sys.argv[1:]
    engine = te.Config(transports=tuple(transports), status_dir=None)
    config = Config(owner="rank", memory=int(lent), directory=Path(directory), engine=engine)
    with Store(config):
        print("ready", flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
