# SPDX-License-Identifier: Apache-2.0
"""Which headers of a client are passed on to servers, and which of a server's answer to clients.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["NOT_OURS_TO_TELL", "request_headers"]

#: Headers that belong to a connection, or to the body as it was sent.
_OF_A_CONNECTION: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
NOT_OURS_TO_TELL: Final = _OF_A_CONNECTION | {"date", "server"}
"""Of an answer: they are not the server's to tell the client."""


def request_headers(headers: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    """What servers are told of a client's headers."""
    kept_back = set(_OF_A_CONNECTION)
    for name, value in headers.items():
        if name.lower() == "connection":  # It names further headers of this connection.
            kept_back.update(word.strip().lower() for word in value.split(","))
    passed = {k: v for k, v in headers.items() if k.lower() not in kept_back}
    # Answers are passed on as they are, and some are read: they must not be packed.
    passed["Accept-Encoding"] = "identity"
    if api_key is not None and not any(name.lower() == "authorization" for name in passed):
        passed["Authorization"] = f"Bearer {api_key}"
    return passed
