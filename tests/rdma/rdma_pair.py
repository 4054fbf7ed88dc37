# SPDX-License-Identifier: Apache-2.0
"""Two engines on different devices, and what went over the wires between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from testbed_nics import Nic, wait_for

import te

__all__ = ["RdmaPair", "descriptors", "rdma_pair"]

TIMEOUT_S = 60.0
#: Of what nobody waits for, and must not end because the one processor of an emulated machine was
#: elsewhere for some seconds. A rail that does not move is given up after longer than that, and
#: soon enough to be made anew within ``TIMEOUT_S``.
PATIENT: dict[str, Any] = {
    "connect_timeout_s": TIMEOUT_S,
    "stall_timeout_s": 600.0,
    "rail_timeout_s": 20.0,
}


def descriptors() -> set[tuple[str, str]]:
    """What this process has open: its number, and what it is."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add((path.name, str(path.readlink())))
    return found


@dataclass
class RdmaPair:
    """A source and a destination that each have as many devices as there are rails."""

    source: te.Engine
    target: te.Engine
    src: np.ndarray
    dst: np.ndarray
    peer: te.Peer
    near: tuple[Nic, ...]
    far: tuple[Nic, ...]

    def blocks(self, src_at: Any, dst_at: Any, nbytes: Any) -> te.Blocks:
        """From offsets in the two buffers."""
        return te.Blocks.of(
            np.asarray(src_at, np.uint64) + np.uint64(self.src.ctypes.data),
            np.asarray(dst_at, np.uint64) + np.uint64(self.dst.ctypes.data),
            nbytes,
        )


@contextlib.contextmanager
def rdma_pair(
    nics: tuple[Nic, ...], rails: int, nbytes: int, far_rails: int | None = None, **changes: Any
) -> Iterator[RdmaPair]:
    """Engines over RDMA alone, connected by every rail, with a registered buffer of ``nbytes``
    bytes each: random bytes at the source, 0xEE at the destination."""
    near, far = nics[:rails], nics[rails : rails + (rails if far_rails is None else far_rails)]
    common: dict[str, Any] = {"transports": ("rdma",)} | PATIENT | changes
    with (
        te.Engine(te.Config(nics=tuple(nic.device for nic in near), **common)) as source,
        te.Engine(te.Config(nics=tuple(nic.device for nic in far), **common)) as target,
    ):
        src = np.random.default_rng(rails).integers(0, 256, nbytes, np.uint8)
        dst = np.full(nbytes, 0xEE, np.uint8)
        source.register(src, remote="none")
        target.register(dst, remote="read-write")
        peer = source.connect(target.card())
        # One is enough for a peer to be connected.
        wait_for(
            lambda: peer.rails == len(peer.stats().rails),
            TIMEOUT_S,
            "every rail is up",
        )
        yield RdmaPair(source, target, src, dst, peer, near, far)
