# SPDX-License-Identifier: Apache-2.0
"""The RDMA devices of this machine: which server uses which, and what they say they carried."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cpu_serving.processes import ServingError
from te.topology import Nic, read_machine

__all__ = ["Devices"]

SYSFS = Path("/sys/class/infiniband")
# Counters of a port and their unit in bytes. Cards count words of four bytes; soft-RoCE counts
# packets, which carry at most this much beside their headers; soft-iWARP counts nothing, but all
# that its interface carries to the other device's address is its.
WORD_BYTES = 4
PACKET_BYTES = 4096


@dataclass(frozen=True)
class Devices:
    """One half of the active devices for each server, so that what moves crosses a wire."""

    prefill: tuple[Nic, ...]
    decode: tuple[Nic, ...]

    @classmethod
    def halves(cls) -> Devices:
        """Raises ServingError when there are not two."""
        nics = [nic for nic in read_machine().nics if nic.is_active and nic.uverbs]
        if len(nics) < 2:
            names = ", ".join(nic.name for nic in nics) or "none"
            raise ServingError(
                f"--transport rdma needs two active RDMA devices, and here are: {names};"
                " try scripts/rdma-testbed --nics 2 --memory 14 -- scripts/demo --transport rdma"
            )
        half = len(nics) // 2
        return cls(tuple(nics[:half]), tuple(nics[half:]))

    def sent_bytes(self) -> int:
        """What the prefill server's devices have sent, by their own counters: at most so many.

        Differences alone mean something.
        """
        return sum(_sent_bytes(nic) for nic in self.prefill)


def _sent_bytes(nic: Nic) -> int:
    port = SYSFS / nic.device / "ports" / str(nic.port)
    counters = (
        (port / "counters/port_xmit_data", WORD_BYTES),
        (port / "hw_counters/sent_pkts", PACKET_BYTES),
        (Path("/sys/class/net") / nic.netdev / "statistics/tx_bytes", 1),
    )
    for path, unit in counters:
        if path.is_file():
            return int(path.read_text()) * unit
    raise ServingError(f"{nic.name} has no counter of what it sent")
