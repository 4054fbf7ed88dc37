# SPDX-License-Identifier: Apache-2.0
"""Lets those alone register caches who prove that they have the deployment's secret, where there is
one: as registries let ranks register."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from bootstrap_server.admission.refusals import Refusals
from bootstrap_server.http.gate import Gate, guard
from sglang_mooncake.router.registered import REGISTER, UNREGISTER

__all__ = ["only_proved"]

_HOW: Final = "`sglang-mooncake register --secret-file` does"


def only_proved(keys: Sequence[bytes]) -> Middleware:
    """Of requests to ``REGISTER`` and ``UNREGISTER``; all others are let in as they are."""
    proved = guard(
        Gate(keys, how=_HOW),
        Refusals("registration").note,
        lambda _: None,
        told_to=lambda _: f"the router has a secret, and this request does not prove it: {_HOW}",
    )

    @web.middleware
    async def let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in (REGISTER, UNREGISTER):
            return await proved(request, handler)
        return await handler(request)

    return let_in
