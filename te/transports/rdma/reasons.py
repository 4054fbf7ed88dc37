# SPDX-License-Identifier: Apache-2.0
"""The plane's codes about rails as sentences."""

from __future__ import annotations

import os

from te.transports.rdma.rails import RailReason

__all__ = ["RailReason", "rail_sentence"]


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


def rail_sentence(
    code: int, errnum: int, rail_timeout_s: float, late: tuple[float, float] = (0.0, 0.0)
) -> str:
    """Why a rail over RDMA failed. ``late``: the time-outs of making one and of its probe, in
    seconds. Of an attempt that failed, whoever made it has the words."""
    match code:
        case RailReason.NOT_BUILT:
            return f"no new queue pair within {late[0]:g} s"
        case RailReason.NO_ANSWER:
            return f"the probe did not arrive within {late[1]:g} s"
        case RailReason.BAD_STATUS:
            name = _STATUSES[errnum] if errnum < len(_STATUSES) else "unknown"
            return f"completion status {errnum} ({name})"
        case RailReason.NO_COMPLETION if errnum:
            return f"no completion for {errnum} ms, while another rail moved bytes"
        case RailReason.NO_COMPLETION:
            return f"no completion for {rail_timeout_s:g} s"
        case RailReason.POST_FAILED:
            return f"ibv_post_send: {os.strerror(errnum)}"
        case RailReason.POLL_FAILED:
            return f"ibv_poll_cq: {os.strerror(errnum)}"
        case RailReason.PEER_BROKE if errnum:
            cause = rail_sentence(errnum, 0, rail_timeout_s)
            return f"the destination broke its end: {cause}"
        case RailReason.PEER_BROKE:
            return "the destination broke its end"
        case RailReason.PORT_DOWN:
            return "the port has lost its link"
        case RailReason.DEVICE_FATAL:
            return "the device has failed as a whole"
        case RailReason.QP_EVENT:
            return f"the device reports an error of the queue pair (event {errnum})"
        case RailReason.READ_CANCELLED:
            return "broken to end a cancelled read"
        case _:
            return f"code {code}, errno {errnum}"
