# SPDX-License-Identifier: Apache-2.0
"""As much HTTP as a rank needs to talk to a bootstrap server: one connection, bounded answers.

Over the standard library, and not over an HTTP client that SGLang brings. Of those only aiohttp has
a deadline for the whole of a request; requests, httpx and urllib3 have one for each read. A rank
renews its lease for as long as it lives, beside a scheduler that wants the interpreter. A request
takes 0.12 ms of it here, 0.34 ms with aiohttp and 0.85 ms with requests. aiohttp would save the 60
lines of `deadline.py`, but it needs an event loop in each thread that asks. And when the server has
closed a connection that was kept, aiohttp asks again with the same proof, which the server refuses
as a replay.
"""

from __future__ import annotations

import http.client
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bootstrap_server.client.deadline import ANSWER_BYTES_MAX, DeadlineConnection
from bootstrap_server.client.proofs import ClientProof
from bootstrap_server.ranks.errors import BootstrapError, NeverServed, Unreachable, Why

__all__ = ["HttpClient", "split_address"]

REASON_CHARS: Final = 200
ADDRESS_CHARS: Final = 300
PORT_MAX: Final = 65_535
_PART_BYTES: Final = 1 << 16
_ADDRESS: Final = re.compile(
    r"(?:\[(?P<v6>[^\s/@?#\[\]]+)\]|(?P<name>[^\s/@?#\[\]:]+)):(?P<port>[0-9]{1,5})"
)
#: Addresses that a server may listen on but nobody can be told to call.
_LOOPBACK_OF_WILDCARD: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, IPv6 as `[host]:port`; `BootstrapError` for anything else."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= PORT_MAX:
        raise BootstrapError(
            f"bootstrap address {address[:ADDRESS_CHARS]!r} is not of the form host:port"
        )
    return match["v6"] or match["name"], int(match["port"])


class HttpClient:
    """Requests to `address` (`host:port`, IPv6 as `[host]:port`), from one thread.

    Follows no redirection and uses no proxy: ranks talk to each other directly. A request takes
    `timeout_s` at most, from connecting to the last byte of the answer, plus the time for which
    the server was asked to wait. `server` is what errors call the other side. With `keys` each
    request is proved with the first, and an answer that is not proved with it is an error.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        server: str = "the bootstrap server",
        *,
        keys: Sequence[bytes] = (),
    ) -> None:
        self._key = keys[0] if keys else None
        self._address, self._server = address, server
        host, self._port = split_address(address)
        self._host = _LOOPBACK_OF_WILDCARD.get(host, host)
        self._timeout_s = timeout_s
        self._connection: DeadlineConnection | None = None

    def close(self) -> None:
        """Close the connection. Idempotent; a later request opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(
        self, method: str, path: str, body: bytes | None = None, wait_s: float = 0.0
    ) -> tuple[int, bytes]:
        """Status and body of one request, which must be one that may be made twice.

        `wait_s` is how long the server was asked to take over it. Raises `Unreachable` when there
        is no complete answer, `BootstrapError` when it is longer than any that is expected, or is
        not proved.
        """
        try:
            response, proof = self._send(method, path, body, wait_s)
            status, answer = response.status, self._read(response, proof)
            if response.will_close:
                self.close()
            return status, answer
        # http.client raises ValueError, too: of a chunk that has less than no bytes, say.
        except (OSError, http.client.HTTPException, zlib.error, ValueError) as error:
            self.close()
            # All but an OSError may hold anything that a stranger has sent.
            reason = (str(error) if isinstance(error, OSError) else repr(error))[:REASON_CHARS]
            raise Unreachable(
                f"{self._server} at {self._address} cannot be reached: {reason}",
                nothing_listens=isinstance(error, ConnectionRefusedError),
            ) from error
        except BaseException:
            self.close()
            raise

    def _send(
        self, method: str, path: str, body: bytes | None, wait_s: float
    ) -> tuple[http.client.HTTPResponse, ClientProof | None]:
        """Send on the open connection; on a new one when the server has closed it meanwhile."""
        deadline_s = time.monotonic() + self._timeout_s + wait_s
        kept = self._connection
        if kept is not None:
            try:
                return self._send_on(kept, method, path, body, deadline_s)
            except (ConnectionError, http.client.RemoteDisconnected):
                self.close()
        fresh = DeadlineConnection(self._host, self._port)
        self._connection = fresh
        return self._send_on(fresh, method, path, body, deadline_s)

    def _send_on(
        self,
        connection: DeadlineConnection,
        method: str,
        path: str,
        body: bytes | None,
        deadline_s: float,
    ) -> tuple[http.client.HTTPResponse, ClientProof | None]:
        headers = {"Accept-Encoding": "gzip"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.begin(deadline_s)
        proof = None
        if self._key is not None:
            if connection.sock is None:
                # The time of a proof is that of sending.
                connection.connect()
            # A proof is good for one request: a second try needs another.
            proof = ClientProof(self._key, method, path, body)
            headers |= proof.headers
        connection.request(method, path, body, headers)
        return connection.getresponse(), proof

    def _read(self, response: http.client.HTTPResponse, proof: ClientProof | None) -> bytes:
        encoding = response.getheader("Content-Encoding", "")
        if proof is not None:
            # Nothing of a stranger's answer is unpacked.
            packed = b"".join(self._parts(response))
            refusal = proof.refusal(response, encoding, packed)
            if refusal is not None:
                raise NeverServed(f"{self._server} at {self._address} {refusal}", Why.SECRET)
            return b"".join(self._unpacked([packed], encoding))
        return b"".join(self._unpacked(self._parts(response), encoding))

    def _parts(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The body as it was sent."""
        size_bytes = 0
        while part := response.read(_PART_BYTES):
            size_bytes += len(part)
            self._check_size(size_bytes)
            yield part
        # Reading in parts, http.client takes a connection that breaks off for the end.
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)

    def _unpacked(self, parts: Iterable[bytes], encoding: str) -> Iterator[bytes]:
        if encoding != "gzip":
            yield from parts
            return
        unpack = zlib.decompressobj(wbits=31)
        size_bytes = 0
        for packed in parts:
            part = unpack.decompress(packed, ANSWER_BYTES_MAX + 1)
            size_bytes += len(part)
            self._check_size(size_bytes)
            yield part
        if not unpack.eof:
            raise http.client.IncompleteRead(b"")

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > ANSWER_BYTES_MAX:
            raise BootstrapError(
                f"{self._address} answers with more than {ANSWER_BYTES_MAX} bytes, so it is "
                f"not {self._server} (--disaggregation-bootstrap-port)"
            )
