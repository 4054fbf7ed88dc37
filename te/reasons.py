# SPDX-License-Identifier: Apache-2.0
"""The plane's codes as sentences."""

from __future__ import annotations

import enum
import os

__all__ = ["Reason", "rail_sentence", "sentence"]


class Reason(enum.IntEnum):
    """Why a link died or a transfer failed; the enums in ``te/core/link.pxd`` and
    ``te/transports/rdma/state.pxd``."""

    NONE = 0
    STALLED = 1
    BROKE = 2
    ENDED = 3
    VIOLATED = 4
    PEER_CLOSED = 5
    ENGINE_CLOSED = 6
    FENCED = 7
    LINK_DIED = 8
    REFUSED = 9
    SOURCE_FAULT = 10
    NO_RAIL = 11
    PROCESS_GONE = 12
    # Of a rail over RDMA.
    RAIL_UP = 20
    BAD_STATUS = 21
    NO_COMPLETION = 22
    POST_FAILED = 23
    POLL_FAILED = 24
    PEER_BROKE = 25
    PORT_DOWN = 26
    DEVICE_FATAL = 27
    PAIR_EVENT = 28
    # Of a rail that is not given up.
    RAIL_SUSPECT = 29
    RAIL_MOVED = 30


_STATUSES = (
    "success",
    "local length error",
    "local queue pair operation error",
    "local EE context operation error",
    "local protection error",
    "flushed: the queue pair or its port went down",
    "memory window bind error",
    "bad response",
    "local access error",
    "remote invalid request",
    "remote access error: the memory is not registered there any more",
    "remote operation error",
    "transport retries exceeded: nothing answers",
    "receiver not ready for too long",
)
"""Names of ``enum ibv_wc_status``; ibv_poll_cq(3)."""


def rail_sentence(code: int, errnum: int, rail_timeout_s: float) -> str:
    """Why a rail over RDMA was given up."""
    match code:
        case Reason.BAD_STATUS:
            name = _STATUSES[errnum] if errnum < len(_STATUSES) else "unknown"
            return f"completion status {errnum} ({name})"
        case Reason.NO_COMPLETION:
            return f"no completion for {rail_timeout_s:g} s"
        case Reason.POST_FAILED:
            return f"ibv_post_send: {os.strerror(errnum)}"
        case Reason.POLL_FAILED:
            return f"ibv_poll_cq: {os.strerror(errnum)}"
        case Reason.PEER_BROKE if errnum:
            cause = rail_sentence(errnum, 0, rail_timeout_s)
            return f"the destination broke its end: {cause}"
        case Reason.PEER_BROKE:
            return "the destination broke its end"
        case Reason.PORT_DOWN:
            return "the port has lost its link"
        case Reason.DEVICE_FATAL:
            return "the device has failed as a whole"
        case Reason.PAIR_EVENT:
            return f"the device reports an error of the queue pair (event {errnum})"
        case Reason.FENCED:
            return "broken to end a cancelled read"
        case _:
            return f"code {code}, errno {errnum}"


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
            return "this peer was closed by its application"
        case Reason.ENGINE_CLOSED:
            return "this engine was closed"
        case Reason.FENCED:
            return f"the application fenced {who}"
        case Reason.REFUSED:
            return f"{who} refused: {text}"
        case Reason.NO_RAIL:
            return f"no rail to {who} worked for {stall_s} s"
        case Reason.PROCESS_GONE:
            return f"{who} closed the connection: its process has ended"
        case Reason.SOURCE_FAULT:
            return f"the source memory cannot be read: {os.strerror(errnum)}"
        case _:
            return f"{who}: code {code}, errno {errnum} {text}"
