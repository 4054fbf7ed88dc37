# SPDX-License-Identifier: Apache-2.0
"""A process with two engines, one of which writes to the other until it is ended: for programs that
look at it. It prints the id of the one that writes, and the nominal rate is what it can."""

from __future__ import annotations

import sys
import time

import numpy as np

import te


def main() -> None:
    config = te.Config(transports=("tcp",), rails=2, connect_timeout_s=60.0, stall_timeout_s=60.0)
    with te.Engine(config) as source, te.Engine(config) as target:
        src, dst = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
        near, far = source.register(src), target.register(dst, remote="read-write")
        peer = source.connect(target.card())
        blocks = te.Blocks.of(near.address, far.address, src.nbytes)
        sys.stdout.write(f"{source.id} {target.id}\n")
        sys.stdout.flush()
        while True:
            peer.write(blocks).wait(60.0)
            time.sleep(0.001)  # The processor is for others, too.


if __name__ == "__main__":
    main()
