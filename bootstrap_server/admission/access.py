# SPDX-License-Identifier: Apache-2.0
"""Who may see the status page, which names hosts and what failed."""

from __future__ import annotations

import enum
import ipaddress

from aiohttp import web

__all__ = ["PAGE_PATHS", "StatusPage"]

#: `GET` of these is for browsers, which cannot prove that they have a secret.
PAGE_PATHS = ("/", "/v1/status")
_PAGE = "the registry's status page"


class StatusPage(enum.Enum):
    """Who may see it without proving that he has the secret."""

    #: Everybody who reaches the registry.
    OPEN = "open"
    #: Programs on the registry's own host, and so whoever forwards a port to it by ssh.
    LOCAL = "local"
    #: Nobody: there is none.
    OFF = "off"

    @staticmethod
    def default(has_secret: bool) -> StatusPage:
        """Without a secret everything that the page tells can be asked for anyway."""
        return StatusPage.LOCAL if has_secret else StatusPage.OPEN

    def is_for_browsers(self, request: web.Request) -> bool:
        """Whether this request needs no proof: it is for the page, and the page is for its
        sender."""
        return _asks_for_the_page(request) and self.refusal(request) is None

    def told_to(self, request: web.Request) -> str | None:
        """What somebody without a proof is told who asks for the page and may not see it: an
        operator with a browser elsewhere. None for every other request."""
        return self.refusal(request) if _asks_for_the_page(request) else None

    def refusal(self, request: web.Request) -> str | None:
        """Why the sender of this request may not see the page; None when he may."""
        if self is StatusPage.OPEN:
            return None
        if self is StatusPage.OFF:
            return f"{_PAGE} is switched off (--status-page off)"
        if not _is_from_this_host(request):
            return (
                f"{_PAGE} is shown on the registry's own host only (--status-page local): open it "
                "there, or forward a port: ssh -L 8998:127.0.0.1:PORT HOST"
            )
        if not _is_plain_host(request.host):
            # A site whose name was made to lead here (DNS rebinding) must not read it.
            return f"{_PAGE} is shown under an IP address or as localhost, not as {request.host!r}"
        return None


def _asks_for_the_page(request: web.Request) -> bool:
    return request.method == "GET" and request.raw_path.partition("?")[0] in PAGE_PATHS


def _is_from_this_host(request: web.Request) -> bool:
    if request.transport is None:
        return False
    peer, own = (request.transport.get_extra_info(name) for name in ("peername", "sockname"))
    if not peer or not own:
        return False
    address = _address(peer[0])
    return address is not None and (address.is_loopback or address == _address(own[0]))


def _is_plain_host(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name == "localhost" or _address(name.removeprefix("[").removesuffix("]")) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped
