# SPDX-License-Identifier: Apache-2.0
"""What a rank reports about itself when it renews its lease, for the status page.

Every part is bounded, so that the registry can keep the reports of thousands of ranks. The lists
travel as JSON arrays without field names, in the order of the fields: one rank may have hundreds
of peers.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

__all__ = [
    "FAILURES_MAX",
    "PEERS_MAX",
    "RAILS_MAX",
    "REASON_CHARS_MAX",
    "STATUS_VERSION",
    "Axes",
    "FailureStatus",
    "PeerStatus",
    "RailStatus",
    "RankStatus",
    "TransportRate",
    "reason_text",
]

STATUS_VERSION: Final = 1
TRANSPORTS_MAX: Final = 8
RAILS_MAX: Final = 64
#: A prefill rank of DeepSeek's published deployment has 144 decode ranks.
PEERS_MAX: Final = 256
ROOM_ENDS_MAX: Final = 8
FAILURES_MAX: Final = 8
REASON_CHARS_MAX: Final = 200
NAME_CHARS_MAX: Final = 64
#: Seconds since 1970 up to the year 5138, and more bytes per second than any NIC moves.
_NUMBER_MAX: Final = 1e11
_RATE_MAX: Final = 1e15
_COUNT_MAX: Final = 2**53 - 1  # what a JSON number holds exactly in a browser
_AXIS_MAX: Final = 65_536

#: dp, cp, tp and pp: a rank's coordinates, or the sizes of its topology.
Axes: TypeAlias = tuple[int, int, int, int]


class TransportRate(msgspec.Struct, frozen=True, array_like=True):
    """What one transport moved since the last report, in bytes per second."""

    transport: str
    in_bytes_per_s: float
    out_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_name("transport", self.transport)
        _check_number("in_bytes_per_s", self.in_bytes_per_s, _RATE_MAX)
        _check_number("out_bytes_per_s", self.out_bytes_per_s, _RATE_MAX)


class RailStatus(msgspec.Struct, frozen=True, array_like=True):
    """One rail: its name, whether it works (`up`), and what it moved, in bytes per second."""

    name: str
    is_up: bool
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_name("rail", self.name)
        _check_number("bytes_per_s of a rail", self.bytes_per_s, _RATE_MAX)


class PeerStatus(msgspec.Struct, frozen=True, array_like=True):
    """One decode rank that this rank is connected to.

    `id` tells decode ranks apart (the first digits of their engine's id); `coords` and `topology`
    are the decode rank's own, as dp, cp, tp, pp.
    """

    id: str
    host: str
    coords: Axes
    topology: Axes
    transport: str
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_name("peer id", self.id)
        _check_name("peer host", self.host)
        _check_name("transport of a peer", self.transport)
        _check_number("bytes_per_s of a peer", self.bytes_per_s, _RATE_MAX)
        for rank, size in zip(self.coords, self.topology, strict=True):
            if not 0 <= rank < size <= _AXIS_MAX:
                raise ValueError(f"a peer has coordinates {self.coords} of {self.topology}")


class FailureStatus(msgspec.Struct, frozen=True, array_like=True):
    """Rooms that failed for the same reason: the last time (seconds since 1970), how many."""

    at_s: float
    reason: str
    count: int

    def __post_init__(self) -> None:
        _check_number("the time of a failure", self.at_s, _NUMBER_MAX)
        _check_number("the count of a failure", self.count, _COUNT_MAX)
        _check_text("the reason of a failure", self.reason, REASON_CHARS_MAX)


class RankStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's report. A bad value raises `ValueError` with a sentence.

    Lists that would be longer than their limit are cut by whoever makes them: of the peers, say,
    the first `PEERS_MAX` are listed, and `peers_total` says how many there are. `rooms` counts the
    rooms of this rank by how they ended (`done`, `failed`, `aborted`), and `open` ones.
    """

    version: int = STATUS_VERSION
    rates: tuple[TransportRate, ...] = ()
    rails: tuple[RailStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    peers_total: int = 0
    rooms: dict[str, int] = {}
    failures: tuple[FailureStatus, ...] = ()

    def __post_init__(self) -> None:
        for name, most in (
            ("rates", TRANSPORTS_MAX),
            ("rails", RAILS_MAX),
            ("peers", PEERS_MAX),
            ("rooms", ROOM_ENDS_MAX),
            ("failures", FAILURES_MAX),
        ):
            if len(getattr(self, name)) > most:
                raise ValueError(f"{len(getattr(self, name))} {name}, at most {most} are reported")
        _check_number("version", self.version, _COUNT_MAX)
        _check_number("peers_total", self.peers_total, _COUNT_MAX)
        for end, count in self.rooms.items():
            _check_name("end of rooms", end)
            _check_number(f"the number of rooms {end}", count, _COUNT_MAX)


def reason_text(text: str) -> str:
    """`text` as a `FailureStatus` takes it: printable, and not too long."""
    plain = "".join(char if char.isprintable() else " " for char in text[:REASON_CHARS_MAX])
    return plain if len(text) <= REASON_CHARS_MAX else f"{plain[:-1]}…"


def _check_number(name: str, value: float, most: float) -> None:
    # Other than `math.isfinite`, a comparison takes integers that no float holds.
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}, outside 0..{most:g}")


def _check_name(name: str, text: str) -> None:
    _check_text(name, text, NAME_CHARS_MAX)


def _check_text(name: str, text: str, chars_max: int) -> None:
    if len(text) > chars_max:
        raise ValueError(f"{name} has {len(text)} characters, at most {chars_max} are reported")
    if not text.isprintable():
        raise ValueError(f"{name} {text!r} contains control characters")
