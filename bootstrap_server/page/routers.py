# SPDX-License-Identifier: Apache-2.0
"""Routers that ask this registry for servers, for the status page. Pure: the caller passes the time
in."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from bootstrap_server.ranks.router_report import RouterReport

__all__ = ["KEPT_S", "ROUTERS_MAX", "Router", "RoutersLately"]

ROUTERS_MAX: Final = 64
KEPT_S: Final = 600.0


class Router(NamedTuple):
    """Where it is, what it told last, and when."""

    address: str
    report: RouterReport
    last_s: float


class RoutersLately:
    """Those that were heard in the last `KEPT_S`; of more than `ROUTERS_MAX` the latest."""

    def __init__(self) -> None:
        #: By address and port; the latest stands last.
        self._found: OrderedDict[tuple[str, int], Router] = OrderedDict()

    def told(self, address: str, report: RouterReport, now_s: float) -> None:
        """The router at that address tells of itself."""
        key = address, report.port
        self._found.pop(key, None)
        self._found[key] = Router(address, report, now_s)
        if len(self._found) > ROUTERS_MAX:
            self._found.popitem(last=False)

    def lately(self, now_s: float) -> tuple[Router, ...]:
        """In the order of their addresses."""
        while self._found and now_s - next(iter(self._found.values())).last_s >= KEPT_S:
            self._found.popitem(last=False)
        return tuple(self._found[key] for key in sorted(self._found))
