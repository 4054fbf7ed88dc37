# SPDX-License-Identifier: Apache-2.0
"""What ``te doctor`` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from te.doctor.facts import Facts
from te.doctor.findings import Finding, Severity, exit_status
from te.doctor.host_rules import unknown
from te.doctor.rules import possible, usable_ports

__all__ = ["Report", "summary"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that one call of ``te doctor`` has found."""

    host: str
    #: Transports that were looked at.
    transports: tuple[str, ...]
    findings: tuple[Finding, ...]
    facts: Facts
    #: As it was asked for; None if it was not.
    gid_index: int | None = None

    @property
    def exit_status(self) -> int:
        """Of the command."""
        return exit_status(self.findings)

    def json(self) -> str:
        """For programs."""
        body: dict[str, Any] = {
            "host": self.host,
            "exit_status": self.exit_status,
            "transports": {name: possible(name, self.findings) for name in self.transports},
            "findings": self.findings,
            "unknown": unknown(self.facts),
            "facts": self.facts,
        }
        return msgspec.json.format(msgspec.json.encode(body).decode()) + "\n"

    def text(self) -> str:
        """For people."""
        parts = [
            [f"te doctor on {self.host}"],
            [self._transport(name) for name in self.transports],
            *([*_finding(one)] for one in self.findings),
        ]
        gaps = unknown(self.facts)
        if gaps:
            parts.append(["Not known:", *(f"    {one}" for one in gaps)])
        parts.append([summary(self.findings)])
        return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

    def _transport(self, name: str) -> str:
        if not possible(name, self.findings):
            return f"{name:9} not possible"
        if name != "rdma":
            return f"{name:9} possible"
        devices = (port.nic.name for port in usable_ports(self.facts, self.gid_index))
        return f"{name:9} possible: {', '.join(devices)}"


def summary(found: Iterable[Finding]) -> str:
    """``1 error, 2 warnings, 0 hints.``"""
    severities = [one.severity for one in found]
    counts = [(one.value, severities.count(one)) for one in Severity]
    return ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts) + "."


def _finding(one: Finding) -> Sequence[str]:
    return (
        f"{one.severity:8} {one.title}",
        f"    {one.what}",
        f"    Consequence: {one.consequence}",
        f"    Mend: {one.mend}",
    )
