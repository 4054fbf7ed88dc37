# SPDX-License-Identifier: Apache-2.0
"""Mooncake's numbers for what became of a call. Pure."""

from __future__ import annotations

from typing import Final

from kvstore.objects.outcomes import Got, Put, Removed

__all__ = [
    "INVALID",
    "MISSING",
    "OF_GET",
    "OF_PUT",
    "OF_REMOVE",
    "OK",
    "TRANSFER_FAILED",
]

OK: Final = 0
NO_SPACE: Final = -200
INVALID: Final = -600
MISSING: Final = -704
TRANSFER_FAILED: Final = -800
CORRUPTED: Final = -801
UNREACHABLE: Final = -900
TIMED_OUT: Final = -901

OF_PUT: Final = {
    Put.STORED: OK,
    # The first value stays, as it does in Mooncake's.
    Put.EXISTS: OK,
    Put.BEING_STORED: OK,
    Put.NO_SPACE: NO_SPACE,
    Put.TOO_LARGE: INVALID,
    Put.UNREACHABLE: UNREACHABLE,
    Put.TIMED_OUT: TIMED_OUT,
    Put.FAILED: TRANSFER_FAILED,
}
OF_GET: Final = {
    Got.MISSING: MISSING,
    Got.REJECTED: MISSING,
    Got.MOVED: MISSING,
    Got.CORRUPTED: CORRUPTED,
    Got.NOT_PROMOTED: TIMED_OUT,
    Got.UNREACHABLE: UNREACHABLE,
    Got.TIMED_OUT: TIMED_OUT,
}
"""Of all outcomes but ``RIGHT``, for which a get tells the object's size."""
OF_REMOVE: Final = {
    Removed.REMOVED: OK,
    Removed.MISSING: MISSING,
    Removed.UNREACHABLE: UNREACHABLE,
}
