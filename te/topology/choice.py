# SPDX-License-Identifier: Apache-2.0
"""The topology that a user wants: of the devices that match, or as a file says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from te.errors import TopologyError
from te.topology.locality import Topology, choose_nics, parse_override, rank
from te.topology.machine import Machine

__all__ = ["choose_topology"]


def choose_topology(machine: Machine, patterns: Sequence[str], override: Path | None) -> Topology:
    """What the JSON in the file ``override`` says, whatever the patterns; without a file, the order
    of the devices that match ``patterns``. ``te.TopologyError``."""
    if override is None:
        return rank(machine, choose_nics(machine.nics, patterns))
    try:
        text = override.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise TopologyError(f"cannot read {override}: {why}") from None
    return parse_override(text, machine)
