# SPDX-License-Identifier: Apache-2.0
"""The destination: `python -m healing_run.far` reads a `Setup`, prints its `Card`, and ends with
its standard input."""

from __future__ import annotations

import base64
import sys

import msgspec
import numpy as np

import te
from healing_run.messages import Card, Setup

__all__ = ["NBYTES", "PLACES", "config"]

#: Of a transfer; and how many different places transfers go to.
NBYTES, PLACES = 64 << 10, 64


def config(setup: Setup) -> te.Config:
    """te's defaults but for what has to be said."""
    transport = "rdma" if setup.nics else "tcp"
    return te.Config(host=setup.host, transports=(transport,), nics=tuple(setup.nics))


def main() -> None:
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    memory = np.zeros(NBYTES * PLACES, np.uint8)
    with te.Engine(config(setup)) as engine:
        region = engine.register(memory, remote="read-write")
        card = Card(base64.b64encode(engine.card()).decode(), region.address)
        sys.stdout.buffer.write(msgspec.json.encode(card) + b"\n")
        sys.stdout.buffer.flush()
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
