# SPDX-License-Identifier: Apache-2.0
"""Requests that a test sends to both servers itself, as the router would, in the order it likes."""

from __future__ import annotations

import re

from cpu_serving import stats
from cpu_serving.direct import in_a_room
from cpu_serving.servers import Server

__all__ = ["computed_tokens", "in_a_room", "open_rooms"]


def computed_tokens(server: Server) -> int:
    """Of all prompts so far, those found in the prefix cache left out."""
    return sum(map(int, re.findall(r"#new-token: (\d+)", server.process.log_text())))


def open_rooms(server: Server) -> int:
    """Up to a second ago."""
    return sum(rank.rooms["open"] for rank in stats.read_stats(server))
