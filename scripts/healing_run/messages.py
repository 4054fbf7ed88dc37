# SPDX-License-Identifier: Apache-2.0
"""What the processes of a row tell each other: lines of JSON. All times are `time.monotonic`."""

from __future__ import annotations

import msgspec

__all__ = ["Card", "Log", "Moved", "RailChange", "Setup"]


class Setup(msgspec.Struct, frozen=True):
    """Of an engine. nics: patterns of RDMA devices; none: over TCP."""

    host: str
    nics: list[str]


class Card(msgspec.Struct, frozen=True):
    """Where the destination's memory is. card: in base64."""

    card: str
    address: int


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """A transfer. error: why it failed, else empty."""

    began_s: float
    ended_s: float
    error: str


class RailChange(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    rail: str
    state: str


class Log(msgspec.Struct, frozen=True):
    """What the source has seen."""

    moved: list[Moved]
    rails: list[RailChange]
