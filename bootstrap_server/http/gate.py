# SPDX-License-Identifier: Apache-2.0
"""Lets in who proves that he has the secret, before anything of a request is looked at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from bootstrap_server.admission.allowance import Allowance
from bootstrap_server.admission.crowd import source_of
from bootstrap_server.admission.proof import HEADER, RequestProof, key_of, prove_answer
from bootstrap_server.admission.replays import Replays
from bootstrap_server.http.body import RefusalError, check_body, error_response
from bootstrap_server.ranks.given_up import GIVEN_UP_PATH

__all__ = ["PROVED", "Gate", "guard"]

#: In requests that were proved.
PROVED: Final = web.RequestKey("proved", bool)
#: The first two tell no names, and those who ask for them (orchestrators, Prometheus) have no
#: secret. Who leaves a notice may have another one than we have, and then proves nothing.
_OPEN: Final = frozenset({("GET", "/health"), ("GET", "/metrics"), ("POST", GIVEN_UP_PATH)})


_HOW: Final = (
    "start it with the same SGLANG_MOONCAKE_SECRET_FILE; stock SGLang servers and tools cannot be "
    "served"
)


class Gate:
    """Decides by the keys of the registry; `clock` gives seconds since 1970. `how`: what the log
    tells of those who prove nothing."""

    def __init__(
        self,
        keys: Sequence[bytes],
        clock: Callable[[], float] = time.time,
        replays: Replays | None = None,
        *,
        how: str = _HOW,
    ) -> None:
        self._keys, self._clock, self._how = tuple(keys), clock, how
        self._replays = Replays() if replays is None else replays

    def admit(
        self, method: str, path: str, header: str | None, address: str
    ) -> tuple[bytes, RequestProof] | str:
        """The key and the proof of a request, or why it is refused."""
        if header is None:
            return f"it does not prove that it has our secret: {self._how}"
        try:
            proof = RequestProof.parse(header)
        except ValueError as error:
            return str(error)
        key = key_of(self._keys, method, path, proof)
        if key is None:
            return "wrong key: it has another secret than we have; give both the same"
        claim, now_s = proof.claim, self._clock()
        refusal = self._replays.refusal(
            claim.client, claim.number, claim.time_ms / 1e3, now_s, address
        )
        return (key, proof) if refusal is None else refusal


def guard(
    gate: Gate,
    refused: Callable[[str, str], None],
    proved: Callable[[web.Request], None],
    is_for_browsers: Callable[[web.Request], bool] = lambda _: False,
    told_to: Callable[[web.Request], str | None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Middleware:
    """A middleware that asks `gate` first, tells `refused` the address of each whom it does not let
    in, and why, and `proved` of the others, to whom it proves the answers. Strangers get status
    401, or 429 when they ask too often, and not a word but for the sentence that `told_to` has for
    their request. `is_for_browsers` says which requests need no proof, beside those that are open
    to all."""
    allowance = Allowance()

    def answer_to_stranger(source: str) -> web.Response | None:
        """None if he may have another one."""
        wait_s = allowance.wait_s(source, clock())
        if not wait_s:
            return None
        answer = web.Response(status=429, headers={"Retry-After": str(math.ceil(wait_s))})
        answer.force_close()
        return answer

    @web.middleware
    async def let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
        address = request.remote or "an unknown address"
        header = request.headers.get(HEADER)
        is_open = (request.method, request.raw_path) in _OPEN
        has_proof = header is not None and request.method == "POST"
        if (is_open and not has_proof) or (header is None and is_for_browsers(request)):
            answer = answer_to_stranger(source_of(address)) or await handler(request)
            # What else a stranger might begin over the connection is not waited for.
            answer.force_close()
            return answer
        admitted = gate.admit(request.method, request.raw_path, header, address)
        if isinstance(admitted, str):
            refused(address, admitted)
            answer = answer_to_stranger(source_of(address)) or web.Response(
                status=401, text=told_to(request) if header is None else None
            )
            answer.force_close()
            return answer
        key, proof = admitted
        try:
            await check_body(request, proof.claim.body_digest)
            proved(request)
            request[PROVED] = True
            response = await handler(request)
        except RefusalError as refusal:
            response = error_response(request, refusal)
        assert isinstance(response, web.Response)
        body = response.body or b""
        assert isinstance(body, bytes)
        encoding = response.headers.get("Content-Encoding", "")
        response.headers[HEADER] = prove_answer(key, proof, response.status, encoding, body)
        return response

    return let_in
