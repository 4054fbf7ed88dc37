# SPDX-License-Identifier: Apache-2.0
"""What a finding is, and how severe it is. The kinds that there are: ``catalogue.py``. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from string import Formatter
from typing import Final

import msgspec

__all__ = [
    "BAD_USAGE",
    "EXIT_STATUS",
    "Finding",
    "Kind",
    "Seen",
    "Severity",
    "by_severity",
    "exit_status",
    "judge",
]


class Severity(enum.StrEnum):
    """How much a finding costs."""

    #: A transport cannot work: one that was asked for, or one for which the hardware is there.
    ERROR = "error"
    #: It works, but slower, or not with every peer or device.
    WARNING = "warning"
    #: It may cost something on some machines.
    HINT = "hint"


EXIT_STATUS: Final = {Severity.ERROR: 2, Severity.WARNING: 1, Severity.HINT: 0}
"""The exit status of ``te doctor`` by the worst finding; 0 without any."""

BAD_USAGE: Final = 3
"""The exit status for bad arguments, and when the check itself could not be made."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be wrong. The three texts have places in braces, which ``Seen.values``
    fill."""

    #: Stable: scripts may depend on it.
    name: str
    #: The transport that suffers from it; ``""`` for any, or as ``Seen`` says.
    transport: str
    #: While the transport works all the same.
    severity: Severity
    #: If the transport cannot work because of it, and nobody asked for that transport.
    unasked: Severity = Severity.ERROR
    #: One sentence: what is wrong.
    what: str
    #: One sentence: what that costs.
    consequence: str
    #: A command or a flag that mends it.
    mend: str

    @property
    def places(self) -> set[str]:
        """Names of the places in its texts."""
        texts = (self.what, self.consequence, self.mend)
        return {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of finding, as it was met with."""

    kind: Kind
    #: Where the kind leaves it open: the transport that suffers.
    transport: str = ""
    #: Devices, addresses or files that it is about.
    where: tuple[str, ...] = ()
    #: Whether its transport cannot work because of it.
    blocks: bool = False
    values: dict[str, str] = {}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be: what, what follows, what mends it."""

    name: str
    severity: Severity
    transport: str
    #: Devices, addresses or files that it is about.
    where: tuple[str, ...]
    #: Whether its transport cannot work because of it.
    blocks: bool
    what: str
    consequence: str
    mend: str
    #: The host on which it was found; ``""`` for this one.
    host: str = ""

    @property
    def title(self) -> str:
        """``port-down (mlx5_1)``."""
        place = ", ".join(self.where)
        text = f"{self.name} ({place})" if place else self.name
        return f"{text} on {self.host}" if self.host else text

    @property
    def sentence(self) -> str:
        """All of it in one line, for a log or an error."""
        return f"{self.severity} {self.title}: {self.what} {self.mend}"


def judge(seen: Iterable[Seen], asked: Collection[str], host: str = "") -> tuple[Finding, ...]:
    """The findings, the worst first; ``asked``: transports that have to work."""
    return by_severity(_judge(one, asked, host) for one in seen)


def by_severity(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first."""
    return tuple(sorted(found, key=lambda one: list(Severity).index(one.severity)))


def _judge(seen: Seen, asked: Collection[str], host: str) -> Finding:
    kind = seen.kind
    transport = seen.transport or kind.transport
    severity = kind.severity
    if seen.blocks:
        severity = Severity.ERROR if transport in asked else kind.unasked
    return Finding(
        name=kind.name,
        severity=severity,
        transport=transport,
        where=seen.where,
        blocks=seen.blocks,
        what=kind.what.format_map(seen.values),
        consequence=kind.consequence.format_map(seen.values),
        mend=kind.mend.format_map(seen.values),
        host=host,
    )


def exit_status(found: Iterable[Finding]) -> int:
    """0 without anything above a hint, 1 with a warning, 2 with an error."""
    return max((EXIT_STATUS[one.severity] for one in found), default=0)
