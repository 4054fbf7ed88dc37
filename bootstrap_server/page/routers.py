# SPDX-License-Identifier: Apache-2.0
"""Routers that ask this registry for servers, for the status page. Pure: the caller passes the time
in."""

from __future__ import annotations

from typing import Final, NamedTuple

from bootstrap_server.page.heard import Heard
from bootstrap_server.ranks.router_report import RouterReport

__all__ = ["ROUTERS_MAX", "Router", "RoutersLately"]

ROUTERS_MAX: Final = 64


class Router(NamedTuple):
    """Where it is, what it told last, and when."""

    address: str
    report: RouterReport
    last_s: float


class RoutersLately:
    """Those that were heard lately; of more than `ROUTERS_MAX` the latest."""

    def __init__(self) -> None:
        #: By address and port.
        self._found: Heard[tuple[str, int], Router] = Heard(ROUTERS_MAX)

    def told(self, address: str, report: RouterReport, now_s: float) -> None:
        """The router at that address tells of itself."""
        self._found.put((address, report.port), Router(address, report, now_s))

    def lately(self, now_s: float) -> tuple[Router, ...]:
        """In the order of their addresses."""
        found = dict(self._found.lately(now_s))
        return tuple(found[key] for key in sorted(found))
