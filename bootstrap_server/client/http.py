# SPDX-License-Identifier: Apache-2.0
"""As much HTTP as a rank needs to talk to a bootstrap server: one connection, bounded answers.

Over the standard library: a rank renews its lease for as long as it lives, beside a scheduler that
wants the interpreter (0.2 ms of it a request, where the requests package takes 0.7 ms).
"""

from __future__ import annotations

import http.client
import re
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from bootstrap_server.client.proofs import ClientProof
from bootstrap_server.ranks.errors import BootstrapError, NeverServed, Unreachable, Why

__all__ = ["ANSWER_BYTES_MAX", "HttpClient", "split_address"]

#: An instance of 65,536 ranks, the most a registry takes, makes about 10 MB of JSON.
ANSWER_BYTES_MAX: Final = 64 << 20
REASON_CHARS: Final = 200
ADDRESS_CHARS: Final = 300
PORT_MAX: Final = 65_535
_PART_BYTES: Final = 1 << 16
#: An address that does not answer is dialled anew after so long. TCP asks again after 1, 3 and 7 s:
#: a host that was cut off would be found up to 4 s after it is back.
DIAL_S: Final = 0.9
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


class _DeadlineSocket(socket.socket):
    """No call waits beyond `deadline_s`, however the other side deals out its bytes."""

    #: Of the monotonic clock.
    deadline_s = 0.0

    def recv_into(self, *args: Any) -> int:
        self._allow_what_is_left()
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self._allow_what_is_left()
        super().sendall(*args)

    def _allow_what_is_left(self) -> None:
        self.settimeout(_left_s(self.deadline_s))


class _DeadlineConnection(http.client.HTTPConnection):
    """One connection whose requests each have one deadline for all that they are made of: to
    connect, to send, and for the answer's headers and body. (The resolver of names has limits of
    its own.)"""

    #: Of the monotonic clock, for the request under way.
    deadline_s = 0.0

    def connect(self) -> None:
        """To the first address that answers. They are asked again and again, unless all refuse."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        while True:
            problems: list[OSError] = []
            for tried, one in enumerate(found):
                try:
                    # One address that does not answer leaves time for the others.
                    share_s = _left_s(self.deadline_s) / (len(found) - tried)
                    self.sock = self._dial(one, min(share_s, DIAL_S))
                except OSError as error:
                    problems.append(error)
                else:
                    return
            is_silent = any(isinstance(one, TimeoutError) for one in problems)
            if not is_silent or time.monotonic() >= self.deadline_s:
                raise problems[-1]  # getaddrinfo never returns an empty list

    def _dial(self, found: Any, timeout_s: float) -> _DeadlineSocket:
        """To one address, as getaddrinfo has told it; ``OSError``."""
        family, kind, protocol, _, address = found
        sock = _DeadlineSocket(family, kind, protocol)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            raise
        sock.deadline_s = self.deadline_s
        return sock

    def begin(self, deadline_s: float) -> None:
        """The next request has to be over by then."""
        self.deadline_s = deadline_s
        if isinstance(self.sock, _DeadlineSocket):
            self.sock.deadline_s = deadline_s


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
        self._connection: _DeadlineConnection | None = None

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
        except (OSError, http.client.HTTPException, zlib.error, UnicodeError) as error:
            self.close()
            # An HTTPException may hold anything that a stranger has sent.
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
        fresh = _DeadlineConnection(self._host, self._port)
        self._connection = fresh
        return self._send_on(fresh, method, path, body, deadline_s)

    def _send_on(
        self,
        connection: _DeadlineConnection,
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


def _left_s(deadline_s: float) -> float:
    """Raises TimeoutError when nothing is left."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
