# SPDX-License-Identifier: Apache-2.0
"""The plane's codes as sentences."""

from __future__ import annotations

import os

from te.core.link import Reason

__all__ = ["Reason", "reason_name", "sentence"]


def reason_name(code: int) -> str:
    """A word for a counter: the member's name in lower case."""
    known = {one.value: one.name.lower() for one in Reason}
    return known.get(code, f"code_{code}")


def sentence(who: str, code: int, errnum: int, text: str, stall_s: float) -> str:
    """``who`` is the other side, as a noun: "engine 12ab at host:port"."""
    match code:
        case Reason.STALLED:
            return f"{who} made no progress for {stall_s} s"
        case Reason.BROKE:
            return f"the connection to {who} broke: {os.strerror(errnum)}"
        case Reason.ENDED:
            return f"{who} closed the connection{text}"
        case Reason.VIOLATED:
            return f"{who} broke the protocol: {text}"
        case Reason.PEER_CLOSED:
            return "the application closed this peer"
        case Reason.ENGINE_CLOSED:
            return "this engine was closed"
        case Reason.WAS_REFUSED:
            return f"{who} refused: {text}"
        case Reason.NO_RAIL:
            return f"all rails to {who} were down for {stall_s} s"
        case Reason.PROCESS_GONE:
            return f"{who} closed the connection: its process has ended"
        case Reason.SOURCE_FAULT:
            device = f" ({text})" if text else ""
            return f"the source memory cannot be read: {os.strerror(errnum)}{device}"
        case _:
            return f"{who}: code {code}, errno {errnum} {text}"
