# SPDX-License-Identifier: Apache-2.0
"""How requests to a registry, and its answers, prove that their sender has the secret. Pure.

One header each, `SGLang-Mooncake-Proof`:

    request   1 TIME_MS CLIENT NUMBER DIGEST MAC
    answer    1 MAC

TIME_MS is the client's clock since 1970. CLIENT is 16 random bytes of a process, NUMBER counts its
requests: the pair is the nonce, and a server needs to keep little of each client (`replays.py`).
DIGEST is the SHA-256 of the body: so a stranger is refused before his body is read. Bytes are in
lower-case hexadecimal digits. A request's MAC covers method, path with query, and what stands
before it in the header; an answer's covers the request's MAC, status, encoding and body as sent,
and is made with the key that the request was.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from bootstrap_server.admission.secret import mac

__all__ = [
    "HEADER",
    "Claim",
    "RequestProof",
    "digest_of",
    "key_of",
    "prove_answer",
    "prove_request",
]

HEADER: Final = "SGLang-Mooncake-Proof"
_REQUEST: Final = b"registry request 1"
_ANSWER: Final = b"registry answer 1"
_FORM: Final = re.compile(
    "1 ([0-9]{1,15}) ([0-9a-f]{32}) ([0-9]{1,18}) ([0-9a-f]{64}) ([0-9a-f]{64})", re.ASCII
)


class Claim(NamedTuple):
    """What a request says about itself."""

    time_ms: int
    client: bytes
    number: int
    body_digest: bytes

    def __str__(self) -> str:
        digest = self.body_digest.hex()
        return f"1 {self.time_ms} {self.client.hex()} {self.number} {digest}"


class RequestProof(NamedTuple):
    """The header of a request."""

    claim: Claim
    mac: bytes

    def __str__(self) -> str:
        return f"{self.claim} {self.mac.hex()}"

    @staticmethod
    def parse(header: str) -> RequestProof:
        """`ValueError` for anything else."""
        match = _FORM.fullmatch(header)
        if match is None:
            raise ValueError("the header is no proof of version 1")
        time_ms, client, number, digest, mac_text = match.groups()
        claim = Claim(int(time_ms), bytes.fromhex(client), int(number), bytes.fromhex(digest))
        return RequestProof(claim, bytes.fromhex(mac_text))


def digest_of(body: bytes | None) -> bytes:
    """SHA-256 of a body; no body and an empty one are the same."""
    return sha256(body or b"").digest()


def prove_request(key: bytes, method: str, path: str, claim: Claim) -> RequestProof:
    """The proof of a request; `path` with query, as it goes over the wire."""
    return RequestProof(claim, _mac_of_request(key, method, path, claim))


def key_of(keys: Sequence[bytes], method: str, path: str, proof: RequestProof) -> bytes | None:
    """That of `keys` with which the request was proved; None for none of them."""
    for key in keys:
        if hmac.compare_digest(_mac_of_request(key, method, path, proof.claim), proof.mac):
            return key
    return None


def prove_answer(key: bytes, request: RequestProof, status: int, encoding: str, body: bytes) -> str:
    """The header of the answer to a request; `encoding` is its Content-Encoding, or empty."""
    parts = (request.mac, str(status).encode("ascii"), encoding.encode("latin-1"), body)
    return f"1 {mac(key, _ANSWER, *parts).hex()}"


def _mac_of_request(key: bytes, method: str, path: str, claim: Claim) -> bytes:
    parts = (method, path, str(claim))
    # What is no UTF-8 on the wire is kept by surrogates, there and here.
    return mac(key, _REQUEST, *(part.encode("utf-8", "surrogateescape") for part in parts))
