# SPDX-License-Identifier: Apache-2.0
"""What a router tells a registry of itself, for the status page: `PUT /v1/routers`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

__all__ = ["ROUTERS_PATH", "RouterReport", "Wells"]

ROUTERS_PATH: Final = "/v1/routers"
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Wells(msgspec.Struct, frozen=True):
    """How many servers of a role are well, of how many."""

    well: _Count
    all: _Count


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are since the router's start.

    `port` is its own; 0 if it is not known. `requests` are under way, of which `waiting` wait for
    their turn. Of the prompts' tokens (`prompt_tokens`), prefill servers had `cached_tokens` in a
    cache, and the router expected `expected_cached_tokens` there. `error` is the median of how far
    its expected times to the end of a prefill were off, as a part of the measured ones.
    """

    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    version: Annotated[str, msgspec.Meta(max_length=64)]
    requests: _Count
    waiting: _Count
    answered: _Count
    refused: _Count
    failed: _Count
    prefill: Wells
    decode: Wells
    prompt_tokens: _Count
    cached_tokens: _Count
    expected_cached_tokens: _Count
    error: Annotated[float, msgspec.Meta(ge=0)] | None = None
