# SPDX-License-Identifier: Apache-2.0
"""Requests that a test sends to both servers itself, as the router would, in the order it likes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from cpu_serving import stats
from cpu_serving.servers import HOST, Server
from cpu_serving.traffic import Request

__all__ = ["computed_tokens", "in_a_room", "open_rooms"]

_rooms = itertools.count(1 << 40)


def in_a_room(prefill: Server, request: Request, **fields: object) -> Request:
    """The request with what the router adds for both servers: a room of its own."""
    where = {
        "bootstrap_host": HOST,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": next(_rooms),
    }
    return replace(request, fields={**where, **fields})


def computed_tokens(server: Server) -> int:
    """Of all prompts so far, those found in the prefix cache left out."""
    return sum(map(int, re.findall(r"#new-token: (\d+)", server.process.log_text())))


def open_rooms(server: Server) -> int:
    """Up to a second ago."""
    return sum(rank.rooms["open"] for rank in stats.read_stats(server))
