# SPDX-License-Identifier: Apache-2.0
"""As much HTTP as a rank needs to talk to a bootstrap server: one connection, bounded answers.

Over the standard library: a rank renews its lease for as long as it lives, beside a scheduler that
wants the interpreter (0.2 ms of it a request, where the requests package takes 0.7 ms).
"""

from __future__ import annotations

import http.client
import re
import zlib
from typing import Final

from bootstrap_server.errors import BootstrapError, Unreachable

__all__ = ["ANSWER_BYTES_MAX", "HttpClient"]

#: An instance of 65,536 ranks, the most a registry takes, makes about 10 MB of JSON.
ANSWER_BYTES_MAX: Final = 64 << 20
REASON_CHARS: Final = 200
PORT_MAX: Final = 65_535
_PART_BYTES: Final = 1 << 16
_ADDRESS: Final = re.compile(
    r"(?:\[(?P<v6>[^\s/@?#\[\]]+)\]|(?P<name>[^\s/@?#\[\]:]+)):(?P<port>[0-9]{1,5})"
)
#: Addresses that a server may listen on but nobody can be told to call.
_LOOPBACK_OF_WILDCARD: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class HttpClient:
    """Requests to `address` (`host:port`, IPv6 as `[host]:port`), from one thread.

    Follows no redirection and uses no proxy: ranks talk to each other directly. Waits
    `timeout_s` at most to connect, and again for each packet of an answer.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match["port"]) <= PORT_MAX:
            raise BootstrapError(f"bootstrap address {address!r} is not of the form host:port")
        host = match["v6"] or match["name"]
        self._address = address
        self._host = _LOOPBACK_OF_WILDCARD.get(host, host)
        self._port = int(match["port"])
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

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
        is no complete answer, `BootstrapError` when it is longer than any of a bootstrap server.
        """
        try:
            response = self._send(method, path, body, wait_s)
            status, answer = response.status, self._read(response)
            if response.will_close:
                self.close()
            return status, answer
        except (OSError, http.client.HTTPException, zlib.error, UnicodeError) as error:
            self.close()
            # An HTTPException may hold anything that a stranger has sent.
            reason = (str(error) if isinstance(error, OSError) else repr(error))[:REASON_CHARS]
            raise Unreachable(
                f"the bootstrap server at {self._address} cannot be reached: {reason}"
            ) from error
        except BaseException:
            self.close()
            raise

    def _send(
        self, method: str, path: str, body: bytes | None, wait_s: float
    ) -> http.client.HTTPResponse:
        """Send on the open connection; on a new one when the server has closed it meanwhile."""
        kept = self._connection
        if kept is not None:
            try:
                return self._send_on(kept, method, path, body, wait_s)
            except (ConnectionError, http.client.RemoteDisconnected):
                self.close()
        fresh = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._connection = fresh
        return self._send_on(fresh, method, path, body, wait_s)

    def _send_on(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        wait_s: float,
    ) -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "gzip"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, body, headers)
        connection.sock.settimeout(self._timeout_s + wait_s)
        return connection.getresponse()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        gzipped = response.getheader("Content-Encoding", "") == "gzip"
        unpack = zlib.decompressobj(wbits=31) if gzipped else None
        parts: list[bytes] = []
        size_bytes = 0
        while part := response.read(_PART_BYTES):
            if unpack is not None:
                part = unpack.decompress(part, ANSWER_BYTES_MAX + 1)
            parts.append(part)
            size_bytes += len(part)
            if size_bytes > ANSWER_BYTES_MAX:
                raise BootstrapError(
                    f"{self._address} answers with more than {ANSWER_BYTES_MAX} bytes, so it is "
                    "no bootstrap server (--disaggregation-bootstrap-port)"
                )
        # Reading in parts, http.client takes a connection that breaks off for the end.
        if response.length or (unpack is not None and not unpack.eof):
            raise http.client.IncompleteRead(b"".join(parts[-1:]), response.length)
        return b"".join(parts)
