# SPDX-License-Identifier: Apache-2.0
"""Two processes with an installed wheel: one writes bytes into the other's memory, over each
transport that needs no device. `alone.py` runs it.

This process has the memory; for each transport it runs itself once more, as the one that writes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import te

TRANSPORTS = ("samehost", "tcp")
BLOCKS = 512
BLOCK_BYTES = 16 << 10
TIMEOUT_S = 60.0


def main(arguments: list[str]) -> None:
    if arguments:
        write(*map(json.loads, arguments))
        return
    for transport in TRANSPORTS:
        receive(transport)
        print(f"{BLOCKS} blocks of {BLOCK_BYTES} B from another process over {transport}: equal")


def receive(transport: str) -> None:
    """Exits with a sentence if other bytes than those of the writer are there afterwards."""
    with te.Engine(te.Config(transports=(transport,), status_dir=None)) as engine:
        memory = te.allocate(BLOCKS * BLOCK_BYTES)
        region = engine.register(memory)
        tag = te.new_tag()
        engine.expect(tag)
        told = (transport, engine.card().hex(), region.address, tag)
        argv = [sys.executable, "-I", __file__, *map(json.dumps, told)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
        if done.returncode or done.stdout.split() != [transport]:
            sys.exit(f"writing over {transport}: exit status {done.returncode}\n{done.stderr}")
        if engine.arrived(tag) != 1:
            sys.exit(f"{transport}: the writer has ended, and {engine.arrived(tag)} writes arrived")
        engine.fence(tag)
        if memory[:] != payload(transport):
            sys.exit(f"{transport}: the bytes that arrived are other ones")


def write(transport: str, card: str, address: int, tag: int) -> None:
    """Writes the payload in blocks of shuffled order, and prints what it went over."""
    with te.Engine(te.Config(transports=(transport,), status_dir=None)) as engine:
        memory = te.allocate(BLOCKS * BLOCK_BYTES)
        memory[:] = payload(transport)
        source = engine.register(memory)
        order = random.Random(transport).sample(range(BLOCKS), BLOCKS)
        blocks = te.Blocks.of(at(source.address, order), at(address, order), BLOCK_BYTES)
        peer = engine.connect(bytes.fromhex(card))
        status = peer.write(blocks, tag=tag).wait(TIMEOUT_S)
        if status is not te.Status.DONE:
            sys.exit(f"the write over {transport} ended as {status}")
        print(peer.stats().transport)


def at(address: int, order: list[int]) -> Any:
    return [address + one * BLOCK_BYTES for one in order]


def payload(seed: str) -> bytes:
    return random.Random(seed).randbytes(BLOCKS * BLOCK_BYTES)


if __name__ == "__main__":
    main(sys.argv[1:])
