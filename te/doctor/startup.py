# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict on this machine, for a process that starts an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import structs

from te.doctor.facts import Facts, gather
from te.doctor.findings import Finding, Severity
from te.doctor.rules import findings
from te.errors import TopologyError
from te.topology import choose_nics

__all__ = ["only_nics", "verdict"]


def verdict(
    transports: Collection[str],
    asked: Collection[str] = (),
    nics: Sequence[str] = (),
    gid_index: int | None = None,
    root: Path = Path("/"),
) -> tuple[Finding, ...]:
    """Errors and warnings that concern these transports, the worst first. Makes no test writes.

    Args:
        transports: those that the engine may use.
        asked: of them those that have to work.
        nics: patterns of RDMA devices, as ``te.Config.nics``.
        gid_index: as ``te.Config.gid_index``.
    """
    facts = gather(root)
    # A pattern that matches nothing is for the engine to say, beside what stops all devices.
    with contextlib.suppress(TopologyError):
        facts = only_nics(facts, nics)
    return tuple(
        one
        for one in findings(facts, asked, gid_index)
        if one.transport in transports and one.severity is not Severity.HINT
    )


def only_nics(facts: Facts, patterns: Sequence[str]) -> Facts:
    """Facts about the devices that match; ``te.TopologyError`` for a pattern that matches none."""
    if not patterns:
        return facts
    chosen = choose_nics([port.nic for port in facts.ports], patterns)
    return structs.replace(facts, ports=tuple(port for port in facts.ports if port.nic in chosen))
