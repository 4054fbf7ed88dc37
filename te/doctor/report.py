# SPDX-License-Identifier: Apache-2.0
"""What ``te doctor`` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from te.doctor.findings import Finding, Severity, exit_status
from te.doctor.host_rules import unknown
from te.doctor.messages import Host
from te.doctor.outcome import Cell
from te.doctor.rules import possible, usable_ports
from te.doctor.tables import loop_back_table, matrix_tables, port_table

__all__ = ["Report", "summary"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that one call of ``te doctor`` has found."""

    here: Host
    #: Transports that were looked at.
    transports: tuple[str, ...]
    #: Of both sides, and of the ways between them.
    findings: tuple[Finding, ...]
    #: Test writes on this host.
    loop_back: tuple[Cell, ...] = ()
    #: The other side, what the two are called, and the ways between them; None without one.
    there: Host | None = None
    names: tuple[str, str] = ("", "")
    matrix: tuple[Cell, ...] = ()

    @property
    def exit_status(self) -> int:
        """The command's exit status."""
        return exit_status(self.findings)

    def json(self) -> str:
        """The report for programs."""
        body: dict[str, Any] = {
            "host": self.here.name,
            "exit_status": self.exit_status,
            "transports": {name: possible(name, self.findings) for name in self.transports},
            "findings": self.findings,
            "unknown": unknown(self.here.facts),
            "facts": self.here.facts,
            "loop_back": self.loop_back,
        }
        if self.there is not None:
            body |= {"peer": self.there, "names": self.names, "matrix": self.matrix}
        return msgspec.json.format(msgspec.json.encode(body).decode()) + "\n"

    def text(self) -> str:
        """The report for people."""
        there = self.there
        title = f"te doctor on {self.here.name}"
        parts: list[Sequence[str]] = [
            [title if there is None else f"{title}, with {self.names[1]}"]
        ]
        parts.append([self._transport(name) for name in self.transports])
        if self.loop_back:
            parts.append(loop_back_table(self.loop_back))
        if there is not None:
            for name, host in zip(self.names, (self.here, there), strict=True):
                parts.append([f"RDMA devices of {name}", *_devices(host)])
            parts.append(matrix_tables(self.matrix))
        parts += [_finding(one) for one in self.findings]
        gaps = unknown(self.here.facts)
        if gaps:
            parts.append(["Not known:", *(f"    {one}" for one in gaps)])
        parts.append([summary(self.findings)])
        return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"

    def _transport(self, name: str) -> str:
        if not possible(name, self.findings):
            return f"{name:9} not possible"
        if name != "rdma":
            return f"{name:9} possible"
        ports = usable_ports(self.here.facts, self.here.gid_index)
        return f"{name:9} possible: {', '.join(port.nic.name for port in ports)}"


def _devices(host: Host) -> list[str]:
    return port_table(host.facts, host.gid_index) if host.facts.ports else ["none"]


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
