# SPDX-License-Identifier: Apache-2.0
"""The client's half of the proofs: numbers its requests, and checks answers."""

from __future__ import annotations

import hmac
import itertools
import os
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse
from secrets import token_bytes
from typing import Final

from bootstrap_server.admission.proof import HEADER, Claim, digest_of, prove_answer, prove_request
from bootstrap_server.admission.replays import SKEW_MAX_S

__all__ = ["ClientProof"]

_SAME_SECRET: Final = "give all servers the same secret (SGLANG_MOONCAKE_SECRET_FILE)"


class _Process:
    """Numbers the requests of this process, over all threads and registries."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Be another client."""
        self.client = token_bytes(16)
        # One call of C, so that threads do not get the same number.
        self.numbers = itertools.count(1)


_process = _Process()
# A child must not go on with its parent's numbers.
os.register_at_fork(after_in_child=_process.begin)


class ClientProof:
    """The proof of one request that is about to be sent, and what its answer must prove."""

    def __init__(self, key: bytes, method: str, path: str, body: bytes | None) -> None:
        claim = Claim(
            time.time_ns() // 1_000_000, _process.client, next(_process.numbers), digest_of(body)
        )
        self._key, self._proof = key, prove_request(key, method, path, claim)

    @property
    def headers(self) -> dict[str, str]:
        """What goes out with the request."""
        return {HEADER: str(self._proof)}

    def refusal(self, response: HTTPResponse, encoding: str, body: bytes) -> str | None:
        """Why the answer is not one of our registry; `body` as it was sent. A sentence without a
        subject."""
        given = response.getheader(HEADER)
        if given is None:
            return _unproved(response.status, response.getheader("Date", ""))
        expected = prove_answer(self._key, self._proof, response.status, encoding, body)
        if not hmac.compare_digest(expected.encode("ascii"), given.encode("latin-1")):
            return (
                "answers with a wrong proof: somebody on the network changes its answers, "
                "or pretends to be it"
            )
        return None


def _unproved(status: int, date: str) -> str:
    if status not in (401, 429):  # the other says that we ask too often
        return (
            f"answers with status {status} and does not prove that it has our secret: it has "
            f"none, or is something else; {_SAME_SECRET}"
        )
    apart = _clocks_apart(date, time.time())
    if apart is not None:
        return f"refuses us: {apart}"
    return f"refuses us: it has another secret, and its log says more; {_SAME_SECRET}"


def _clocks_apart(date: str, now_s: float) -> str | None:
    """A sentence when the server's `Date` says that the clocks are too far apart."""
    try:
        theirs_s = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):  # it may be anything
        return None
    if abs(theirs_s - now_s) <= SKEW_MAX_S:
        return None
    return (
        f"its clock says {theirs_s:.0f} and ours {now_s:.0f} (seconds since 1970), which is more "
        f"than {SKEW_MAX_S:g} s apart: set the clocks"
    )
