# SPDX-License-Identifier: Apache-2.0
"""Reads what a rank reports with its renewal. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from bootstrap_server.decoding import BadText, decoded
from bootstrap_server.page.board import Report
from bootstrap_server.page.lately import tally_of
from bootstrap_server.ranks.rank_status import STATUS_VERSION, RankStatus

__all__ = ["REPORT_BYTES_MAX", "read_report"]

#: With all lists at their limits a report has about 50 kB.
REPORT_BYTES_MAX: Final = 64 << 10

_STATUS = msgspec.json.Decoder(RankStatus)


def read_report(encoded: msgspec.Raw) -> Report | None:
    """A rank's report for the board, without what this version does not know; None for none.

    Raises `ValueError` for one that is too long, of another version or no `RankStatus`.
    """
    text = bytes(encoded)
    if not text:
        return None
    if len(text) > REPORT_BYTES_MAX:
        raise ValueError(f"it has {len(text)} bytes, at most {REPORT_BYTES_MAX} are kept")
    try:
        status = decoded(_STATUS, text)
    except BadText as error:
        raise ValueError(f"it is no RankStatus: {error}") from error
    if status.version != STATUS_VERSION:
        raise ValueError(f"it has version {status.version}, this server knows {STATUS_VERSION}")
    topologies = frozenset(peer.topology for peer in status.peers)
    return Report(msgspec.json.encode(status), topologies, tally_of(status))
