# SPDX-License-Identifier: Apache-2.0
"""Query parameters of the routes; `RefusalError` for values that are none."""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from bootstrap_server.http.body import RefusalError
from bootstrap_server.http.waiting import WAIT_MAX_S

__all__ = ["rank_number", "revision_of", "wait_s_of"]

_RANK_PATTERN: Final = re.compile("-?[0-9]{1,9}")
_REVISION_PATTERN: Final = re.compile("[0-9]{1,19}")
_SECONDS_PATTERN: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?")


def rank_number(request: web.Request, name: str) -> int:
    """A rank's number on one axis, or -1, from a query of `GET /route`."""
    text = request.query.get(name)
    if not text:
        raise RefusalError(400, f"GET /route: query parameter {name} is missing")
    # int() alone would also take "1_0", " 1" and digits of other scripts.
    if not _RANK_PATTERN.fullmatch(text):
        raise RefusalError(400, f"GET /route: query parameter {name} is not a rank: {text[:40]!r}")
    return int(text)


def wait_s_of(request: web.Request) -> float:
    """For how long the sender is ready to wait; 0 when he does not say."""
    text = request.query.get("wait_s", "0")
    if not _SECONDS_PATTERN.fullmatch(text) or float(text) > WAIT_MAX_S:
        raise RefusalError(
            400,
            f"query parameter wait_s must be a number of seconds up to {WAIT_MAX_S:g}: "
            f"{text[:40]!r}",
        )
    return float(text)


def revision_of(request: web.Request) -> int:
    """The revision that the sender has; 0 for none."""
    text = request.query.get("after", "0")
    if not _REVISION_PATTERN.fullmatch(text):
        raise RefusalError(
            400, f"query parameter after must be a revision number, not {text[:40]!r}"
        )
    return int(text)
